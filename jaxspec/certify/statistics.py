"""Tests of drawn samples against what they should be; each gives a p-value."""

import math

import jax
import numpy as np

from jaxspec.certify.draws import Draws

# Fewer expected in a cell, and the chi-square distribution does not hold.
LEAST_EXPECTED = 5
# With less the normal distribution has other tails than the sum of events.
LEAST_VARIANCE = 10


def uniform_scores(draws: Draws, seed: int) -> np.ndarray:
    """A number in [0, 1) for each token: even and independent if the sampler is right.

    The probability integral transform, randomised over the token's own probability
    (Rosenblatt 1952; Czado et al. 2009, section 2), with ids in the order of the
    target's probabilities: so one test serves any vocabulary and any context.
    """
    share = np.random.default_rng(seed).random(draws.tokens.shape)
    own, above = (np.asarray(each, float) for each in draws.followed[:2])
    return np.clip(above + share * own, 0, np.nextafter(1, 0))


def chi_square(scores: np.ndarray) -> float:
    """Whether scores `[samples, dimensions]` fill the unit cube evenly: a p-value."""
    samples, dimensions = scores.shape
    most = 20 if dimensions == 1 else 5
    sides = min(int((samples / LEAST_EXPECTED) ** (1 / dimensions)), most)
    if sides < 2:
        raise ValueError(f"{samples} samples are too few to test")
    cells = (scores * sides).astype(int) @ sides ** np.arange(dimensions)
    seen = np.bincount(cells, minlength=sides**dimensions)
    expected = samples / seen.size
    statistic = ((seen - expected) ** 2 / expected).sum()
    return float(jax.scipy.stats.chi2.sf(statistic, seen.size - 1))


def binomial(happened: np.ndarray, probs: np.ndarray) -> float:
    """Whether events happened as often as their probabilities say: a p-value.

    By the normal approximation of their sum, corrected for continuity; where nearly all
    are certain, by the Poisson distribution of the rare outcome.
    """
    deviation = math.sqrt((probs * (1 - probs)).clip(0).sum())
    if deviation**2 < LEAST_VARIANCE:
        if probs.sum() > probs.size / 2:
            happened, probs = ~happened.astype(bool), (1 - probs).clip(0)
        return _poisson(int(happened.sum()), float(probs.sum()))
    off = max(abs(happened.sum() - probs.sum()) - 0.5, 0.0)
    return math.erfc(off / deviation / math.sqrt(2))


def _poisson(count: int, mean: float) -> float:
    """The two-sided p-value of so many rare events."""
    if mean <= 0:
        return float(count == 0)
    terms = [
        math.exp(i * math.log(mean) - mean - math.lgamma(i + 1))
        for i in range(count + 1)
    ]
    at_most = sum(terms)
    at_least = 1 - sum(terms[:-1])
    return min(1.0, 2 * max(min(at_most, at_least), 0.0))
