"""Any distributions at all: what a rule must never do, searched by hypothesis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxspec.core.accept import RULES
from jaxspec.core.distributions import sample
from tests.core.enumeration import ALMOST_1, make_draft

settings.register_profile(
    # The same examples in each run: a failure is one of the code, not of the day.
    "rules",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=60,
)
ROWS = 4
# Vocabulary and nodes: few shapes, so that few programs are compiled.
SHAPES = [(2, 3), (3, 2), (6, 1), (6, 3)]
WEIGHTS = [0.0, 0.0, 1e-30, 1e-7, 0.1, 0.1000001, 0.3, 1.0, 1e7]
GUMBELS = [-3.0, -0.5, 0.0, 0.0, 1.0, 22.0]
UNIFORMS = [0.0, 2.0**-24, 0.25, 0.5, 1 - 1e-6, ALMOST_1]
OFF = [1 - 1e-6, 1.0, 1.0, 1 + 1e-6]


def of(values, shape, dtype=np.float32):
    return arrays(dtype, shape, elements=st.sampled_from([dtype(v) for v in values]))


@st.composite
def cases(draw, size, nodes):
    """Log-probabilities of target and draft (or none), tokens, validity and noises."""
    target = distributions(draw, (ROWS, nodes + 1, size))
    other = distributions(draw, (ROWS, nodes, size))
    related = draw(st.sampled_from(["apart", "equal", "nearly equal", "none"]))
    if related == "equal":
        other = target[:, :-1]
    if related == "nearly equal":
        other = target[:, :-1] * draw(of(OFF, other.shape))
    tokens = draw(of(range(size), (ROWS, nodes), np.int32))
    valid = draw(of([True, True, True, False], (ROWS, nodes), np.bool_))
    with np.errstate(divide="ignore"):
        told = None if related == "none" else np.log(other)
        draft = make_draft(tokens, told, valid)
        uniforms = draw(of(UNIFORMS, (ROWS, nodes)))
        gumbel = draw(of(GUMBELS, (ROWS, nodes + 1, size)))
        return np.log(target), draft, uniforms, gumbel


def distributions(draw, shape):
    """Rows that sum to 1 within 1e-6: with zeros, ties, tiny entries, or one-hot."""
    weights = draw(of(WEIGHTS, shape))
    weights = np.where(weights.sum(axis=-1, keepdims=True) > 0, weights, 1)
    probs = weights / weights.sum(axis=-1, keepdims=True)
    return (probs * draw(of(OFF, (*shape[:-1], 1)))).astype(np.float32)


@jax.jit
def drawn(verdict, gumbel):
    last = jnp.take_along_axis(gumbel, verdict.count[:, None, None] - 1, axis=1)
    return sample(verdict.next_log_probs, last[:, 0])


@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.parametrize(("size", "nodes"), SHAPES)
def test_no_rule_emits_what_the_target_rules_out(name, size, nodes):
    rule = RULES[name]
    decide = jax.jit(rule.decide)

    @settings(settings.get_profile("rules"))
    @given(cases(size, nodes))
    def check(case):
        target, draft, uniforms, gumbel = case
        verdict = decide(target, draft, gumbel if rule.shares_noise else uniforms)
        accepted = np.asarray(verdict.count) - 1
        usable = np.cumprod(draft.valid, axis=-1).sum(axis=-1)
        assert ((accepted >= 0) & (accepted <= usable)).all()
        following = np.exp(np.asarray(verdict.next_log_probs, np.float64))
        np.testing.assert_allclose(following.sum(axis=-1), 1, atol=1e-5)
        last = np.asarray(drawn(verdict, gumbel))
        for row, count in enumerate(accepted):
            tokens = [*draft.tokens[row, :count], last[row]]
            assert np.isfinite(target[row, range(count + 1), tokens]).all()
            assert not following[row, np.isneginf(target[row, count])].any()

    check()
