"""The tests that a certificate is made of find what is wrong, and nothing else."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from jaxspec.certify.draws import reach_probs
from jaxspec.certify.plain import Followed, Shared
from jaxspec.certify.statistics import binomial, chi_square, uniform_scores

SAMPLES = 5000
P = np.array([0.4, 0.1, 0.3, 0.2])


def drawn(probs, target=P, seed=0):
    """Draws from `probs`, with what plain decoding from `target` says of them."""
    tokens = np.random.default_rng(seed).choice(4, (SAMPLES, 2), p=probs)
    before = np.array([target[target > own].sum() for own in target])
    followed = (target[tokens], before[tokens])
    return SimpleNamespace(tokens=tokens, followed=followed)


def test_scores_of_the_target_are_even_and_independent():
    scores = uniform_scores(drawn(P), seed=1)
    assert (scores >= 0).all() and (scores < 1).all()
    for column in scores.T:
        assert stats.kstest(column, "uniform").pvalue > 1e-3
    assert chi_square(scores[:, :1]) > 1e-3
    assert chi_square(scores) > 1e-3


@pytest.mark.parametrize("wrong", [[0.5, 0.05, 0.3, 0.15], [0.35, 0.15, 0.3, 0.2]])
def test_scores_of_another_distribution_are_not(wrong):
    scores = uniform_scores(drawn(wrong), seed=1)
    assert chi_square(scores[:, :1]) < 1e-12
    assert chi_square(scores) < 1e-12


def test_neighbours_that_depend_on_each_other_are_seen_together_only():
    draws = drawn(P)
    draws.tokens[:, 1] = draws.tokens[:, 0]
    draws.followed = tuple(each[:, [0, 0]] for each in draws.followed)
    scores = uniform_scores(draws, seed=1)
    assert chi_square(scores[:, 1:]) > 1e-3
    assert chi_square(scores) < 1e-12


def test_an_impossible_token_has_a_score_at_the_end():
    draws = SimpleNamespace(
        tokens=np.zeros((3, 1), int), followed=(np.zeros((3, 1)), np.ones((3, 1)))
    )
    scores = uniform_scores(draws, seed=0)
    assert (scores < 1).all() and (scores > 0.99).all()


@pytest.mark.parametrize("samples", [50, 500, 5000])
@pytest.mark.parametrize("dimensions", [1, 2])
def test_p_values_are_those_of_scipy_and_even(samples, dimensions):
    rng = np.random.default_rng(samples)
    found = [chi_square(rng.random((samples, dimensions))) for _ in range(300)]
    assert stats.kstest(found, "uniform").pvalue > 1e-4
    scores = rng.random((samples, 1)) ** 1.05
    sides = min(samples // 5, 20)
    seen = np.bincount((scores[:, 0] * sides).astype(int), minlength=sides)
    assert chi_square(scores) == pytest.approx(stats.chisquare(seen).pvalue, rel=1e-3)


def test_too_few_samples_are_no_test():
    with pytest.raises(ValueError, match="9 samples are too few"):
        chi_square(np.random.default_rng(0).random((9, 1)))


def test_the_sum_of_unequal_events():
    rng = np.random.default_rng(3)
    found = []
    for _ in range(400):
        probs = rng.random(600)
        found.append(binomial(rng.random(600) < probs, probs))
    # Corrected for continuity: never too small, and nearly even.
    found = np.sort(found)
    assert (found >= (np.arange(400) + 1) / 400 - 0.08).all()
    assert np.mean(np.array(found) < 0.5) > 0.4
    probs = rng.random(600)
    assert binomial(rng.random(600) < 0.7 * probs, probs) < 1e-6


@pytest.mark.parametrize("certain", [0.0, 1.0, 1 - 1e-7])
def test_certain_events(certain):
    probs = np.full(700, certain)
    assert binomial(probs > 0.5, probs) == 1.0
    assert binomial(probs < 0.5, probs) < 1e-12


def test_one_rare_event_is_no_wonder():
    probs = np.full(640, 1 - 1e-5)
    happened = np.ones(640, bool)
    assert binomial(happened, probs) == 1.0
    happened[3] = False
    exact = stats.binomtest(1, 640, 1e-5, alternative="greater").pvalue
    assert binomial(happened, probs) == pytest.approx(2 * exact, rel=0.01)


def test_reach_of_each_rule_by_hand():
    p, q = np.array([[0.2, 0.9, 0.1]]), np.array([[0.4, 0.3, 0.2]])
    alone = Followed(p, p, None)
    shared = Shared(np.array([[0.5, 0.5, 0.2]]), p, p)
    close = np.testing.assert_allclose
    close(reach_probs("rejection", alone, q), [[0.5, 0.5, 0.25]])
    # p_2 = min(.5 * 3, 1) = 1.
    close(reach_probs("block", alone, q), [[0.5, 1.0, 0.5]])
    close(reach_probs("coupled", Followed(p, p, shared), q), [[0.5, 0.25, 0.05]])
