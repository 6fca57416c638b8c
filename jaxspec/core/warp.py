"""The one warp: from logits to the log-probabilities that are sampled from.

The same function serves plain decoding, the drafter and every verified node, so the
distribution that a draft token was drawn from is the one its test divides by. The order
is temperature, top-k, top-p, min-p. No step sorts the vocabulary: top-k and top-p are
searches for a threshold by masked sums, and ties at the threshold are kept.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxspec.core.adjust import LARGEST_FLOAT
from jaxspec.core.distributions import log_softmax
from jaxspec.core.sampling import Sampling

# The bits of the largest finite float32: no distance from the maximum is above it.
LARGEST = 0x7F7FFFFF


def warp(logits: Float[Array, "B m V"], sampling: Sampling) -> Float[Array, "B m V"]:
    """Log-probabilities after the row's options; a greedy row's are the raw ones."""
    # Float32 before any difference is taken; a logit of plus infinity is a certainty,
    # not the NaN that infinity less infinity gives.
    logits = jnp.minimum(logits.astype(jnp.float32), LARGEST_FLOAT)

    def sampled(logits):
        greedy = sampling.greedy[:, None, None]
        temperature = jnp.where(sampling.greedy, 1.0, sampling.temperature)
        # Relative to the maximum, so that a tiny temperature cannot overflow upwards.
        centred = logits - logits.max(axis=-1, keepdims=True)
        below = -centred / temperature[:, None, None]
        kept = below <= _cut(below, sampling)
        return log_softmax(jnp.where(greedy, logits, jnp.where(kept, -below, -jnp.inf)))

    # Greedy batches pay for no search; all rows share the branch.
    return lax.cond(sampling.greedy.all(), log_softmax, sampled, logits)


def _cut(below: Float[Array, "B m V"], sampling: Sampling) -> Float[Array, "B m 1"]:
    """The largest distance below the maximum that every option keeps."""
    column = lambda option: option[:, None, None]  # noqa: E731
    cut = jnp.full((*below.shape[:-1], 1), jnp.inf)
    if sampling.top_k is not None:
        size = below.shape[-1]
        k = jnp.where(sampling.top_k > 0, sampling.top_k, size)
        ones = jnp.ones_like(below)
        cut = _threshold(below, ones, column(jnp.minimum(k, size)).astype(jnp.float32))
    if sampling.top_p is not None:
        # Relative to what top-k kept.
        weights = jnp.where(below <= cut, jnp.exp(-below), 0.0)
        top_p = column(sampling.top_p)
        found = _threshold(below, weights, top_p * weights.sum(axis=-1, keepdims=True))
        # 1 keeps all: a float32 sum is complete before its smallest terms are in it.
        cut = jnp.where(top_p < 1, jnp.minimum(cut, found), cut)
    if sampling.min_p is not None:
        cut = jnp.minimum(cut, -jnp.log(column(sampling.min_p)))
    return cut


def _threshold(
    below: Float[Array, "B m V"],
    weights: Float[Array, "B m V"],
    wanted: Float[Array, "B m 1"],
) -> Float[Array, "B m 1"]:
    """The smallest distance within which the weights add up to `wanted`.

    Bisection over the bits of the distance: those of non-negative floats are ordered as
    integers, so 31 halvings find the exact entry. If rounding keeps even the sum of all
    from reaching `wanted`, everything is kept.
    """

    def halve(_, bounds):
        low, high = bounds  # within low: too little; within high: enough
        middle = low + (high - low) // 2
        distance = lax.bitcast_convert_type(middle, jnp.float32)
        within = jnp.where(below <= distance, weights, 0.0)
        enough = within.sum(axis=-1, keepdims=True) >= wanted
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    low = jnp.full((*below.shape[:-1], 1), -1, jnp.int32)
    high = jnp.full_like(low, LARGEST)
    _, high = lax.fori_loop(0, 31, halve, (low, high))
    # Where nothing is wanted (top_p 0) even -1 is enough, and no distance has its bits.
    return lax.bitcast_convert_type(jnp.maximum(high, 0), jnp.float32)
