"""Rules are asked here: by name, with rows given as probabilities."""

import jax
import numpy as np
import pytest

from jaxspec.core.accept import RULES
from tests import oracles
from tests.core.enumeration import logs, make_draft, probabilities

JITTED = {name: jax.jit(rule.decide) for name, rule in RULES.items()}
every_rule = pytest.mark.parametrize("name", list(RULES))
lossless_by_uniforms = pytest.mark.parametrize("name", ["rejection", "block"])
P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
THRESHOLDS = {"rejection": oracles.ratios, "block": oracles.block_thresholds}
SHAPES = [(2, 1), (2, 2), (3, 2), (4, 3)]
TOLERANCE = 1e-6  # as in test_accept
NAN = float("nan")


def noise_for(name, rows, nodes, size, uniform=0.5, seed=0):
    """Noise of the shape that the rule takes: one uniform for all, or any Gumbels."""
    if RULES[name].shares_noise:
        gumbel = np.random.default_rng(seed).gumbel(size=(rows, nodes + 1, size))
        return gumbel.astype(np.float32)
    return np.full((rows, nodes), uniform, np.float32)


def decide(name, target, tokens, draft, noise, valid=None):
    """Accepted counts and next probabilities; rows are given as probabilities."""
    draft = make_draft(tokens, None if draft is None else logs(draft), valid)
    verdict = JITTED[name](logs(target), draft, np.asarray(noise, np.float32))
    slots = np.arange(draft.tokens.shape[1] + 1)
    assert np.array_equal(verdict.path, np.tile(slots, (len(tokens), 1)))
    return np.asarray(verdict.count) - 1, probabilities(verdict)


def random_rounds():
    """Target and draft, drafted tokens, uniforms and validity of 400 rounds."""
    rng = np.random.default_rng(1)
    rows, nodes, size = 400, 4, 6
    target = rng.dirichlet(np.ones(size), (rows, nodes + 1))
    target[::3] = np.where(target[::3] > 0.1, target[::3], 0)
    target /= target.sum(axis=-1, keepdims=True)
    # Near the target, so that drafts of every length are accepted.
    draft = 0.8 * target[:, :-1] + 0.2 * rng.dirichlet(np.ones(size), (rows, nodes))
    tokens = (rng.random((rows, nodes, 1)) > draft.cumsum(axis=-1)).sum(axis=-1)
    uniforms = rng.random((rows, nodes)).astype(np.float32)
    valid = rng.random((rows, nodes)) > 0.1
    return target, draft, tokens, uniforms, valid
