"""Log-probabilities of emitted tokens: the right slot, the right token, the best."""

import jax
import numpy as np
import pytest

from jaxspec.core.report import LogProbs, Reporting, report, top
from tests import oracles

INF = float("inf")


def sorted_top(values, count):
    """A stable sort: of equal values the lowest id comes first."""
    ids = np.argsort(-values, axis=-1, kind="stable")[..., :count]
    return ids, np.take_along_axis(values, ids, axis=-1)


@pytest.mark.parametrize("count", [1, 5, 40])
def test_the_best_by_repeated_arg_max_are_those_of_a_sort(count):
    rng = np.random.default_rng(count)
    values = rng.normal(size=(3, 4, 40)).astype(np.float32)
    values[1] = np.round(values[1])  # many ties
    values[2, 0] = 1.0
    ids, found = jax.jit(top, static_argnums=1)(values, count)
    wanted_ids, wanted = sorted_top(values, count)
    assert np.array_equal(ids, wanted_ids) and np.array_equal(found, wanted)
    assert ids.dtype == np.int32 and found.dtype == np.float32


def test_no_alternatives_are_empty():
    ids, found = top(np.zeros((2, 3, 7), np.float32), 0)
    assert ids.shape == found.shape == (2, 3, 0)
    assert ids.dtype == np.int32 and found.dtype == np.float32


def test_where_fewer_are_possible_the_rest_is_marked_impossible():
    values = np.float32([[-INF, -1, -INF, -2]])
    ids, found = top(values, 4)
    assert np.asarray(ids)[0, :2].tolist() == [1, 3]
    assert np.asarray(found).tolist() == [[-1, -2, -INF, -INF]]


@pytest.mark.parametrize("count", [1, 3])
def test_each_token_is_reported_at_its_own_slot(count):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (3, 5, 13)).astype(np.float32)
    warped = np.log(oracles.softmax(logits * 2)).astype(np.float32)
    # A path that jumps, as on a tree.
    slots, tokens = np.int32([[0, 2, 4]] * 3), rng.integers(0, 13, (3, 3))
    found = report(Reporting(count), logits, warped, slots, tokens)
    raw = np.log(oracles.softmax(np.float64(logits)))
    for row, place in np.ndindex(3, 3):
        slot, token = slots[row, place], tokens[row, place]
        assert found.warped[row, place] == warped[row, slot, token]
        np.testing.assert_allclose(
            found.raw[row, place], raw[row, slot, token], atol=1e-5
        )
        ids, best = sorted_top(raw[row, slot], count)
        assert np.array_equal(found.top_ids[row, place], ids)
        np.testing.assert_allclose(found.top_raw[row, place], best, atol=1e-5)


def test_plus_infinity_is_certain_in_the_models_own_distribution_too():
    """BL-17: the token that a row with such a logit takes has a log-probability."""
    logits = np.float32([[[0, 1, INF, 2]]])
    slots, tokens = np.int32([[0]]), np.int32([[2]])
    found = report(Reporting(2), logits, np.zeros_like(logits), slots, tokens)
    assert found.raw.tolist() == [[0.0]]
    assert found.top_ids[0, 0, 0] == 2 and found.top_raw[0, 0, 0] == 0
    assert not np.isnan(found.top_raw).any()


def test_nobody_who_does_not_ask_has_arrays():
    assert LogProbs.init(None, 2, 5) is None
    shapes = [each.shape for each in LogProbs.init(Reporting(3), 2, 5)]
    assert shapes == [(2, 5), (2, 5), (2, 5, 3), (2, 5, 3)]
