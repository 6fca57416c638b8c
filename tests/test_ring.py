"""Windowed layers keep a ring, and see what a full cache would show them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import cache as cache_module
from jaxspec import ring
from jaxspec.cache import BLOCK, KVCache
from jaxspec.scratch import Scratch
from tests.fakes import full_layout

HEADS, HEAD_DIM = 1, 2
TOKENS = 3
commit = jax.jit(KVCache.commit)


def test_a_slot_holds_the_newest_position_that_belongs_there():
    for size in range(1, 7):
        for length in range(4 * size):
            held = ring.positions(jnp.arange(size), size, jnp.int32(length))
            for slot, position in enumerate(held.tolist()):
                there = [at for at in range(length) if at % size == slot]
                assert position == max(there) if there else position < 0


@pytest.mark.parametrize("size, width", ((7, 1), (7, 3), (7, 6), (5, 5)))
def test_a_write_wraps_at_every_offset_and_spares_the_rest(size, width):
    rng = np.random.default_rng(0)
    write = jax.jit(
        lambda stored, entries, row, at: ring.write(stored, entries, (row, at, 0), 1)
    )
    for at in range(2 * size):
        stored = rng.normal(size=(2, size, 3)).astype("f4")
        entries = rng.normal(size=(1, width, 3)).astype("f4")
        wanted = stored.copy()
        for index in range(width):
            wanted[1, (at + index) % size] = entries[0, index]
        np.testing.assert_array_equal(write(stored, entries, 1, at), wanted)


def random_scratch(rng, windows, rows, slots):
    def entries():
        shape = (rows, HEADS, slots, HEAD_DIM)
        return tuple(jnp.asarray(rng.normal(size=shape), "f4") for _ in windows)

    return Scratch(entries(), entries(), jnp.zeros((rows, slots), int))


def make(init, windows, rows, capacity, width, stacked=False):
    sizes = rows, HEADS, capacity, width, HEAD_DIM
    return init(windows, *sizes, jnp.float32, stacked=stacked)


@jax.jit
def read(cache):
    """By layer: positions, entries, and what the next queries of a row see of them."""

    def row(cache):
        queries = cache.length + jnp.arange(TOKENS)

        def layer(layer):
            def block(index):
                entries = jnp.concatenate(cache.block(layer, index), -1)[0]
                visible = cache.visible(layer, index, queries)
                return cache.positions(layer, index), entries, visible.T

            # Not unrolled: there may be a block a slot.
            blocks = jnp.arange(cache.slots(layer) // cache_module.BLOCK)
            return jax.tree.map(jnp.concatenate, jax.vmap(block)(blocks))

        return [layer(index) for index in range(len(cache.windows))]

    return jax.vmap(row, (cache.row_axes,))(cache)


def seen(cache):
    """By layer, row and query: the visible positions in order, and what lies there."""
    return [
        [
            [(at[by[sees[by]]], entries[by[sees[by]]]) for sees in visible.T]
            for at, entries, visible in zip(*map(np.asarray, layer), strict=True)
            for by in [np.argsort(at)]
        ]
        for layer in read(cache)
    ]


def assert_seen_alike(one, other):
    np.testing.assert_array_equal(one.length, other.length)
    jax.tree.map(np.testing.assert_array_equal, seen(one), seen(other))


@pytest.fixture
def tight(monkeypatch):
    """Blocks of one slot: a ring has R = W + C slots and none to spare."""
    monkeypatch.setattr(cache_module, "BLOCK", 1)


def case(window, width, prompt, *, stacked=False, marks=()):
    named = f"W={window}, C={width}, prompt {prompt}" + ", stacked" * stacked
    return pytest.param(window, width, prompt, stacked, id=named, marks=marks)


@pytest.mark.parametrize(
    "window, width, prompt, stacked",
    (
        case(8, 5, 30),
        case(8, 5, 30, stacked=True),
        case(3, 6, 40),
        *(
            case(window, width, prompt, stacked=stacked, marks=pytest.mark.full)
            for window, width, prompt in ((1, 1, 9), (2, 9, 60), (13, 4, 5), (20, 7, 1))
            for stacked in (False, True)
        ),
    ),
)
def test_random_commits_show_what_a_full_cache_shows(
    tight, window, width, prompt, stacked
):
    """Prompts in chunks, then rounds; rows end in a state of their own at the wrap."""
    rng, windows, rows = np.random.default_rng(window), (window, None, window), 3
    capacity = prompt + 6 * (window + width)
    sizes = windows, rows, capacity, width, stacked
    rings, full = make(KVCache.init, *sizes), make(full_layout, *sizes)
    assert rings.slots(0) == window + width < full.slots(0) == capacity + width
    fed, offsets = np.zeros(rows, int), set()
    texts = np.maximum(prompt - 3 * np.arange(rows), 1)
    while (fed < capacity - width).all():
        most = np.where(fed < texts, texts - fed, rng.integers(0, width + 1, rows))
        count = np.minimum(most, width)
        scratch = random_scratch(rng, windows, rows, width + 2)
        path = np.stack([rng.permutation(width + 2)[:width] for _ in range(rows)])
        rings, full = (commit(each, scratch, path, count) for each in (rings, full))
        offsets |= set(fed % (window + width))
        fed += count
        assert_seen_alike(rings, full)
    assert min(fed) > 3 * (window + width)
    assert len(offsets) > (window + width) / 2


def filled(cache, length):
    """A cache of rows of this length, fed in commits of the full width."""
    rng, rows = np.random.default_rng(0), cache.length.size
    path = np.broadcast_to(np.arange(cache.width), (rows, cache.width))
    while int(cache.length[0]) < length:
        count = jnp.minimum(length - cache.length, cache.width)
        scratch = random_scratch(rng, cache.windows, rows, cache.width)
        cache = commit(cache, scratch, path, count)
    return cache


def test_a_row_can_lose_its_last_commit_and_one_token_more(tight):
    """As far as `shorten` promises; one token further the window has a hole."""
    sizes = (4,), 2, 60, 3
    pair = [filled(make(init, *sizes), 21) for init in (KVCache.init, full_layout)]
    for length in (20, 18, 17):
        assert_seen_alike(*(each.shorten(jnp.array([length, 21])) for each in pair))
    with pytest.raises(AssertionError):
        assert_seen_alike(*(each.shorten(jnp.array([16, 21])) for each in pair))


def test_an_empty_commit_leaves_room_to_lose_a_token(tight):
    """A row whose prompt has ended, in later chunks: what a draft model shortens."""
    sizes = (4,), 2, 60, 3
    pair = [filled(make(init, *sizes), 20) for init in (KVCache.init, full_layout)]
    scratch = random_scratch(np.random.default_rng(1), (4,), 2, 3)
    path, count = np.zeros((2, 3), int), np.array([0, 3])
    pair = [commit(each, scratch, path, count) for each in pair]
    assert_seen_alike(*(each.shorten(jnp.array([19, 22])) for each in pair))


@pytest.mark.parametrize("stacked", (False, True))
def test_rows_are_taken_and_put_whole(tight, stacked):
    sizes = (4, None), 3, 40, 3, stacked
    running, fresh = make(KVCache.init, *sizes), make(KVCache.init, *sizes)
    running, fresh = filled(running, 22), filled(fresh, 9).take_rows(jnp.array([1, 0]))
    mixed = jax.jit(KVCache.put_rows)(running, jnp.array([2, 0]), fresh)
    assert mixed.length.tolist() == [9, 22, 9]
    for array, old, new in zip(
        *(jax.tree.leaves(each.groups) for each in (mixed, running, fresh)), strict=True
    ):
        np.testing.assert_array_equal(array[:, :, 1], old[:, :, 1])
        np.testing.assert_array_equal(array[:, :, [2, 0]], new)
    assert_seen_alike(mixed.take_rows(jnp.array([2, 0])), fresh)


def slots(windows, capacity, width):
    cache = make(KVCache.init, windows, 1, capacity, width)
    return [group[0].shape[4] for group in cache.groups]


def test_a_ring_has_room_for_window_and_commit_and_is_never_the_larger():
    assert slots((None, 512, 512), 4096, 512) == [4608, 1024]
    assert slots((None, 512), 4096, 513) == [4736, 1152]
    assert slots((None, 8), 30, 5) == [BLOCK, BLOCK]
    assert slots((None, 4096), 300, 5) == [3 * BLOCK, 3 * BLOCK]


def test_blocks_read_are_those_of_the_ring():
    cache = make(KVCache.init, (512, None), 2, 4096, 512)
    for length, blocks in ((0, 0), (100, (1, 1)), (1024, (8, 8)), (3500, (8, 28))):
        live = dataclasses.replace(cache, length=jnp.array([length, 0])).live_blocks
        read = [cache.live_blocks_of(layer, live) for layer in (0, 1)]
        assert all(each.shape == () for each in read)
        np.testing.assert_array_equal(read, blocks)


def test_a_commit_wider_than_the_cache_was_made_for_is_refused():
    cache = make(KVCache.init, (8,), 1, 40, 3)
    scratch = random_scratch(np.random.default_rng(0), (8,), 1, 4)
    with pytest.raises(ValueError, match=r"commit of 4 slots .* made for 3"):
        cache.commit(scratch, jnp.zeros((1, 4), int), jnp.array([1]))
