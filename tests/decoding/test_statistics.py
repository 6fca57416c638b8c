import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core import tree
from jaxspec.decoding import round as decoding_round
from jaxspec.decoding.state import Statistics
from jaxspec.types import Draft

# One program instead of many small ones.
count_round = jax.jit(decoding_round.count_round)


def count(nodes, rounds):
    """Statistics after rounds of (uncut count, count after the cut), a list a row."""
    rows = len(rounds[0])
    by_depth = jnp.zeros((rows, nodes), jnp.int32)
    statistics = Statistics(*[jnp.zeros(rows, jnp.int32)] * 2, by_depth, by_depth)
    tokens = jnp.zeros((rows, nodes), jnp.int32)
    draft = Draft(tokens, tree.chain(rows, nodes), tokens == 0)
    for pairs in rounds:
        uncut, cut = (jnp.array(each, jnp.int32) for each in zip(*pairs, strict=True))
        statistics = count_round(statistics, draft, uncut, cut)
    return statistics


def test_four_rounds_are_counted_by_hand():
    """BL-66: k = 4, accepted 4, 2, 0, 1."""
    statistics = count(4, [[(5, 5)], [(3, 3)], [(1, 1)], [(2, 2)]])
    assert int(statistics.drafted.sum()) == 16
    assert int(statistics.accepted.sum()) == 7
    assert statistics.accepted[0].tolist() == [3, 2, 1, 1]
    assert int(statistics.emitted[0]) == 11
    assert int(statistics.emitted[0]) / int(statistics.rounds[0]) == 2.75


def test_a_cut_round_drafted_no_deeper_than_it_emitted():
    statistics = count(4, [[(5, 3), (5, 4), (3, 3), (3, 2)]])
    assert statistics.accepted.sum(axis=1).tolist() == [3, 4, 2, 2]
    assert statistics.drafted.tolist() == [
        [1, 1, 1, 0],
        [1, 1, 1, 1],
        [1, 1, 1, 1],
        [1, 1, 0, 0],
    ]
    assert statistics.emitted.tolist() == [3, 4, 3, 2]


def test_a_row_that_has_ended_is_not_counted():
    statistics = count(4, [[(5, 0), (1, 1)], [(3, 0), (1, 1)]])
    assert statistics.rounds.tolist() == [0, 2]
    assert statistics.drafted.tolist() == [[0] * 4, [2] * 4]
    assert not np.asarray(statistics.accepted).any()


def test_invalid_nodes_are_not_drafted():
    zeros = jnp.zeros((2, 3), jnp.int32)
    empty = Statistics(*[jnp.zeros(2, jnp.int32)] * 2, zeros, zeros)
    valid = jnp.array([[True, True, False], [False] * 3])
    draft = Draft(zeros, tree.chain(2, 3), valid)
    ones = jnp.array([3, 1])
    statistics = count_round(empty, draft, ones, ones)
    assert statistics.drafted.tolist() == [[1, 1, 0], [0, 0, 0]]
    assert statistics.accepted.tolist() == [[1, 1, 0], [0, 0, 0]]
    assert statistics.rounds.tolist() == [1, 1]


def test_siblings_count_at_their_depth():
    zeros = jnp.zeros((1, 2), jnp.int32)
    empty = Statistics(*[jnp.zeros(1, jnp.int32)] * 2, zeros, zeros)
    # Slots 1 and 2 hang on the root, 3 on slot 1.
    draft = Draft(
        jnp.zeros((1, 3), jnp.int32), jnp.array([[0, 0, 1]]), jnp.ones((1, 3), bool)
    )
    statistics = count_round(empty, draft, jnp.array([3]), jnp.array([3]))
    assert statistics.drafted.tolist() == [[2, 1]]
    assert statistics.accepted.tolist() == [[1, 1]]
