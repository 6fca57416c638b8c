"""Acceptance rules: pure functions of the distributions, the draft and the noise.

A rule never draws: it is given its noise, so that it can be checked by hand and
integrated exactly. The last token is drawn apart, from the `next_log_probs` it returns.
All rules are of chains: node i hangs on slot i.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.distributions import at, one_hot_log, residual_log_probs, sample
from jaxspec.types import Draft, Verdict

# Cai et al. 2024: a token is typical above 0.09, or above 0.3 exp(-entropy).
TYPICAL_EPSILON, TYPICAL_DELTA = 0.09, 0.3


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
    target_probs = jnp.exp(at(target_log_probs[:, :-1], draft.tokens))
    draft_probs = _probs_of_drawn(draft)
    # Strict: a token that the target rules out is refused even where u is exactly 0.
    accepted = _leading((uniforms * draft_probs < target_probs) & draft.valid)
    return _verdict(draft, accepted, _after(target_log_probs, draft, accepted))


def block(
    target_log_probs: Float[Array, "B N+1 V"],
    draft: Draft,
    uniforms: Float[Array, "B N"],
) -> Verdict:
    """Block verification of a chain: the output has the target's distribution.

    Decides on whole prefixes: of n draft tokens the longest prefix i is kept for which
    u_i < S_i / (S_i + 1 - p_i), where p_i = min(1, p_{i-1} target(x_i) / draft(x_i)),
    p_0 = 1, S_i is the sum of max(0, p_i target - draft) over what follows prefix i,
    and S_n = p_n. The next token comes from that positive part. In expectation a block
    keeps no fewer tokens than under `rejection`. Sun et al. 2024, algorithm 2.

    A draft ends before a node that is invalid or was drawn from NaN.
    """
    ratios = _prefix_ratios(target_log_probs, draft)
    excess = _prefix_excess(target_log_probs, draft, ratios[:, :-1])
    # One NaN in a row makes its sum NaN: the draft ends there, nothing was refused.
    usable = jnp.cumprod(draft.valid & ~jnp.isnan(excess), axis=-1).astype(bool)
    kept = ratios[:, 1:]
    share = jnp.where(_next_column(usable), _next_column(excess), kept)
    # Strict as in `rejection`. The fraction has the limit 1 at p = 1 even if S is 0,
    # where the product would refuse.
    accept = (uniforms * (share + (1 - kept)) < share) | (kept >= 1)
    lengths = jnp.arange(1, kept.shape[1] + 1, dtype=jnp.int32)
    accepted = jnp.where(accept & usable, lengths, 0).max(axis=-1, initial=0)
    following = _after(target_log_probs, draft, accepted, at(ratios, accepted))
    return _verdict(draft, accepted, following)


def coupled(
    target_log_probs: Float[Array, "B N+1 V"],
    draft: Draft,
    gumbel: Float[Array, "B depth+1 V"],
) -> Verdict:
    """Plain sampling, foreseen: the ids are the target's own draws with this noise.

    The target draws at each slot with the noise of its depth, and a node is accepted
    iff it is that id. A drafter that draws with the same noise agrees often; whatever
    it proposes, no id changes. The next token is to be drawn with the noise at depth
    `count - 1`. Daliri, Musco, Suresh 2025 (Coupling without communication and
    drafter-invariant speculative decoding).
    """
    drawn = sample(target_log_probs[:, :-1], gumbel[:, :-1])
    return _by_own_rows(target_log_probs, draft, draft.tokens == drawn)


def typical(
    target_log_probs: Float[Array, "B N+1 V"],
    draft: Draft,
    noise: Float[Array, "B ..."],
) -> Verdict:
    """Typical acceptance, which is LOSSY: the output is not the target's.

    Accepts a token x iff target(x) > min(epsilon, delta exp(-entropy of the target)),
    whatever the draft's distribution and the noise: likely tokens are always taken, so
    the output leans to what the drafter proposes. Cai et al. 2024 (Medusa), section
    2.3.1, with epsilon 0.09 and delta 0.3. A greedy row is exact: of a one-hot target
    only the arg-max is typical.
    """
    log_probs = target_log_probs[:, :-1].astype(jnp.float32)
    probs = jnp.exp(log_probs)
    # The limit of p log p at 0 is 0, the product is NaN.
    entropy = -jnp.where(probs > 0, probs * log_probs, 0.0).sum(axis=-1)
    threshold = jnp.minimum(TYPICAL_EPSILON, TYPICAL_DELTA * jnp.exp(-entropy))
    is_typical = jnp.exp(at(log_probs, draft.tokens)) > threshold
    # A token drawn from NaN is refused, as under every rule.
    is_typical &= ~jnp.isnan(_probs_of_drawn(draft))
    return _by_own_rows(target_log_probs, draft, is_typical)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Rule:
    """An acceptance rule and what the loop must know of it; static under jit.

    Attributes:
        name: its key in `RULES`.
        decide: the rule, a function of (target_log_probs[B, N+1, V], draft, noise).
        shares_noise: drafter and target draw with one Gumbel noise per position, and
            `decide` takes Gumbel[B, depth+1, V] by depth; else uniforms[B, N] by node.
        lossless: the output has the target's distribution.
    """

    name: str
    decide: Callable[[Array, Draft, Array], Verdict]
    shares_noise: bool = False
    lossless: bool = True


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("rejection", rejection),
        Rule("block", block),
        Rule("coupled", coupled, shares_noise=True),
        Rule("typical", typical, lossless=False),
    )
}


def _leading(accept: Bool[Array, "B N"]) -> Int[Array, " B"]:
    """How many nodes are accepted before the first that is not."""
    return jnp.cumprod(accept, axis=-1).sum(axis=-1, dtype=jnp.int32)


def _verdict(draft, accepted, next_log_probs) -> Verdict:
    rows, nodes = draft.tokens.shape
    path = jnp.broadcast_to(jnp.arange(nodes + 1, dtype=jnp.int32), (rows, nodes + 1))
    return Verdict(path, accepted + 1, next_log_probs)


def _by_own_rows(target_log_probs, draft, accept) -> Verdict:
    """The verdict of a rule under which a refusal tells nothing of the next token."""
    accepted = _leading(accept & draft.valid)
    return _verdict(draft, accepted, _row(target_log_probs, accepted))


def _probs_of_drawn(draft: Draft) -> Float[Array, "B N"]:
    """The draft's probability of each token it drew; 1 where it is deterministic."""
    if draft.log_probs is None:
        return jnp.ones(draft.tokens.shape, jnp.float32)
    return jnp.exp(at(draft.log_probs, draft.tokens))


def _prefix_ratios(target_log_probs, draft) -> Float[Array, "B N+1"]:
    """`block`'s p_0 to p_N; never NaN, and 0 from an impossible token on."""

    def extend(before, probs):
        target, draft = probs
        joint = before * target
        # Divides only where the quotient is below 1: never by 0.
        kept = jnp.where(joint < draft, joint / draft, jnp.where(joint > 0, 1.0, 0.0))
        return kept, kept

    target_probs = jnp.exp(at(target_log_probs[:, :-1], draft.tokens))
    drawn = (target_probs.astype(jnp.float32).T, _probs_of_drawn(draft).T)
    first = jnp.ones(draft.tokens.shape[0], jnp.float32)
    # Unrolled: nodes are few, and one fused kernel beats a loop of tiny ones.
    kept = lax.scan(extend, first, drawn, unroll=True)[1].T
    return jnp.concatenate([first[:, None], kept], axis=1)


def _prefix_excess(target_log_probs, draft, kept) -> Float[Array, "B N"]:
    """`block`'s S_0 to S_{N-1}: the sum of max(0, p_i target - draft) at each slot."""
    if draft.log_probs is None:
        # All of p_i but the share of the one token that the draft is certain of.
        return kept * (1 - jnp.exp(at(target_log_probs[:, :-1], draft.tokens)))
    target_probs = jnp.exp(target_log_probs[:, :-1].astype(jnp.float32))
    return jnp.maximum(
        kept[:, :, None] * target_probs - jnp.exp(draft.log_probs), 0.0
    ).sum(axis=-1)


def _next_column(values: Array) -> Array:
    """Shifted left by one node; zero (or False) in the last."""
    return jnp.pad(values, ((0, 0), (0, 1)))[:, 1:]


def _after(target_log_probs, draft, accepted, kept=None) -> Float[Array, "B V"]:
    """The distribution of the token after `accepted` draft tokens of each row.

    With `kept[B]`, above 0, the residual is that of kept * target - draft: normalised,
    the one of target - draft / kept.

    Only that one slot's residual is computed. Where nothing valid was refused (all were
    accepted, or the draft ended here) there is no draft probability to subtract.
    """
    own = _row(target_log_probs, accepted)
    nodes, vocabulary = draft.tokens.shape[1], target_log_probs.shape[-1]
    if nodes == 0:
        return own
    refused = jnp.minimum(accepted, nodes - 1)[:, None]
    was_refused = jnp.take_along_axis(draft.valid, refused, axis=1)[:, 0]
    was_refused &= accepted < nodes
    if draft.log_probs is None:
        token = jnp.take_along_axis(draft.tokens, refused, axis=1)[:, 0]
        draft_log_probs = one_hot_log(token, vocabulary)
    else:
        draft_log_probs = _row(draft.log_probs, refused[:, 0])
    draft_probs = jnp.exp(draft_log_probs)
    if kept is not None:
        draft_probs /= kept[:, None]
    residual = residual_log_probs(own, draft_probs)
    return jnp.where(was_refused[:, None], residual, own)


def _row(log_probs, index) -> Float[Array, "B V"]:
    return jnp.take_along_axis(log_probs, index[:, None, None], axis=1)[:, 0]
