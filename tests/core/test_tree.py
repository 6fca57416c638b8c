import functools

import jax
import numpy as np
import pytest

from jaxspec.core import tree
from tests import oracles


def random_parents(rng, rows, nodes):
    return np.array(
        [[rng.integers(0, i + 1) for i in range(nodes)] for _ in range(rows)], np.int32
    ).reshape(rows, nodes)


@functools.partial(jax.jit, static_argnums=2)
def derive(parents, tokens, depth):
    reach = tree.ancestry(parents)
    return reach, tree.depths(reach), *tree.paths(tokens, reach, depth)


def check(parents, tokens, depth):
    """Compares ancestry, depths and paths with a walk up each node's parents."""
    reach, levels, paths, counts = map(np.asarray, derive(parents, tokens, depth))
    assert paths.shape == (*reach.shape[:2], depth)
    for row, parent in enumerate(parents):
        for slot in range(parents.shape[1] + 1):
            way = oracles.ancestors(parent, slot)
            assert np.flatnonzero(reach[row, slot]).tolist() == way
            assert levels[row, slot] == counts[row, slot] == len(way) - 1
            expected = [tokens[row, s - 1] for s in way[1:]][:depth]
            expected += [0] * (depth - len(expected))
            assert paths[row, slot].tolist() == expected


@pytest.mark.parametrize("nodes", [1, 2, 3, 7, 8, 31])
def test_random_trees_equal_a_walk_up_the_parents(nodes):
    rng = np.random.default_rng(nodes)
    parents = random_parents(rng, 8, nodes)
    check(parents, rng.integers(1, 100, (8, nodes)).astype(np.int32), nodes)


@pytest.mark.parametrize("nodes", [0, 1, 16, 33])
def test_a_chain_reaches_its_whole_length(nodes):
    parents = np.asarray(tree.chain(2, nodes))
    assert parents.tolist() == [list(range(nodes))] * 2
    tokens = np.arange(1, 2 * nodes + 1, dtype=np.int32).reshape(2, nodes)
    check(parents, tokens, nodes)


def test_bl51_siblings_have_equal_depth_and_do_not_see_each_other():
    # Root, a, b, a1 of a, b1 of b.
    parents = np.array([[0, 0, 1, 2]])
    reach, levels, _, _ = map(np.asarray, derive(parents, parents, 2))
    assert levels.tolist() == [[0, 1, 1, 2, 2]]
    assert np.flatnonzero(reach[0, 3]).tolist() == [0, 1, 3]
    assert np.flatnonzero(reach[0, 4]).tolist() == [0, 2, 4]


def test_a_star_has_depth_one_and_no_depth_gives_empty_paths():
    parents = np.zeros((1, 6), np.int32)
    tokens = np.arange(10, 16, dtype=np.int32)[None]
    check(parents, tokens, 1)
    check(parents, tokens, 0)


def test_rows_with_different_trees_do_not_mix():
    parents = np.array([[0, 1, 2, 3], [0, 0, 0, 0], [0, 1, 0, 3]], np.int32)
    ancestry = jax.jit(tree.ancestry)
    together = np.asarray(ancestry(parents))
    for row in range(3):
        assert np.array_equal(together[row], ancestry(parents[row : row + 1])[0])
