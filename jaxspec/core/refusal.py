"""What a rule needs of a draft's nodes, and what refused ones leave of the target."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.core.distributions import residual_log_probs
from jaxspec.types import Draft


def at_nodes(log_probs: Float[Array, "B m V"], draft: Draft) -> Float[Array, "B N"]:
    """The entry of each node's token in the row of the slot it hangs on."""
    entries = jax.vmap(lambda rows, parents, tokens: rows[parents, tokens])
    return entries(log_probs, draft.parents, draft.tokens)


def draft_probs(draft: Draft) -> Float[Array, "B N"]:
    """The draft's probability of each token it drew; 1 where it is deterministic."""
    if draft.log_probs is None or draft.tokens.shape[1] == 0:
        return jnp.ones(draft.tokens.shape, jnp.float32)
    return jnp.exp(at_nodes(draft.log_probs, draft))


def row(log_probs: Float[Array, "B m V"], slot: Int[Array, " B"]) -> Array:
    """The distribution after one slot of each row."""
    return jnp.take_along_axis(log_probs, slot[:, None, None], axis=1)[:, 0]


def after_refusals(
    target_log_probs: Float[Array, "B N+1 V"],
    draft: Draft,
    last: Int[Array, " B"],
    kept: Float[Array, " B"] | None = None,
) -> Float[Array, "B V"]:
    """The distribution of the token after `last`, the deepest accepted slot of a row.

    Its valid children, if it has any, were refused: of one drawn child the residual of
    target and draft is left, of certain ones the target without their ids. With
    `kept[B]`, above 0, it is the residual of kept * target - draft: normalised, the one
    of target - draft / kept.
    """
    own = row(target_log_probs, last)
    if draft.tokens.shape[1] == 0:
        return own
    refused = draft.valid & (draft.parents == last[:, None])
    if draft.log_probs is None:
        ids = jnp.arange(target_log_probs.shape[-1])
        named = refused[:, :, None] & (draft.tokens[:, :, None] == ids)
        drawn = named.any(axis=1).astype(jnp.float32)
    else:
        # A slot without a row has no child: what stands there is not used.
        drawn = jnp.exp(row(draft.log_probs, jnp.minimum(last, _rows(draft) - 1)))
    if kept is not None:
        drawn /= kept[:, None]
    residual = residual_log_probs(own, drawn)
    return jnp.where(refused.any(axis=1, keepdims=True), residual, own)


def _rows(draft: Draft) -> int:
    assert draft.log_probs is not None
    return draft.log_probs.shape[1]
