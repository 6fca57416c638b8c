"""Block verification: a rule that decides on whole prefixes of a chain."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxspec.core.distributions import at
from jaxspec.core.refusal import after_refusals, at_nodes, draft_probs
from jaxspec.types import Draft, Verdict


def block(
    target_log_probs: Float[Array, "B N+1 V"],
    draft: Draft,
    uniforms: Float[Array, "B N"],
    depth: int | None = None,
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
    following = after_refusals(target_log_probs, draft, accepted, at(ratios, accepted))
    path = jnp.broadcast_to(
        jnp.arange(kept.shape[1] + 1, dtype=jnp.int32), ratios.shape
    )
    return Verdict(path, accepted + 1, following)


def _prefix_ratios(target_log_probs, draft) -> Float[Array, "B N+1"]:
    """`block`'s p_0 to p_N; never NaN, and 0 from an impossible token on."""

    def extend(before, probs):
        target, draft = probs
        joint = before * target
        # Divides only where the quotient is below 1: never by 0.
        kept = jnp.where(joint < draft, joint / draft, jnp.where(joint > 0, 1.0, 0.0))
        return kept, kept

    target_probs = jnp.exp(at_nodes(target_log_probs, draft))
    drawn = (target_probs.astype(jnp.float32).T, draft_probs(draft).T)
    first = jnp.ones(draft.tokens.shape[0], jnp.float32)
    # Unrolled: nodes are few, and one fused kernel beats a loop of tiny ones.
    kept = lax.scan(extend, first, drawn, unroll=True)[1].T
    return jnp.concatenate([first[:, None], kept], axis=1)


def _prefix_excess(target_log_probs, draft, kept) -> Float[Array, "B N"]:
    """`block`'s S_0 to S_{N-1}: the sum of max(0, p_i target - draft) at each slot."""
    if draft.log_probs is None:
        # All of p_i but the share of the one token that the draft is certain of.
        return kept * (1 - jnp.exp(at_nodes(target_log_probs, draft)))
    target_probs = jnp.exp(target_log_probs[:, :-1].astype(jnp.float32))
    return jnp.maximum(
        kept[:, :, None] * target_probs - jnp.exp(draft.log_probs), 0.0
    ).sum(axis=-1)


def _next_column(values: Array) -> Array:
    """Shifted left by one node; zero (or False) in the last."""
    return jnp.pad(values, ((0, 0), (0, 1)))[:, 1:]
