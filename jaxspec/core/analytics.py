"""What speculation should give: acceptance, tokens per round, speedup, the best k.

Formulas on arrays, in float32 and vectorised over the leading axes; no model is run. p
is the target's distribution of one token, q the draft's, and alpha the probability that
a draft token is accepted once all before it were. That is not the acceptance rate,
accepted / drafted, in which the tokens after a refusal are drafted as well.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from jaxspec.core.distributions import arg_max

# All probabilities under this, together, are less than a float32 rounding of 1 in any
# vocabulary; their squares, which gradients divide by, would underflow.
NEGLIGIBLE = 1e-15


def acceptance_probability(
    target_probs: Float[ArrayLike, "*B V"], draft_probs: Float[ArrayLike, "*B V"]
) -> Float[Array, "*B"]:
    """Alpha under `rejection`: sum_x min(p(x), q(x)) = 1 - TV(p, q).

    Leviathan et al. 2023, theorem 3.5 and corollary 3.6. No rule that keeps the
    target's distribution accepts a single draft token more often.
    """
    return jnp.minimum(_float(target_probs), _float(draft_probs)).sum(axis=-1)


def coupled_acceptance_probability(
    target_probs: Float[ArrayLike, "*B V"], draft_probs: Float[ArrayLike, "*B V"]
) -> Float[Array, "*B"]:
    """Alpha under `coupled`: sum_x 1 / sum_y max(p(y) / p(x), q(y) / q(x)).

    How often the Gumbel-max draws from p and from q agree if they share their noise;
    x is any token that both can draw. Between (1 - TV) / (1 + TV) and 1 - TV (Daliri,
    Musco and Suresh 2025, arXiv 2408.07978, on Gumbel sampling). A y takes the second
    ratio where q(y) / p(y) >= q(x) / p(x), so that one sort replaces V^2 pairs.
    """
    target_probs, draft_probs = _float(target_probs), _float(draft_probs)
    # q / (p + q) has the order of q / p, and no infinities.
    order, _ = _draft_share(target_probs, draft_probs)
    _, p, q = lax.sort((order, target_probs, draft_probs), num_keys=1)
    share, total = _draft_share(p, q)
    target_before = jnp.cumsum(p, axis=-1) - p
    draft_from_here = lax.cumsum(q, axis=q.ndim - 1, reverse=True)
    # 1 / (before / p + from_here / q), p and q being shares of their sum.
    below = draft_from_here * (1 - share) + target_before * share
    agree = total * share * (1 - share) / jnp.where(total > 0, below, 1.0)
    return agree.sum(axis=-1)


def accepted_length_probs(
    alphas: Float[ArrayLike, "*B k"],
) -> Float[Array, "*B k+1"]:
    """The probability of each accepted length 0..k of a chain of k draft tokens.

    P(n) = alpha_1 ... alpha_n (1 - alpha_(n+1)), and P(k) = alpha_1 ... alpha_k, with
    alpha_i for the draft's i-th token; a constant one is `jnp.full(k, alpha)`, and n
    then the capped geometric variable of Leviathan et al. 2023, section 3.1.
    """
    alphas = _float(alphas)
    refused = jnp.concatenate([1 - alphas, _ones(alphas.shape[:-1], 1)], axis=-1)
    return _reached(alphas) * refused


def expected_tokens(
    alpha: Float[ArrayLike, "*B"], k: Int[ArrayLike, "*B"]
) -> Float[Array, "*B"]:
    """Tokens per round: (1 - alpha^(k+1)) / (1 - alpha), and k + 1 for alpha = 1.

    Leviathan et al. 2023, equation 1; the token after the accepted ones is counted. It
    is the sum of alpha^0 to alpha^k, and is computed as that, by doubling: near 1 the
    quotient loses its digits, and its gradient all of them.
    """
    alpha, terms = jnp.broadcast_arrays(_float(alpha), jnp.asarray(k) + 1)
    highest = jnp.iinfo(terms.dtype).bits - 2

    def append_bit(state, place):
        # n is `terms` down to this bit, total the sum of the first n powers of alpha.
        total, power = state
        total, power = total * (1 + power), power * power
        is_set = (terms >> place) & 1 == 1
        total = jnp.where(is_set, 1 + alpha * total, total)
        return (total, jnp.where(is_set, alpha * power, power)), None

    start = jnp.zeros_like(alpha), jnp.ones_like(alpha)
    places = jnp.arange(highest, -1, -1, dtype=terms.dtype)
    return lax.scan(append_bit, start, places)[0][0]


def expected_tokens_by_length(
    alphas: Float[ArrayLike, "*B K"],
) -> Float[Array, "*B K+1"]:
    """Tokens per round for k = 0..K: 1 + sum_(n <= k) alpha_1 ... alpha_n."""
    return jnp.cumsum(_reached(_float(alphas)), axis=-1)


def simple_speedup(
    alpha: Float[ArrayLike, "*B"],
    k: Int[ArrayLike, "*B"],
    draft_speed: Float[ArrayLike, "*B"],
) -> Float[Array, "*B"]:
    """The estimate (1 + k alpha) / (1 + k / s) of the speedup, s being `draft_speed`.

    It counts every draft token as if those before it had been accepted, so it is right
    for k <= 1 and too high after; arguments as in `speedup`.
    """
    k = _float(k)
    return (1 + k * _float(alpha)) / (1 + k / _float(draft_speed))


def speedup(
    alpha: Float[ArrayLike, "*B"],
    k: Int[ArrayLike, "*B"],
    draft_speed: Float[ArrayLike, "*B"],
    verify_cost: Float[ArrayLike, "*B"] = 1.0,
) -> Float[Array, "*B"]:
    """The speedup over plain decoding: expected_tokens(alpha, k) / (k / s + c).

    Leviathan et al. 2023, theorem 3.8, which has c = 1: a verify costs what a plain
    forward does.

    Args:
        alpha: the probability that a draft token is accepted.
        k: draft tokens a round.
        draft_speed: s, the time of a target forward over that of a draft forward.
        verify_cost: c, the time of the verify over that of a plain target forward.
    """
    cost = _float(k) / _float(draft_speed) + _float(verify_cost)
    return expected_tokens(alpha, k) / cost


class DraftLength(NamedTuple):
    """A number of draft tokens a round, and what it gains over plain decoding."""

    k: Int[Array, "*B"]
    speedup: Float[Array, "*B"]


def best_draft_length(
    alphas: Float[ArrayLike, "*B K"],
    draft_cost: Float[ArrayLike, "*B"],
    verify_costs: Float[ArrayLike, "*B K+1"],
) -> DraftLength:
    """The k of 0..K with the most tokens per unit of time; k = 0 is plain decoding.

    Args:
        alphas: by place in the draft; a number or a last axis of 1 holds for all.
        draft_cost: the time of one draft step, in any unit.
        verify_costs: the times, in the same unit, of the target's forward of k + 1
            tokens for k = 0..K.

    Returns:
        The best k, the smallest of equals, and its speedup.

    Raises:
        ValueError: neither one nor K alphas were given.
    """
    costs, alphas = _float(verify_costs), jnp.atleast_1d(_float(alphas))
    longest, given = costs.shape[-1] - 1, alphas.shape[-1]
    if given not in (1, longest):
        raise ValueError(
            f"best_draft_length: {given} alphas, but verify_costs is for k = 0.."
            f"{longest}; give one alpha, or one for each of {longest} places"
        )
    alphas = jnp.broadcast_to(alphas, (*alphas.shape[:-1], longest))
    steps = jnp.arange(longest + 1, dtype=jnp.float32)
    times = steps * _float(draft_cost)[..., None] + costs
    gains = expected_tokens_by_length(alphas) * costs[..., :1] / times
    return DraftLength(arg_max(gains), gains.max(axis=-1))


def block_reach_probs(ratios: Float[ArrayLike, "*B k"]) -> Float[Array, "*B k"]:
    """P(at least i accepted | the first i draft tokens) under `block`, for i = 1..k.

    p_i = min(p_(i-1) r_i, 1) from p_0 = 1, where r_i = p(x_i) / q(x_i) of the token
    drawn (Sun et al. 2024, arXiv 2403.10444, algorithm 2). Given later tokens as well
    the probability is another, whose mean over them this is. The expected accepted
    length is the mean, over drafts drawn from q, of the sum over i.
    """
    ratios = _float(ratios)

    def step(reached, ratio):
        reached = jnp.minimum(reached * ratio, 1.0)
        return reached, reached

    start = _ones(ratios.shape[:-1])
    _, reached = lax.scan(step, start, jnp.moveaxis(ratios, -1, 0))
    return jnp.moveaxis(reached, 0, -1)


def block_expected_accepted(
    target_probs: Float[ArrayLike, "*B V"],
    draft_probs: Float[ArrayLike, "*B V"],
    k: int,
) -> Float[Array, "*B"]:
    """The expected accepted length under `block` if p and q hold at every place.

    The sum of E[p_i] over i = 1..k, with the p_i of `block_reach_probs`, by going
    through all V^k drafts: for a small V.
    """
    p, q = _float(target_probs), _float(draft_probs)
    ratio = jnp.where(q > 0, p / jnp.where(q > 0, q, 1.0), 0.0)
    drawn = reached = _ones(q.shape[:-1], 1)
    expected = jnp.zeros(q.shape[:-1], jnp.float32)
    for _ in range(k):
        drawn = _outer(drawn, q)
        reached = jnp.minimum(_outer(reached, ratio), 1.0)
        expected += (drawn * reached).sum(axis=-1)
    return expected


def _outer(left, right) -> Float[Array, "*B m*V"]:
    product = left[..., :, None] * right[..., None, :]
    return product.reshape(*product.shape[:-2], -1)


def _reached(alphas: Float[Array, "*B k"]) -> Float[Array, "*B k+1"]:
    """The probability that at least n are accepted, for n = 0..k."""
    factors = jnp.concatenate([_ones(alphas.shape[:-1], 1), alphas], axis=-1)
    return jnp.cumprod(factors, axis=-1)


def _draft_share(p, q) -> tuple[Float[Array, "*B V"], Float[Array, "*B V"]]:
    """Each token's q / (p + q) and p + q, both 0 where the sum is negligible."""
    present = p + q > NEGLIGIBLE
    total = jnp.where(present, p + q, 0.0)
    return jnp.where(present, q / jnp.where(present, total, 1.0), 0.0), total


def _float(value: ArrayLike) -> Array:
    return jnp.asarray(value, jnp.float32)


def _ones(leading: tuple[int, ...], *last: int) -> Array:
    return jnp.ones((*leading, *last), jnp.float32)
