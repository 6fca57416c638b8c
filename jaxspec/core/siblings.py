"""Siblings that were drawn without replacement, tried one by one."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.distributions import at, log_softmax, residual_log_probs
from jaxspec.core.refusal import at_nodes, draft_probs, row
from jaxspec.types import Draft


class Walk(NamedTuple):
    """How far a row has come down the tree.

    Attributes:
        slot: the deepest accepted one.
        shrunk: a child of it was refused. Only then do the next two mean anything.
        target: what the refused children have left of the target's log-probabilities.
        draft: the log-probabilities that the next child was drawn by: of the ids left.
    """

    slot: Int[Array, " B"]
    shrunk: Bool[Array, " B"]
    target: Float[Array, "B V"]
    draft: Float[Array, "B V"]


def try_in_turn(
    target_log_probs: Float[Array, "B N+1 V"],
    draft: Draft,
    uniforms: Float[Array, "B N"],
) -> tuple[Bool[Array, "B N"], Float[Array, "B V"]]:
    """Tries the children of each accepted slot, in the order of their slots.

    One pass over the nodes is enough, since a child's slot is above its parent's. Whole
    rows of the vocabulary are read only where a child is refused.

    Returns:
        Which nodes are accepted, and the distribution of the token after the last.
    """

    def step(walk, node):
        slot, token, parent, valid, uniform, *probs = node
        tried = valid & (parent == walk.slot)
        left = (jnp.exp(at(each, token)) for each in (walk.target, walk.draft))
        target, drawn = (
            jnp.where(walk.shrunk, *each) for each in zip(left, probs, strict=True)
        )
        accepted = tried & (uniform * drawn < target)
        refused = tried & ~accepted
        target, drawn = lax.cond(
            refused.any(),
            lambda: _refuse(target_log_probs, draft, walk, refused, token),
            lambda: (walk.target, walk.draft),
        )
        slot = jnp.where(accepted, slot, walk.slot)
        shrunk = (walk.shrunk & ~accepted) | refused
        return Walk(slot, shrunk, target, drawn), accepted

    rows, nodes = draft.tokens.shape
    nothing = jnp.zeros((rows, target_log_probs.shape[-1]), jnp.float32)
    walk = Walk(jnp.zeros(rows, jnp.int32), jnp.zeros(rows, bool), nothing, nothing)
    target_probs = jnp.exp(at_nodes(target_log_probs, draft))
    by_node = (draft.tokens, draft.parents, draft.valid, uniforms)
    by_node += (target_probs.astype(jnp.float32), draft_probs(draft))
    slots = jnp.arange(1, nodes + 1, dtype=jnp.int32)
    walk, accepted = lax.scan(step, walk, (slots, *(each.T for each in by_node)))
    own = row(target_log_probs, walk.slot)
    return accepted.T, jnp.where(walk.shrunk[:, None], walk.target, own)


def _refuse(target_log_probs, draft, walk: Walk, refused, token):
    """Takes what the refused token was drawn by from the target, and it from the draft.

    A draft that is not a number stays so: its next children are refused as well, and
    leave the target as it is.
    """
    before = walk.shrunk[:, None]
    target = jnp.where(before, walk.target, row(target_log_probs, walk.slot))
    # A refused child has a parent, so its slot has a row.
    own = jnp.minimum(walk.slot, draft.log_probs.shape[1] - 1)
    drawn = jnp.where(before, walk.draft, row(draft.log_probs, own))
    left = jnp.where(jnp.arange(drawn.shape[1]) == token[:, None], -jnp.inf, drawn)
    # By logarithms: what is left after a nearly certain id underflows.
    left = log_softmax(left)
    refused = refused[:, None]
    return (
        jnp.where(refused, residual_log_probs(target, jnp.exp(drawn)), walk.target),
        jnp.where(refused, left, walk.draft),
    )
