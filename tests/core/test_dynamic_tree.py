import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core.dynamic_tree import Candidates, DynamicTree
from jaxspec.errors import UserError

TREE = DynamicTree(depth=3, top_k=2, nodes=5)


def made(scores, parents):
    scores = jnp.asarray(scores, jnp.float32)
    parents = jnp.asarray(parents, jnp.int32)
    return Candidates(jnp.zeros_like(parents), scores, parents, parents)


def test_the_likeliest_nodes_are_kept_with_their_parents():
    rng = np.random.default_rng(0)
    rows, count = 50, 12
    parents = np.array(
        [[rng.integers(-1, i) for i in range(count)] for _ in range(rows)]
    )
    steps = -rng.exponential(size=(rows, count))
    # Some children are certain: as likely as their parents.
    steps[rng.random(steps.shape) < 0.3] = 0
    scores = np.zeros((rows, count + 1))
    for place in range(count):
        own = parents[:, place]
        scores[:, place] = scores[np.arange(rows), own] + steps[:, place]
    places, slots = made(scores[:, :count], parents).keep(5)
    for row in range(rows):
        kept = places[row].tolist()
        assert kept == sorted(set(kept))
        rest = np.delete(scores[row, :count], kept)
        assert scores[row, kept].min() >= rest.max()
        for place, slot in zip(kept, slots[row].tolist(), strict=True):
            own = parents[row, place]
            assert slot == (0 if own < 0 else kept.index(own) + 1)


def test_what_is_no_number_is_never_kept_before_what_is():
    candidates = Candidates.init(TREE, 1, 0)
    tokens = jnp.array([[[3, 4]]])
    scores = jnp.array([[[jnp.nan, -2.0]]])
    candidates = candidates.add(jnp.int32(0), tokens, scores, jnp.array([[-1]]))
    places, _ = candidates.keep(1)
    assert places.tolist() == [[1]]
    assert candidates.tokens[0, :2].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("numbers", "part"),
    [
        ((0, 2, 3), "expected numbers over 0"),
        ((3, 2, 2), "nodes is 2, expected 3 (the depth) to 10"),
        ((3, 2, 11), "nodes is 11, expected 3 (the depth) to 10"),
        ((2, 9, 8), "top_k is 9, expected at most 8"),
    ],
)
def test_numbers_that_give_no_tree_are_refused(numbers, part):
    with pytest.raises(UserError) as error:
        DynamicTree(*numbers)
    assert part in str(error.value)
