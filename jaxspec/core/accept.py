"""Acceptance rules: pure functions of the distributions, the draft and the noise.

A rule never draws: it is given its uniforms, so that it can be checked by hand and
integrated exactly. The last token is drawn apart, from the `next_log_probs` it returns.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.core.distributions import at, one_hot_log, residual_log_probs
from jaxspec.types import Draft, Verdict


def rejection(
    target_log_probs: Float[Array, "B N+1 V"],
    draft: Draft,
    uniforms: Float[Array, "B N"],
) -> Verdict:
    """Speculative sampling of a chain: the output has the target's distribution.

    Accepts draft token x with probability min(1, target(x) / draft(x)); at the first
    rejection the next token comes from the residual, after none from the target.
    Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2. A greedy row is
    the case of a one-hot target: a token is then accepted iff it is the arg-max.
    """
    rows, nodes = draft.tokens.shape
    if nodes == 0:
        path = jnp.zeros((rows, 1), jnp.int32)
        return Verdict(path, jnp.ones(rows, jnp.int32), target_log_probs[:, 0])
    target_probs = jnp.exp(at(target_log_probs[:, :-1], draft.tokens))
    draft_probs = _probs_of_drawn(draft)
    # Strict: a token that the target rules out is refused even where u is exactly 0.
    accept = (uniforms * draft_probs < target_probs) & draft.valid
    accepted = jnp.cumprod(accept, axis=-1).sum(axis=-1, dtype=jnp.int32)
    next_log_probs = _after(target_log_probs, draft, accepted)
    path = jnp.broadcast_to(jnp.arange(nodes + 1), (rows, nodes + 1))
    return Verdict(path, accepted + 1, next_log_probs)


def _probs_of_drawn(draft: Draft) -> Float[Array, "B N"]:
    """The draft's probability of each token it drew; 1 where it is deterministic."""
    if draft.log_probs is None:
        return jnp.ones(draft.tokens.shape, jnp.float32)
    return jnp.exp(at(draft.log_probs, draft.tokens))


def _after(target_log_probs, draft, accepted) -> Float[Array, "B V"]:
    """The distribution of the token after `accepted` draft tokens of each row.

    Only that one slot's residual is computed. Where nothing valid was refused (all were
    accepted, or the draft ended here) there is no draft probability to subtract.
    """
    nodes, vocabulary = draft.tokens.shape[1], target_log_probs.shape[-1]
    refused = jnp.minimum(accepted, nodes - 1)[:, None]
    was_refused = jnp.take_along_axis(draft.valid, refused, axis=1)[:, 0]
    was_refused &= accepted < nodes
    if draft.log_probs is None:
        token = jnp.take_along_axis(draft.tokens, refused, axis=1)[:, 0]
        draft_log_probs = one_hot_log(token, vocabulary)
    else:
        draft_log_probs = _row(draft.log_probs, refused[:, 0])
    own = _row(target_log_probs, accepted)
    residual = residual_log_probs(own, jnp.exp(draft_log_probs))
    return jnp.where(was_refused[:, None], residual, own)


def _row(log_probs, index) -> Float[Array, "B V"]:
    return jnp.take_along_axis(log_probs, index[:, None, None], axis=1)[:, 0]
