"""Block verification: by hand, and integrated."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.types import Verdict
from tests import oracles
from tests.core.deciding import (
    JITTED,
    NAN,
    SHAPES,
    THRESHOLDS,
    TOLERANCE,
    P,
    Q,
    decide,
    random_rounds,
)
from tests.core.enumeration import (
    ALMOST_1,
    Tables,
    joint,
    logs,
    make_draft,
    mean_accepted,
)

# Block verification by hand


def test_the_papers_example_gains_a_tenth():
    """Sun et al. 2024, section 2: 10/9 tokens one by one, 11/9 by blocks."""
    target, draft = [1 / 3, 2 / 3], np.array([2 / 3, 1 / 3])
    # All thresholds are quarters: one point in each of the cells between them.
    uniforms = (np.array(list(np.ndindex(4, 4))) + 0.5) / 4
    for name, ninths in (("rejection", 10), ("block", 11)):
        mean = 0
        for tokens in np.ndindex(2, 2):
            given = [[target] * 3] * 16, [tokens] * 16, [[draft] * 2] * 16
            mean += draft[[*tokens]].prod() * decide(name, *given, uniforms)[0].mean()
        assert abs(mean - ninths / 9) < 1e-12


def test_a_later_token_redeems_an_unlikely_one():
    # p_1 = .4, then p_2 = min(1, .4 * 2.5) = 1; or 1 stays .4, then p_3 = 1.
    target, draft = [[P, P, P, P[::-1]]] * 3, [[Q, Q, Q]] * 3
    tokens = [[2, 0, 0], [2, 1, 0], [2, 2, 2]]
    uniforms = np.full((3, 3), ALMOST_1)
    assert decide("block", target, tokens, draft, uniforms)[0].tolist() == [3, 3, 0]
    assert decide("rejection", target, tokens, draft, uniforms)[0].tolist() == [0, 0, 0]


def test_thresholds_and_what_follows_are_those_worked_out_by_hand():
    # p_1 = .4; .4 * (.5, .3, .2) - (.1, .05, .85) has the positive part (.1, .07, 0).
    inner = [0.1, 0.05, 0.85]
    threshold = 0.17 / (0.17 + 0.6)
    tokens = [[2, 2]] * 5  # p_2 = .4 * .2 / .85
    whole = 0.08 / 0.85
    uniforms = [
        [threshold - 1e-5, whole + 1e-5],
        [threshold + 1e-5, whole + 1e-5],
        [threshold + 1e-5, whole - 1e-5],
        [0.0, 0.0],
        [ALMOST_1, ALMOST_1],
    ]
    target, draft = [[P, P, P[::-1]]] * 5, [[Q, inner]] * 5
    accepted, following = decide("block", target, tokens, draft, uniforms)
    assert accepted.tolist() == [1, 0, 2, 2, 0]
    np.testing.assert_allclose(following[0], [10 / 17, 7 / 17, 0], atol=1e-6)
    np.testing.assert_allclose(following[[1, 4]], [[1, 0, 0]] * 2, atol=1e-6)
    np.testing.assert_allclose(following[[2, 3]], [P[::-1]] * 2, atol=1e-6)


def test_a_short_draft_keeps_its_last_prefix_by_its_own_probability():
    valid = [[True, False], [True, False]]
    target, draft = [[P, Q, P]] * 2, [[Q, P]] * 2
    uniforms = [[0.399, 0.0], [0.401, 0.0]]
    accepted, following = decide(
        "block", target, [[2, 0]] * 2, draft, uniforms, np.array(valid)
    )
    assert accepted.tolist() == [1, 0]
    np.testing.assert_allclose(following, [Q, [1, 0, 0]], atol=1e-6)


def test_an_impossible_token_is_in_no_block_even_where_the_uniform_is_0():
    never = [0.5, 0.5, 0.0]
    target = [[never, P, P, P], [P, never, P, P], [P, P, never, P]]
    tokens = [[2, 0, 0], [0, 2, 0], [0, 0, 2]]
    for draft in ([[Q] * 3] * 3, None):
        accepted, following = decide("block", target, tokens, draft, np.zeros((3, 3)))
        assert accepted.tolist() == [0, 1, 2]
        assert (following[:, 2] == 0).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("probs", [[0.0, 0.0, 1.0, 0.0], [0.25] * 4], ids=str)
def test_a_block_from_the_target_itself_is_kept_whole(probs, dtype):
    rows = jnp.asarray(logs([[probs] * 3] * 2), dtype)
    uniforms = jnp.array([[ALMOST_1, ALMOST_1], [0.0, ALMOST_1]])
    verdict = JITTED["block"](rows, make_draft([[2, 2]] * 2, rows[:, :2]), uniforms)
    assert verdict.count.tolist() == [3, 3]
    assert np.array_equal(verdict.next_log_probs, rows[:, 2])


def test_a_block_ends_before_a_node_drawn_from_what_is_not_numbers():
    # In the last, the drawn token itself has a number.
    nan = [NAN] * 3
    bad = [[Q, nan, Q], [nan, Q, Q], [Q, Q, [0.2, NAN, 0.3]], [Q, [NAN, 0.3, 0.5], Q]]
    tokens = [[0, 0, 1], [0, 0, 1], [0, 0, 1], [0, 2, 1]]
    target = [[P, P, P, Q]] * 4
    for uniform in (0.0, ALMOST_1):
        noise = np.full((4, 3), uniform)
        accepted, following = decide("block", target, tokens, bad, noise)
        assert accepted.tolist() == [1, 0, 2, 1]
        np.testing.assert_allclose(following, [P] * 4, atol=1e-6)


def test_a_certain_draft_is_the_one_hot_one():
    rng = np.random.default_rng(4)
    rows, nodes, size = 500, 3, 5
    target = rng.dirichlet(np.ones(size), (rows, nodes + 1))
    tokens = target[:, :-1].argmax(axis=-1)
    uniforms = rng.random((rows, nodes))
    certain = decide("block", target, tokens, None, uniforms)
    told = decide("block", target, tokens, np.eye(size)[tokens], uniforms)
    assert np.array_equal(certain[0], told[0])
    np.testing.assert_allclose(certain[1], told[1], atol=1e-6)
    assert np.bincount(certain[0], minlength=nodes + 1).min() >= 5


def test_random_blocks_equal_the_oracle():
    target, draft, tokens, uniforms, valid = random_rounds()
    for given in (draft, None):
        accepted, following = decide("block", target, tokens, given, uniforms, valid)
        for row in range(len(tokens)):
            probs = None if given is None else given[row]
            count, expected = oracles.block_verify(
                target[row], probs, tokens[row], uniforms[row], valid[row]
            )
            assert accepted[row] == count
            # 1e-7 of the rows, over the smallest positive part seen (1e-3).
            np.testing.assert_allclose(following[row], expected, atol=2e-4)
        if given is not None:
            assert np.bincount(accepted, minlength=tokens.shape[1] + 1).min() >= 20


# Block verification integrated: no draws, so no noise to hide in

block_joint = functools.partial(joint, thresholds=oracles.block_thresholds)


@pytest.mark.parametrize("kind", ["smooth", "zeros", "equal", "one-hot"])
@pytest.mark.parametrize(("size", "nodes"), SHAPES)
def test_blocks_integrate_to_the_target(size, nodes, kind):
    for seed in range(3):
        tables = Tables(seed, size, nodes, kind)
        found = block_joint(JITTED["block"], tables)
        np.testing.assert_allclose(found, tables.continuation(()), atol=TOLERANCE)


@pytest.mark.parametrize(("size", "nodes"), SHAPES)
def test_every_certain_block_integrates_to_the_target(size, nodes):
    tables = Tables(1, size, nodes, "zeros")
    expected = tables.continuation(())
    for fixed in np.ndindex(*(size,) * nodes):
        found = block_joint(JITTED["block"], tables, fixed)
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_blocks_with_invalid_nodes_integrate_to_the_target():
    tables = Tables(2, 2, 3, "smooth")
    expected = tables.continuation(())
    for valid in np.ndindex(2, 2, 2):
        for fixed in (None, (0, 1, 1)):
            found = block_joint(JITTED["block"], tables, fixed, np.array(valid, bool))
            np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def wrong_block(choose=max, thresholds=oracles.block_thresholds, scaled=True):
    """The oracle's block verification with a step done another way."""

    def one(target, draft, tokens, uniforms):
        passed = uniforms < thresholds(target, draft, tokens)
        count = choose([i + 1 for i in np.flatnonzero(passed)] + [0])
        if count == len(tokens):
            return count, target[count]
        kept = oracles.block_prefixes(target, draft, tokens)[count] if scaled else 1
        excess = np.maximum(kept * target[count] - draft[count], 0)
        # Where the wrong step came where nothing can follow.
        return count, excess / excess.sum() if excess.sum() else target[count]

    def rule(target_log_probs, draft, uniforms):
        known = np.exp(target_log_probs), np.exp(draft.log_probs)
        rows = zip(*known, draft.tokens, uniforms, strict=True)
        counts, following = zip(*(one(*row) for row in rows), strict=True)
        path = np.zeros((len(counts), len(uniforms[0]) + 1))
        return Verdict(path, np.array(counts) + 1, np.asarray(logs(following)))

    return rule


def leading(passed):
    """How many of 1, 2, 3, ... are there from the first on."""
    return oracles.leading([i in passed for i in range(1, max(passed) + 1)])


def prefixes(target, draft, tokens, valid=None):
    return np.array(oracles.block_prefixes(target, draft, tokens)[1:])


def test_the_controls_differ_from_the_right_rule_by_their_one_step():
    found = block_joint(wrong_block(), Tables(0, 3, 2, "smooth"))
    expected = Tables(0, 3, 2, "smooth").continuation(())
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


# Tables in which each step matters.
@pytest.mark.parametrize(("seed", "size"), [(2, 3), (4, 4)])
@pytest.mark.parametrize(
    "step",
    [
        {"choose": leading},
        {"scaled": False},
        {"thresholds": prefixes},
        {"thresholds": oracles.ratios},
    ],
    ids=["until the first failure", "residual not scaled", "by p", "by the ratio"],
)
def test_wrong_blocks_do_not_integrate_to_the_target(seed, size, step):
    tables = Tables(seed, size, 2, "smooth")
    edges = step.get("thresholds", oracles.block_thresholds)
    found = joint(wrong_block(**step), tables, thresholds=edges)
    assert abs(found.sum() - 1) < 1e-5
    assert np.abs(found - tables.continuation(())).max() > 1000 * TOLERANCE


def accepted_by(name, tables, fixed=None):
    return mean_accepted(JITTED[name], tables, fixed, thresholds=THRESHOLDS[name])


@pytest.mark.parametrize(("size", "nodes"), SHAPES)
def test_blocks_never_keep_fewer_tokens_in_expectation(size, nodes):
    gains = []
    for kind in ("smooth", "zeros", "equal", "one-hot"):
        for seed in range(3):
            tables = Tables(seed, size, nodes, kind)
            gains.append(
                accepted_by("block", tables) - accepted_by("rejection", tables)
            )
    assert min(gains) > -1e-9
    # Of one node a block is the node.
    assert max(gains) < 1e-9 if nodes == 1 else max(gains) > 0.01
