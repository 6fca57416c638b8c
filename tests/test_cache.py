import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.cache import BLOCK, KVCache, within
from jaxspec.models.attention import Attention, Place
from jaxspec.models.config import ModelConfig, Rope, RopeScaling
from jaxspec.scratch import Scratch

# Too wide for a ring to be smaller: `test_ring.py` has those.
WINDOWS = (260, None, 260, 260, None)
KV_HEADS, HEAD_DIM = 2, 4


def empty(rows, capacity=300, width=6, *, stacked=False, windows=WINDOWS):
    sizes = rows, KV_HEADS, capacity, width, HEAD_DIM
    return KVCache.init(windows, *sizes, jnp.float32, stacked=stacked)


def random_scratch(rng, rows, slots):
    def entries():
        shape = (rows, KV_HEADS, slots, HEAD_DIM)
        return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in WINDOWS)

    return Scratch(entries(), entries(), jnp.zeros((rows, slots), int))


def stored(cache, layer):
    """Keys and values of a layer, `[2, B, K, blocks * BLOCK, D]`, read by blocks."""
    blocks = cache.groups[0][0].shape[4] // BLOCK

    def row(cache):
        return [jnp.stack(cache.block(layer, index)) for index in range(blocks)]

    read = jax.vmap(row, in_axes=(cache.row_axes,), out_axes=1)(cache)
    return np.concatenate(read, axis=3)


@pytest.mark.parametrize("stacked", (False, True))
def test_random_commits_leave_what_a_list_a_row_would_hold(stacked):
    rng, rows, width = np.random.default_rng(0), 3, 6
    cache = empty(rows, stacked=stacked)
    texts = [[[[], []] for _ in range(rows)] for _ in WINDOWS]
    commit = jax.jit(KVCache.commit)
    for _ in range(90):
        scratch = random_scratch(rng, rows, 9)
        path = np.stack([rng.permutation(9)[:width] for _ in range(rows)])
        count = rng.integers(0, [width + 1, 3, 5])
        cache = commit(cache, scratch, path, count)
        for layer, text in enumerate(texts):
            for row in range(rows):
                for slot in path[row, : count[row]]:
                    text[row][0].append(scratch.keys[layer][row, :, slot])
                    text[row][1].append(scratch.values[layer][row, :, slot])
    lengths = [len(text[0]) for text in texts[0]]
    assert cache.length.tolist() == lengths
    assert max(lengths) > 2 * BLOCK > BLOCK > min(lengths)
    for layer, text in enumerate(texts):
        both = stored(cache, layer)
        for row, length in enumerate(lengths):
            for which in (0, 1):
                wanted = np.stack(text[row][which], axis=1)
                np.testing.assert_array_equal(both[which, row, :, :length], wanted)


# As tight as it gets: no slot to spare, and whole blocks before the width is added.
@pytest.mark.parametrize("capacity", (2 * BLOCK - 6, 2 * BLOCK))
@pytest.mark.parametrize("stacked", (False, True))
def test_the_last_commit_of_a_full_row_is_not_shifted_back(stacked, capacity):
    rng, width = np.random.default_rng(1), 6
    cache = empty(1, capacity, width, stacked=stacked)
    assert 0 <= cache.groups[0][0].shape[4] - (capacity + width) < BLOCK
    cache = dataclasses.replace(cache, length=jnp.array([capacity - 1]))
    before = stored(cache, 0)
    scratch, path = random_scratch(rng, 1, width), jnp.arange(width)[None]
    for count in (1, 0):
        cache = cache.commit(scratch, path, jnp.array([count]))
        assert cache.length.tolist() == [capacity]
        after = stored(cache, 0)
        np.testing.assert_array_equal(
            after[0, 0, :, capacity - 1], scratch.keys[0][0, :, 0]
        )
        np.testing.assert_array_equal(
            after[:, :, :, : capacity - 1], before[:, :, :, : capacity - 1]
        )


def test_layers_of_equal_window_lie_together():
    per_layer, stacked = empty(2), empty(2, stacked=True)
    assert [len(group) for group in per_layer.groups] == [3, 2]
    assert {array.shape[0] for group in per_layer.groups for array in group} == {1}
    assert [[array.shape[0] for array in group] for group in stacked.groups] == [
        [3],
        [2],
    ]
    assert per_layer.groups[0][0].shape[1:] == (2, 2, KV_HEADS, 3 * BLOCK, HEAD_DIM)


@pytest.mark.parametrize("stacked", (False, True))
def test_each_layer_reads_what_was_committed_to_it(stacked):
    cache = empty(1, stacked=stacked)
    marks = tuple(jnp.full((1, KV_HEADS, 1, HEAD_DIM), 1.0 + n) for n in range(5))
    scratch = Scratch(marks, tuple(-mark for mark in marks), jnp.zeros((1, 1), int))
    cache = cache.commit(scratch, jnp.zeros((1, 6), int), jnp.array([1]))
    for layer in range(5):
        keys, values = stored(cache, layer)[:, 0, :, 0]
        assert (keys == layer + 1).all()
        assert (values == -layer - 1).all()


def test_live_blocks_follow_the_longest_row():
    cache = empty(2)
    for lengths, blocks in (((0, 0), 0), ((1, 0), 1), ((5, 128), 1), ((129, 5), 2)):
        live = dataclasses.replace(cache, length=jnp.array(lengths)).live_blocks
        assert live.shape == ()
        assert live == blocks


def test_shorten_forgets_and_never_lengthens():
    cache = dataclasses.replace(empty(3), length=jnp.array([5, 9, 2]))
    shorter = cache.shorten(jnp.array([3, 9, 8]))
    assert shorter.length.tolist() == [3, 9, 2]


def test_committing_again_after_shorten_overwrites():
    rng = np.random.default_rng(2)
    first, second = (random_scratch(rng, 1, 6) for _ in range(2))
    path = jnp.arange(6)[None]
    cache = empty(1).commit(first, path, jnp.array([6])).shorten(jnp.array([2]))
    cache = cache.commit(second, path, jnp.array([3]))
    keys = stored(cache, 3)[0, 0, :, :5]
    wanted = [first.keys[3][0, :, :2], second.keys[3][0, :, :3]]
    np.testing.assert_array_equal(keys, np.concatenate(wanted, axis=1))


@pytest.mark.parametrize("layer, window", ((0, 260), (1, None)))
def test_visible_by_the_one_rule(layer, window):
    length, positions = 290, np.array([290, 293, 140, 0])
    cache = dataclasses.replace(empty(1), length=jnp.array([length]))
    row = jax.tree.map(lambda leaf: leaf[0] if leaf.ndim == 1 else leaf, cache)
    for index in range(3):
        seen = np.asarray(row.visible(layer, index, jnp.asarray(positions)))
        for query, position in enumerate(positions):
            for key in range(BLOCK):
                at = index * BLOCK + key
                back = position - at
                wanted = at < length and 0 <= back < (window or 10**9)
                assert seen[query, key] == wanted, (position, at)


def test_the_window_counts_the_query_itself():
    assert (
        within(3, jnp.arange(-1, 5)).tolist() == [False, True, True, True] + [False] * 2
    )
    assert within(None, jnp.array([-1, 0, 10**6])).tolist() == [False, True, True]


def test_scratch_writes_only_the_slots_named():
    rng = np.random.default_rng(3)
    old = random_scratch(rng, 1, 5)
    row = Scratch(*jax.tree.map(lambda leaf: leaf[0], old))
    keys, values = rng.normal(size=(2, KV_HEADS, 2, HEAD_DIM)).astype(np.float32)
    slots = jnp.array([4, 1])
    new = row.write(2, keys, values, slots).place(jnp.array([70, 71]), slots)
    assert new.positions.tolist() == [0, 71, 0, 0, 70]
    for layer in range(5):
        wanted = np.array(row.keys[layer]), np.array(row.values[layer])
        if layer == 2:
            wanted[0][:, [4, 1]], wanted[1][:, [4, 1]] = keys, values
        np.testing.assert_array_equal(new.keys[layer], wanted[0])
        np.testing.assert_array_equal(new.values[layer], wanted[1])


def unrotated_attention():
    """Attention in which the token e0 has the query e0, the key 2 e0 and value e2."""
    still = Rope(1e4, RopeScaling("linear", 1e9))
    config = ModelConfig(
        *("llama", 8, 4, 4, 1, 1, 1, 4, 512, 1e-6), 1.0, windows=(None,), ropes=(still,)
    )
    attention = Attention(config, 0, jnp.float32, nnx.Rngs(0))
    identity = jnp.eye(4)
    attention.q_proj.weight[...] = identity
    attention.k_proj.weight[...] = 2 * identity
    attention.v_proj.weight[...] = jnp.roll(identity, 2, axis=0)
    attention.o_proj.weight[...] = identity
    return attention


@pytest.mark.parametrize("rejected_key", (0.0, 9.0))
def test_bl06_rejected_entries_take_no_weight(rejected_key):
    attention = unrotated_attention()
    unit = np.eye(4, dtype=np.float32)
    # Four slots: the root with score 1 and value e1, three drafts with value e3.
    keys = np.stack([unit[0], *[rejected_key * unit[0]] * 3])
    values = np.stack([unit[1], *[unit[3]] * 3])
    scratch = Scratch(
        *((jnp.broadcast_to(each, (2, 1, 4, 4)),) for each in (keys, values)),
        jnp.zeros((2, 4), int),
    )
    cache = KVCache.init((None,), 2, 1, 20, 4, 4, jnp.float32, stacked=False)
    path = jnp.broadcast_to(jnp.arange(4), (2, 4))
    cache = cache.commit(scratch, path, jnp.array([4, 1]))

    def newest(cache, scratch):
        see_itself = jnp.ones((1, 1), bool)
        slot = jnp.zeros(1, int)
        place = Place(cache.length[None], slot, see_itself, jnp.int32(1))
        return attention(jnp.asarray(unit[:1]), cache, scratch, place)[0][0]

    one = Scratch.init(1, 2, 1, 1, 4, jnp.float32)
    accepted, rejected = jax.vmap(newest, (cache.row_axes, 0))(cache, one)
    np.testing.assert_allclose(rejected, [0, 0.26894, 0.73106, 0], atol=1e-5)
    scores = np.array([1, rejected_key, rejected_key, rejected_key, 2])
    weights = np.exp(scores) / np.exp(scores).sum()
    wanted = [0, weights[0], weights[4], weights[1:4].sum()]
    np.testing.assert_allclose(accepted, wanted, atol=1e-5)
