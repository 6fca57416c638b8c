"""Acceptance rules: pure functions of the distributions, the draft and the noise.

A rule never draws: it is given its noise, so that it can be checked by hand and
integrated exactly. The last token is drawn apart, from the `next_log_probs` it returns.
A rule's `depth` is that of the tree which the draft is; without it the draft is a
chain, in which node i hangs on slot i.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.core import tree
from jaxspec.core.block import block
from jaxspec.core.distributions import sample
from jaxspec.core.refusal import after_refusals, at_nodes, draft_probs, row
from jaxspec.core.siblings import try_in_turn
from jaxspec.types import Draft, Verdict

# Cai et al. 2024: a token is typical above 0.09, or above 0.3 exp(-entropy).
TYPICAL_EPSILON, TYPICAL_DELTA = 0.09, 0.3


def rejection(
    target_log_probs: Float[Array, "B N+1 V"],
    draft: Draft,
    uniforms: Float[Array, "B N"],
    depth: int | None = None,
) -> Verdict:
    """Speculative sampling: the output has the target's distribution.

    Accepts draft token x with probability min(1, target(x) / draft(x)); at the first
    rejection the next token comes from the residual, after none from the target.
    Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2. A greedy row is
    the case of a one-hot target: a token is then accepted iff it is the arg-max.

    On a tree the children of a slot are tried in their order, each by the residual
    that the refused ones before it have left, and by the draft without their ids.
    Miao et al. 2024 (SpecInfer), algorithm 2; Jeon et al. 2024 (Recursive speculative
    decoding), section 3.2, for children drawn without replacement.
    """
    if draft.log_probs is not None and depth not in (None, draft.tokens.shape[1]):
        accepted, following = try_in_turn(target_log_probs, draft, uniforms)
        path, count, _ = tree.longest_path(draft.parents, accepted, depth)
        return Verdict(path, count + 1, following)
    earlier = tree.earlier_siblings(draft.parents)
    target_probs, left = _certain_children(target_log_probs, draft, earlier)
    # Strict: a token that the target rules out is refused even where u is exactly 0.
    accepted = uniforms * draft_probs(draft) * left < target_probs
    accepted &= draft.valid
    accepted &= ~(earlier & accepted[:, None, :]).any(axis=-1)
    path, count, last = tree.longest_path(draft.parents, accepted, depth)
    return Verdict(path, count + 1, after_refusals(target_log_probs, draft, last))


def coupled(
    target_log_probs: Float[Array, "B N+1 V"],
    draft: Draft,
    gumbel: Float[Array, "B depth+1 V"],
    depth: int | None = None,
) -> Verdict:
    """Plain sampling, foreseen: the ids are the target's own draws with this noise.

    The target draws at each slot with the noise of its depth, and a node is accepted
    iff it is that id. A drafter that draws with the same noise agrees often; whatever
    it proposes, no id changes. The next token is to be drawn with the noise at depth
    `count - 1`. Daliri, Musco, Suresh 2025 (Coupling without communication and
    drafter-invariant speculative decoding).
    """
    levels = tree.depths(tree.ancestry(draft.parents))
    by_slot = jnp.take_along_axis(gumbel, levels[:, :, None], axis=1)
    drawn = sample(target_log_probs, by_slot)
    is_drawn = draft.tokens == jnp.take_along_axis(drawn, draft.parents, axis=1)
    return _by_own_rows(target_log_probs, draft, is_drawn, depth)


def typical(
    target_log_probs: Float[Array, "B N+1 V"],
    draft: Draft,
    noise: Float[Array, "B ..."],
    depth: int | None = None,
) -> Verdict:
    """Typical acceptance, which is LOSSY: the output is not the target's.

    Accepts a token x iff target(x) > min(epsilon, delta exp(-entropy of the target)),
    whatever the draft's distribution and the noise: likely tokens are always taken, so
    the output leans to what the drafter proposes. Cai et al. 2024 (Medusa), section
    2.3.1, with epsilon 0.09 and delta 0.3. Of a tree the longest path of such tokens is
    taken. A greedy row is exact: of a one-hot target only the arg-max is typical.
    """
    log_probs = target_log_probs.astype(jnp.float32)
    probs = jnp.exp(log_probs)
    # The limit of p log p at 0 is 0, the product is NaN.
    entropy = -jnp.where(probs > 0, probs * log_probs, 0.0).sum(axis=-1)
    threshold = jnp.minimum(TYPICAL_EPSILON, TYPICAL_DELTA * jnp.exp(-entropy))
    threshold = jnp.take_along_axis(threshold, draft.parents, axis=1)
    is_typical = jnp.exp(at_nodes(log_probs, draft)) > threshold
    # A token drawn from NaN is refused, as under every rule.
    is_typical &= ~jnp.isnan(draft_probs(draft))
    return _by_own_rows(target_log_probs, draft, is_typical, depth)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Rule:
    """An acceptance rule and what the loop must know of it; static under jit.

    Attributes:
        name: its key in `RULES`.
        decide: the rule, a function of (target_log_probs[B, N+1, V], draft, noise,
            depth), the last static.
        shares_noise: drafter and target draw with one Gumbel noise per position, and
            `decide` takes Gumbel[B, depth+1, V] by depth; else uniforms[B, N] by node.
        lossless: the output has the target's distribution.
        trees: it takes drafts that are no chains.
    """

    name: str
    decide: Callable[[Array, Draft, Array, int | None], Verdict]
    shares_noise: bool = False
    lossless: bool = True
    trees: bool = True


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("rejection", rejection),
        Rule("block", block, trees=False),
        Rule("coupled", coupled, shares_noise=True),
        Rule("typical", typical, lossless=False),
    )
}


def _by_own_rows(target_log_probs, draft, accepted, depth) -> Verdict:
    """The verdict of a rule under which a refusal tells nothing of the next token."""
    accepted &= draft.valid
    path, count, last = tree.longest_path(draft.parents, accepted, depth)
    return Verdict(path, count + 1, row(target_log_probs, last))


def _certain_children(target_log_probs, draft, earlier):
    """The target's probability of each node, and of all that is left when it is tried.

    A drafter that is certain of several children of a slot has refused ones removed
    from the target; an id that an earlier sibling has is left no probability.
    """
    probs = jnp.exp(at_nodes(target_log_probs, draft)).astype(jnp.float32)
    if draft.log_probs is not None:
        return probs, 1.0
    before = earlier & draft.valid[:, None, :]
    repeated = before & (draft.tokens[:, :, None] == draft.tokens[:, None, :])
    probs = jnp.where(repeated.any(axis=-1), 0.0, probs)
    gone = jnp.where(before, probs[:, None, :], 0.0).sum(axis=-1)
    # Never below zero: rounding must not let an impossible token pass.
    return probs, jnp.maximum(1 - gone, 0.0)
