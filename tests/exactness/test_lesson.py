"""The three exercises of the lesson, worked in notebooks/02_losslessness, as tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxspec.core import analytics, noise
from jaxspec.core.accept import rejection
from jaxspec.core.distributions import residual_log_probs, sample
from tests.core.enumeration import logs, make_draft

P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.6, 0.1, 0.3])
K, SPEED, ALPHA = 4, 8, 0.8
DRAWS = 400_000


def from_residual(verdict):
    return verdict.next_log_probs


def from_target(verdict):
    """Wrong: a refused token is replaced by a draw from the target itself."""
    return jnp.broadcast_to(logs(P), verdict.next_log_probs.shape)


@functools.partial(jax.jit, static_argnums=1)
def rounds(keys, next_log_probs):
    """The first tokens of rounds of one draft token, and which of them were drafts."""
    draws = len(keys)
    lengths, root = jnp.full(draws, 5), jnp.zeros((draws, 1), jnp.int32)
    gumbel = functools.partial(noise.gumbels, keys, lengths, root)
    drafted = sample(logs(Q), gumbel(noise.DRAFT_TOKEN, 3))
    uniforms = noise.uniforms(keys, lengths, root + 1, noise.ACCEPT)
    told = jnp.broadcast_to(logs(Q), (draws, 1, 3))
    target = jnp.broadcast_to(logs(P), (draws, 2, 3))
    verdict = rejection(target, make_draft(drafted, told), uniforms)
    following = sample(next_log_probs(verdict), gumbel(noise.NEXT_TOKEN, 3)[:, 0])
    accepted = verdict.count == 2
    return jnp.where(accepted, drafted[:, 0], following), accepted


@functools.cache
def drawn(next_log_probs):
    """The counts of each first token, and the share of accepted drafts."""
    first, accepted = rounds(noise.seed_keys(range(DRAWS)), next_log_probs)
    return np.bincount(first, minlength=3), float(np.mean(accepted))


# (a) By hand


def test_alpha_is_the_overlap():
    alpha = analytics.acceptance_probability(P, Q)
    assert abs(alpha - 0.8) < 1e-6
    assert abs(1 - np.abs(P - Q).sum() / 2 - 0.8) < 1e-12
    _, accepted = drawn(from_residual)
    # Five standard deviations.
    assert abs(accepted - 0.8) < 5 * np.sqrt(0.8 * 0.2 / DRAWS)


def test_the_residual_is_a_distribution_that_restores_the_target():
    residual = np.exp(residual_log_probs(logs(P), np.float32(Q)))
    np.testing.assert_allclose(residual, [0, 1, 0], atol=1e-6)
    assert (residual >= 0).all()
    assert abs(residual.sum() - 1) < 1e-6
    restored = np.minimum(P, Q) + (1 - 0.8) * residual
    np.testing.assert_allclose(restored, P, atol=1e-6)


# (b) The speedup, and why a longer draft is not better in proportion


def test_the_speedup_of_four_tokens():
    assert abs(analytics.simple_speedup(ALPHA, K, SPEED) - 2.8) < 1e-6
    # 3.3616 tokens a round, in the time of 1.5 target forwards.
    assert abs(analytics.expected_tokens(ALPHA, K) - 3.3616) < 1e-5
    assert abs(analytics.speedup(ALPHA, K, SPEED) - 3.3616 / 1.5) < 1e-5


@pytest.mark.parametrize(
    ("formula", "value", "limit"),
    # Drafting alone takes k / s, so the estimate stays under s alpha; a round gives
    # fewer than 1 / (1 - alpha) tokens, so the speedup falls in the end.
    [
        (analytics.simple_speedup, 17 / 3.5, SPEED * ALPHA),
        (analytics.speedup, (1 - ALPHA**21) / (1 - ALPHA) / 3.5, 2.3),
    ],
)
def test_five_times_the_draft_is_not_five_times_the_speed(formula, value, limit):
    longer, shorter = formula(ALPHA, 5 * K, SPEED), formula(ALPHA, K, SPEED)
    assert abs(longer - value) < 1e-5
    assert longer < 2 * shorter
    assert (formula(ALPHA, np.arange(10_000), SPEED) < limit).all()


def test_twenty_tokens_are_slower_than_four_and_five_are_best():
    gains = analytics.speedup(ALPHA, np.arange(21), SPEED)
    assert gains[20] < gains[4]
    best = analytics.best_draft_length(ALPHA, 1 / SPEED, np.ones(21))
    assert best.k == np.argmax(gains) == 5
    assert (analytics.expected_tokens(ALPHA, np.arange(10_000)) < 5 + 1e-5).all()


# (c) By drawing


def test_the_rule_gives_the_targets_frequencies():
    found, _ = drawn(from_residual)
    assert np.abs(found / DRAWS - P).max() < 0.01
    assert stats.chisquare(found, DRAWS * P).pvalue > 1e-4


def test_a_wrong_sampler_does_not():
    found, _ = drawn(from_target)
    # min(p, q) + (1 - alpha) p instead of p.
    np.testing.assert_allclose(found / DRAWS, [0.6, 0.16, 0.24], atol=0.01)
    assert np.abs(found / DRAWS - P).max() > 0.01
    assert stats.chisquare(found, DRAWS * P).pvalue < 1e-12
