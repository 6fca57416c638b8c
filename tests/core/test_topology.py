import itertools

import numpy as np
import pytest

from jaxspec.core.topology import Topology
from jaxspec.errors import UserError


def test_a_chain_hangs_each_node_on_the_one_before():
    chain = Topology.chain(3)
    assert chain.parents == (0, 1, 2)
    assert (chain.nodes, chain.depth, chain.rows, chain.most_children) == (3, 3, 3, 1)
    assert Topology.branching((1, 1, 1)) == chain
    assert Topology.paths([(0,), (0, 0), (0, 0, 0)]) == chain


def test_branching_gives_every_node_of_a_level_as_many_children():
    tree = Topology.branching((4, 2, 1))
    assert tree.parents == (0,) * 4 + (1, 1, 2, 2, 3, 3, 4, 4) + tuple(range(5, 13))
    assert tree.depths.tolist() == [0] + [1] * 4 + [2] * 8 + [3] * 8
    assert tree.ranks.tolist() == [0, 1, 2, 3] + [0, 1] * 4 + [0] * 8
    assert (tree.nodes, tree.depth, tree.rows, tree.most_children) == (20, 3, 13, 4)
    assert tree.ancestors[0].tolist() == [0, 0, 0]
    assert tree.ancestors[6].tolist() == [1, 6, 0]
    assert tree.ancestors[20].tolist() == [4, 12, 20]


def test_paths_come_in_any_order_and_may_repeat():
    paths = [(1,), (0, 1), (0,), (0, 0), (0, 0, 0), (0,)]
    tree = Topology.paths(paths)
    assert tree.parents == (0, 0, 1, 1, 3)
    assert tree.ranks.tolist() == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("nodes", [1, 4, 9])
def test_the_likeliest_tree_is_the_best_of_all(nodes):
    """Against all trees of so many nodes, by the expected accepted count."""
    acceptance = [[0.6, 0.2, 0.1], [0.5, 0.3], [0.9]]

    def likelihood(path):
        return np.prod([acceptance[d][rank] for d, rank in enumerate(path)])

    paths = [
        path
        for depth in (1, 2, 3)
        for path in itertools.product(*(range(len(r)) for r in acceptance[:depth]))
    ]
    best = 0.0
    for chosen in itertools.combinations(paths, nodes):
        there = {(), *chosen}
        if all(path[:-1] in there for path in chosen):
            best = max(best, sum(map(likelihood, chosen)))
    tree = Topology.likeliest(acceptance, nodes)
    assert tree.nodes == nodes
    found = 0.0
    for slot in range(1, nodes + 1):
        way = [s for s in tree.ancestors[slot] if s]
        found += likelihood([int(tree.ranks[s - 1]) for s in way])
    assert found == pytest.approx(best)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: Topology((0, 2)), "node 1 hangs on slot 2, expected 0 to 1"),
        (lambda: Topology((-1,)), "node 0 hangs on slot -1"),
        (lambda: Topology((0, 1, 0)), "parents are (0, 1, 0)"),
        (lambda: Topology.branching(()), "tree is ()"),
        (lambda: Topology.branching((2, 0)), "tree is (2, 0)"),
        (lambda: Topology.paths([(0, 0)]), "the path (0, 0) but not (0,)"),
        (lambda: Topology.paths([(1,)]), "the path (1,) but not (0,)"),
        (lambda: Topology.paths([(0,), ()]), "() is no path"),
        (lambda: Topology.paths([(0,), (-1,)]), "(-1,) is no path"),
        (lambda: Topology.likeliest([[0.5, 0.6]], 1), "acceptance at depth 1"),
        (lambda: Topology.likeliest([[1.5]], 1), "acceptance at depth 1"),
        (lambda: Topology(()), "tree has no node"),
        (lambda: Topology.paths([]), "tree has no node"),
        (lambda: Topology.paths([(0,), (0, 10**9)]), f"but not (0, {10**9 - 1})"),
        (lambda: Topology.likeliest([[0.5]], 0), "a tree of 0 nodes"),
        (lambda: Topology.likeliest([[0.5]], 2), "2 nodes is asked for"),
    ],
)
def test_a_tree_that_is_none_is_refused(make, part):
    with pytest.raises(UserError) as error:
        make()
    assert part in str(error.value)
