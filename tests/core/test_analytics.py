import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxspec.core import analytics, noise
from jaxspec.core.accept import block, coupled, rejection
from jaxspec.core.distributions import sample
from tests.core.enumeration import ALMOST_1, Tables, logs, make_draft, rows_of

P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.6, 0.1, 0.3])
DRAWS = 50_000
# Some float32 roundings of 6e-8 each.
CLOSE = {"rtol": 2e-6, "atol": 2e-7}
# Of a frequency in DRAWS draws: five standard deviations, 1 failure in 2 million.
FIVE_SIGMA = 5 * np.sqrt(0.25 / DRAWS)


def tables(seed, rows, size):
    """Pairs of distributions: alike, unlike, with zeros, equal and disjoint."""
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(size, 0.5), (2, rows))
    q[::3] = 0.7 * p[::3] + 0.3 * q[::3]
    p[-1, size // 2 :], q[-1, : size // 2] = 0, 0
    for probs in (p[1::3], q[2::3]):
        probs[probs < 0.3 * probs.max(axis=-1, keepdims=True)] = 0
    q[-2] = p[-2]
    return (x / x.sum(axis=-1, keepdims=True) for x in (p, q))


def by_pairs(p, q):
    """The acceptance of shared Gumbel noise, V^2 pairs at a time."""
    shared = np.flatnonzero((p > 0) & (q > 0))
    ratios = (np.maximum(p / p[x], q / q[x]).sum() for x in shared)
    return sum(1 / ratio for ratio in ratios)


@functools.cache
def gumbels(slots, purpose, size):
    draw = jax.jit(noise.gumbels, static_argnums=(3, 4))
    slots = jnp.broadcast_to(jnp.arange(slots), (DRAWS, slots))
    keys = noise.seed_keys(range(DRAWS))
    return draw(keys, jnp.full(DRAWS, 5), slots, purpose, size)


# Acceptance of one token


def test_acceptance_is_1_minus_the_distance():
    p, q = tables(0, 60, 8)
    found = analytics.acceptance_probability(p, q)
    np.testing.assert_allclose(found, 1 - np.abs(p - q).sum(axis=-1) / 2, **CLOSE)
    assert found[-1] == 0
    np.testing.assert_allclose(found[-2], 1, **CLOSE)


@pytest.mark.parametrize("size", [2, 3, 50])
def test_coupled_acceptance_equals_the_sum_over_pairs(size):
    p, q = tables(size, 60, size)
    found = np.asarray(analytics.coupled_acceptance_probability(p, q))
    right = np.array([by_pairs(*row) for row in zip(p, q, strict=True)])
    np.testing.assert_allclose(found, right, **CLOSE)
    overlap = np.minimum(p, q).sum(axis=-1)
    assert (found <= overlap + 1e-6).all()
    assert (found >= overlap / (2 - overlap) - 1e-6).all()


def test_coupled_acceptance_of_a_certain_token_is_its_probability():
    found = analytics.coupled_acceptance_probability(np.eye(3), [Q] * 3)
    np.testing.assert_allclose(found, Q, **CLOSE)
    found = analytics.coupled_acceptance_probability([P] * 3, np.eye(3))
    np.testing.assert_allclose(found, P, **CLOSE)


def test_coupled_acceptance_of_a_large_vocabulary():
    rng = np.random.default_rng(3)
    logits = 4 * rng.normal(size=(2, 152_000))
    logits[1] = 0.8 * logits[0] + 0.6 * logits[1]
    logits[:, 1000:2000] -= 60  # below what a float32 can square
    logits[:, 2000:3000] -= 100  # below what it can hold
    p, q = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    found = analytics.coupled_acceptance_probability(p, q)
    p, q = (x[np.argsort(q / p)] for x in (p, q))
    before, from_here = np.cumsum(p) - p, np.cumsum(q[::-1])[::-1]
    # A sum of 152k float32 terms.
    assert abs(found - (1 / (before / p + from_here / q)).sum()) < 1e-5


def test_the_coupled_rule_accepts_as_often_as_the_formula_says():
    shared = gumbels(2, noise.NEXT_TOKEN, 3)
    target = jnp.broadcast_to(logs(P), (DRAWS, 2, 3))
    told = jnp.broadcast_to(logs(Q), (DRAWS, 1, 3))
    draft = make_draft(sample(told, shared[:, :1]), told)
    agree = np.mean(jax.jit(coupled)(target, draft, shared).count == 2)
    found = analytics.coupled_acceptance_probability(P, Q)
    assert abs(agree - found) < FIVE_SIGMA
    # The control: that is not how often `rejection` accepts.
    assert abs(agree - analytics.acceptance_probability(P, Q)) > FIVE_SIGMA


# Accepted lengths and tokens per round


def lengths_by_outcomes(alphas):
    probs = np.zeros(len(alphas) + 1)
    for outcome in np.ndindex(*(2,) * len(alphas)):
        length = int(np.cumprod(outcome).sum())
        probs[length] += np.where(outcome, alphas, 1 - alphas).prod()
    return probs


@pytest.mark.parametrize("k", [0, 1, 7])
def test_accepted_lengths_equal_the_sum_over_outcomes(k):
    alphas = np.random.default_rng(k).random((5, k))
    alphas[0], alphas[1], alphas[2, 1:2] = 0, 1, 0
    found = analytics.accepted_length_probs(alphas)
    right = [lengths_by_outcomes(row) for row in alphas]
    np.testing.assert_allclose(found, right, **CLOSE)
    tokens = (found * np.arange(1, k + 2)).sum(axis=-1)
    by_length = analytics.expected_tokens_by_length(alphas)
    np.testing.assert_allclose(by_length[:, -1], tokens, **CLOSE)
    np.testing.assert_allclose(by_length[1], np.arange(1, k + 2), **CLOSE)


def test_the_rule_accepts_as_many_as_the_formula_says():
    target, draft = tables(4, 6, 5)
    target, draft = target[:5], draft[:4]
    drafting = gumbels(4, noise.DRAFT_TOKEN, 5)
    slots = jnp.broadcast_to(jnp.arange(4), (DRAWS, 4))
    keys, lengths = noise.seed_keys(range(DRAWS)), jnp.full(DRAWS, 5)
    uniforms = jax.jit(noise.uniforms)(keys, lengths, slots, noise.ACCEPT)
    told = jnp.broadcast_to(logs(draft), (DRAWS, 4, 5))
    rows = jnp.broadcast_to(logs(target), (DRAWS, 5, 5))
    draft_drawn = make_draft(sample(told, drafting), told)
    verdict = jax.jit(rejection)(rows, draft_drawn, uniforms)
    found = np.bincount(verdict.count - 1, minlength=5)
    alphas = np.minimum(target[:4], draft).sum(axis=-1)
    assert chi_square(found, analytics.accepted_length_probs(alphas)) > 1e-4
    # The control: the same acceptances in another order.
    wrong = analytics.accepted_length_probs(alphas[::-1])
    assert chi_square(found, wrong) < 1e-12


def chi_square(counts, probs):
    probs = np.asarray(probs, np.float64)
    assert (counts.sum() * probs > 5).all()
    return stats.chisquare(counts, counts.sum() * probs / probs.sum()).pvalue


def test_expected_tokens_is_the_sum_of_powers():
    alpha = np.array([0, 1e-30, 0.1, 0.5, 0.8, 0.999, 1 - 2.0**-24, 1])[:, None]
    k = np.array([0, 1, 2, 4, 7, 20, 63, 1000])
    powers = alpha[..., None] ** np.arange(1001)
    right = np.where(np.arange(1001) <= k[:, None], powers, 0).sum(axis=-1)
    # As float32 holds alpha: its rounding is raised to the power k.
    tolerance = {"rtol": 1e-6 + 2.0**-24 * 1000}
    np.testing.assert_allclose(analytics.expected_tokens(alpha, k), right, **tolerance)
    assert np.array_equal(analytics.expected_tokens(1.0, k), k + 1.0)
    assert np.array_equal(analytics.expected_tokens(0.0, k), np.ones(8))


def test_the_slope_of_expected_tokens_keeps_its_digits_near_1():
    alpha = np.float32([0, 1e-30, 0.5, 0.99, 1 - 1e-4, 1 - 2.0**-24, 1])[:, None]
    k, n = np.array([0, 1, 4, 20]), np.arange(1, 21)
    grid = jnp.broadcast_to(alpha, (7, 4))
    slopes = jax.grad(lambda alpha: analytics.expected_tokens(alpha, k).sum())(grid)
    terms = n * alpha.astype(float)[..., None] ** (n - 1.0)
    right = np.where(n <= k[:, None], terms, 0).sum(axis=-1)
    np.testing.assert_allclose(slopes, right, **CLOSE)


def test_expected_tokens_needs_a_whole_k():
    with pytest.raises(ValueError, match="integer"):
        analytics.expected_tokens(0.8, 4.5)


# Speedup and the best k


def test_the_speedups_are_the_formulas():
    rng = np.random.default_rng(5)
    alpha, speed, cost = rng.random(50), rng.uniform(1, 50, 50), rng.uniform(1, 3, 50)
    k = rng.integers(0, 21, 50)
    found = analytics.simple_speedup(alpha, k, speed)
    np.testing.assert_allclose(found, (1 + k * alpha) / (1 + k / speed), **CLOSE)
    found = analytics.speedup(alpha, k, speed, cost)
    tokens = (1 - alpha ** (k + 1)) / (1 - alpha)
    np.testing.assert_allclose(found, tokens / (k / speed + cost), rtol=1e-5)


def test_the_simple_speedup_is_right_for_one_token_and_too_high_for_more():
    alpha, speed = np.linspace(0, 1, 11)[:, None], 8.0
    k = np.arange(21)
    simple = analytics.simple_speedup(alpha, k, speed)
    exact = analytics.speedup(alpha, k, speed)
    np.testing.assert_allclose(simple[:, :2], exact[:, :2], **CLOSE)
    np.testing.assert_allclose(simple[::10], exact[::10], **CLOSE)
    assert (simple[1:-1, 2:] > exact[1:-1, 2:]).all()
    assert np.array_equal(exact[:, 0], np.ones(11))


def test_the_best_draft_length_wins_against_every_other():
    rng = np.random.default_rng(6)
    rows, longest = 200, 8
    alphas = rng.random((rows, longest)) ** 0.3
    draft_cost = rng.uniform(0.1, 8, rows)
    costs = 20 + rng.uniform(0, 10, (rows, longest + 1)).cumsum(axis=-1)
    found = analytics.best_draft_length(alphas, draft_cost, costs)
    reached = np.concatenate([np.ones((rows, 1)), alphas.cumprod(axis=-1)], axis=-1)
    time = np.arange(longest + 1) * draft_cost[:, None] + costs
    speed = reached.cumsum(axis=-1) / time
    gain = speed / speed[:, :1]
    assert np.array_equal(found.k, gain.argmax(axis=-1))
    np.testing.assert_allclose(found.speedup, gain.max(axis=-1), **CLOSE)
    assert np.unique(found.k).size > 5


def test_one_alpha_holds_for_every_place():
    costs = np.array([[20.0, 26, 29, 31, 36], [20, 40, 60, 80, 100]])
    expected = analytics.best_draft_length(np.full((2, 4), 0.8), 3.0, costs)
    assert expected.k.tolist() == [3, 0]
    for alpha in (0.8, [0.8], [[0.8], [0.8]]):
        found = analytics.best_draft_length(alpha, 3.0, costs)
        assert found.k.tolist() == [3, 0]
        np.testing.assert_allclose(found.speedup, expected.speedup, rtol=1e-7)


def test_the_best_draft_length_agrees_with_the_speedup():
    found = analytics.best_draft_length(0.8, 1.0, np.full(21, 8.0))
    gains = analytics.speedup(0.8, np.arange(21), 8.0)
    assert found.k == np.argmax(gains)
    np.testing.assert_allclose(found.speedup, gains.max(), **CLOSE)


@pytest.mark.parametrize(("alpha", "costs"), [(0.0, [1.0] * 5), (0.9, [2.0])])
def test_plain_decoding_is_best_where_drafts_are_useless_or_none(alpha, costs):
    assert analytics.best_draft_length(alpha, 0.0, costs) == (0, 1)


def test_a_wrong_number_of_alphas_is_named():
    with pytest.raises(ValueError, match=r"3 alphas.*k = 0\.\.4"):
        analytics.best_draft_length([0.8] * 3, 1.0, [1.0] * 5)


# Block verification


def test_the_papers_example_of_block_verification():
    # Sun et al. 2024, section 2: 10/9 tokens by token, 11/9 by block.
    target, draft = [1 / 3, 2 / 3], [2 / 3, 1 / 3]
    alpha = analytics.acceptance_probability(target, draft)
    assert abs(analytics.expected_tokens(alpha, 2) - 1 - 10 / 9) < 1e-6
    assert abs(analytics.block_expected_accepted(target, draft, 2) - 11 / 9) < 1e-6


def test_block_lengths_are_the_mean_over_all_drafts():
    p, q = tables(7, 12, 3)
    drafts = np.array(list(np.ndindex(3, 3, 3, 3)))
    drawn = q[:, drafts].prod(axis=-1)
    ratios = np.where(q > 0, p / np.where(q > 0, q, 1), 0)[:, drafts]
    reached = np.asarray(analytics.block_reach_probs(ratios))
    found = analytics.block_expected_accepted(p, q, 4)
    right = (drawn * reached.sum(axis=-1)).sum(axis=-1)
    np.testing.assert_allclose(found, right, **CLOSE)
    by_token = analytics.expected_tokens(analytics.acceptance_probability(p, q), 4) - 1
    assert (found >= by_token - 1e-6).all()
    assert np.array_equal(analytics.block_expected_accepted(p, q, 0), np.zeros(12))


def thresholds(rule, target, draft, tokens):
    """For each draft and node, the uniform below which the rule keeps it.

    By bisection, with all other nodes' uniforms too high to be kept; 1 where a later
    node is kept whatever its uniform.
    """
    rows, nodes = tokens.shape
    told = make_draft(
        np.repeat(tokens, nodes, axis=0), logs(np.repeat(draft, nodes, 0))
    )
    target, own = logs(np.repeat(target, nodes, 0)), np.tile(np.eye(nodes), (rows, 1))
    low, high = np.zeros(rows * nodes), np.ones(rows * nodes)
    for _ in range(24):
        middle = (low + high) / 2
        uniforms = np.where(own, middle[:, None], ALMOST_1).astype(np.float32)
        kept = np.asarray(rule(target, told, uniforms).count) > own.argmax(axis=-1) + 1
        low, high = np.where(kept, middle, low), np.where(kept, high, middle)
    return high.reshape(rows, nodes)


@pytest.mark.parametrize("kind", ["smooth", "zeros", "equal"])
@pytest.mark.parametrize(("size", "nodes"), [(2, 1), (3, 3), (2, 5)])
def test_block_keeps_as_many_as_the_formula_says(size, nodes, kind):
    """Exact: over all drafts, and the uniforms integrated."""
    tables = Tables(9, size, nodes, kind)
    drafts = np.array(list(np.ndindex(*(size,) * nodes)))
    target, draft = rows_of(tables.target, drafts), rows_of(tables.draft, drafts)
    refused = 1 - thresholds(jax.jit(block), target, draft, drafts)
    given_all = 1 - refused[:, ::-1].cumprod(axis=-1)[:, ::-1]

    own = drafts[:, :, None]
    drawn = np.take_along_axis(draft, own, axis=-1)[..., 0]
    wanted = np.take_along_axis(target[:, :-1], own, axis=-1)[..., 0]
    ratios = np.where(drawn > 0, wanted / np.where(drawn > 0, drawn, 1), 0)
    found = analytics.block_reach_probs(ratios)
    for place in range(nodes):
        rest = drawn[:, place + 1 :].prod(axis=-1)
        by_prefix = (rest * given_all[:, place]).reshape(size ** (place + 1), -1)
        possible = (drawn[:, : place + 1] > 0).all(axis=-1)
        right = np.repeat(by_prefix.sum(axis=-1), size ** (nodes - place - 1))
        # Thresholds are quotients of float32 sums, of rows off by 1e-7.
        error = np.abs(found[:, place] - right)[possible]
        assert error.max() < 5e-6
    # The control: by token, the same drafts are kept less far.
    by_token = np.minimum(ratios, 1).cumprod(axis=-1)
    if kind != "equal" and nodes > 1:
        assert np.abs(found - by_token)[drawn.all(axis=-1)].max() > 0.01


# What holds for all


@pytest.mark.parametrize("name", ["acceptance", "coupled_acceptance"])
def test_acceptance_has_finite_slopes(name):
    p, q = (jnp.asarray(x, jnp.float32) for x in tables(8, 30, 6))
    tiny = jnp.array([[1e-38, 1e-30, 1e-18, 1e-12, 1e-6, 1.0]])
    p, q = jnp.concatenate([p, tiny, tiny]), jnp.concatenate([q, tiny, tiny[:, ::-1]])
    function = getattr(analytics, f"{name}_probability")
    slopes = jax.grad(lambda *args: function(*args).sum(), argnums=(0, 1))(p, q)
    assert np.isfinite(slopes).all()


def test_the_other_slopes_are_finite_at_the_limits():
    def total(alpha):
        alphas = jnp.full(4, alpha)
        probs = jnp.stack([alpha, 1 - alpha])
        gain = analytics.best_draft_length(alphas, 1.0, jnp.full(5, 8.0)).speedup
        return (
            analytics.accepted_length_probs(alphas)[2]
            + analytics.expected_tokens_by_length(alphas).sum()
            + analytics.simple_speedup(alpha, 4, 8.0)
            + analytics.speedup(alpha, 4, 8.0)
            + analytics.block_reach_probs(alphas).sum()
            + analytics.block_expected_accepted(probs, jnp.array([0.5, 0.5]), 3)
            + gain
        )

    slopes = jax.jit(jax.vmap(jax.grad(total)))(jnp.array([0, 0.5, 1]))
    assert np.isfinite(slopes).all()


def test_all_is_float32_under_x64_and_strict_promotion():
    p, q, alphas = [P] * 2, [Q] * 2, np.full((2, 4), 0.8)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        found = [
            analytics.acceptance_probability(p, q),
            analytics.coupled_acceptance_probability(p, q),
            analytics.accepted_length_probs(alphas),
            analytics.expected_tokens(alphas, np.array([0, 1, 2, 4])),
            analytics.expected_tokens_by_length(alphas),
            analytics.simple_speedup(0.8, np.array([4, 20]), 8.0),
            analytics.speedup(0.8, np.array([4, 20]), 8.0),
            analytics.best_draft_length(alphas, 1.0, np.full((2, 5), 8.0)).speedup,
            analytics.block_reach_probs(alphas),
            analytics.block_expected_accepted(p, q, 2),
        ]
    assert {array.dtype for array in found} == {jnp.dtype(jnp.float32)}
