import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxspec.core import distributions, noise
from tests import oracles

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "index"),
    [
        ([1.0, 3.0, 2.0], 1),
        ([3.0, 1.0, 3.0], 0),
        ([0.0, -0.0, 0.0], 0),
        ([1.0, INF, 2.0], 1),
        ([-INF, -INF, -1e30], 2),
        ([-INF, -INF, -INF], 0),
    ],
)
def test_arg_max_is_the_lowest_index_of_the_largest(values, index):
    assert distributions.arg_max(jnp.array([values])).tolist() == [index]


@pytest.mark.parametrize("bad", [[NAN] * 4, [0.0, NAN, 1.0, 2.0], [-INF, -INF, NAN, 0]])
def test_a_row_that_is_not_numbers_still_gives_an_id_of_the_vocabulary(bad):
    rows = jnp.array([bad, [0.0, 2.0, 1.0, 0.0]], jnp.float32)
    found = distributions.sample(rows, jnp.zeros_like(rows))
    assert 0 <= int(found[0]) < 4
    assert int(found[1]) == 1


def test_arg_max_equals_numpy_on_random_rows_with_ties():
    values = np.random.default_rng(0).integers(0, 5, (4, 50, 300)).astype(np.float32)
    found = distributions.arg_max(jnp.asarray(values))
    assert found.dtype == jnp.int32
    assert np.array_equal(found, values.argmax(axis=-1))


def test_one_hot_and_at_are_inverse():
    index = jnp.array([[0, 3], [2, 1]])
    rows = distributions.one_hot_log(index, 4)
    assert rows.shape == (2, 2, 4)
    assert np.array_equal(np.exp(rows), np.eye(4)[np.asarray(index)])
    assert np.array_equal(distributions.arg_max(rows), index)
    assert np.array_equal(distributions.at(rows, index), np.zeros((2, 2)))


def test_fit_vocabulary_cuts_the_extra_and_makes_the_missing_impossible():
    logits = jnp.array([[1.0, 2.0, 3.0]])
    assert distributions.fit_vocabulary(logits, 2).tolist() == [[1.0, 2.0]]
    assert distributions.fit_vocabulary(logits, 3).tolist() == [[1.0, 2.0, 3.0]]
    assert distributions.fit_vocabulary(logits, 5).tolist() == [[1, 2, 3, -INF, -INF]]
    half = distributions.fit_vocabulary(logits.astype(jnp.bfloat16), 5)
    assert half.dtype == jnp.bfloat16


def test_log_softmax_is_float32_whatever_comes_in():
    values = np.random.default_rng(1).normal(0, 5, (3, 40)).astype(np.float32)
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        given = jnp.asarray(values, dtype)
        found = distributions.log_softmax(given)
        assert found.dtype == jnp.float32
        expected = np.log(oracles.softmax(np.asarray(given, np.float64)))
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_residual_of_random_rows_equals_the_oracle():
    rng = np.random.default_rng(2)
    target = oracles.softmax(rng.normal(0, 2, (50, 7))).astype(np.float32)
    draft = oracles.softmax(rng.normal(0, 2, (50, 7))).astype(np.float32)
    found = distributions.residual_log_probs(jnp.log(target), jnp.asarray(draft))
    expected = [oracles.residual(p, q) for p, q in zip(target, draft, strict=True)]
    # Differences of numbers below 1, rounded at 6e-8 and divided by sums above 0.05.
    np.testing.assert_allclose(np.exp(found), expected, atol=3e-6)


def test_a_zero_residual_and_a_draft_that_is_not_numbers_give_the_target():
    target = jnp.log(jnp.array([[0.5, 0.3, 0.2]]))
    same = distributions.residual_log_probs(target, jnp.exp(target))
    assert np.array_equal(same, target)
    bad = distributions.residual_log_probs(target, jnp.full((1, 3), NAN))
    np.testing.assert_allclose(bad, target, atol=1e-6)


def test_sample_draws_from_the_distribution():
    probs = np.array([0.05, 0.0, 0.6, 0.1, 0.25])
    draws = 50_000
    keys, lengths = noise.seed_keys(range(draws)), jnp.ones(draws, jnp.int32)
    slots = jnp.zeros((draws, 1), jnp.int32)
    draw = jax.jit(noise.gumbels, static_argnums=4)
    gumbel = draw(keys, lengths, slots, noise.NEXT_TOKEN, 5)[:, 0]
    with np.errstate(divide="ignore"):
        rows = jnp.broadcast_to(np.log(probs).astype(np.float32), (draws, 5))
    counts = np.bincount(distributions.sample(rows, gumbel), minlength=5)
    possible = probs > 0
    assert counts[1] == 0
    assert fit(counts, probs, possible) > 1e-4
    wrong = np.array([0.04, 0.0, 0.59, 0.11, 0.26])
    assert fit(counts, wrong, possible) < 1e-12


def fit(counts, probs, possible):
    expected = probs[possible] * counts.sum()
    return stats.chisquare(counts[possible], expected).pvalue


def test_largest_says_when_nothing_is_left():
    values = jnp.array([[-jnp.inf, 2.0, 3.0], [0.0, -jnp.inf, -jnp.inf], [1.0, 1, 1]])
    ids, entries = distributions.largest(values, 3)
    assert ids[0, :2].tolist() == [2, 1] and ids[1, 0] == 0
    assert ids[2].tolist() == [0, 1, 2]
    assert entries.tolist() == [[3, 2, -jnp.inf], [0, -jnp.inf, -jnp.inf], [1, 1, 1]]
