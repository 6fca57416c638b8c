"""Committed keys and values.

Nothing speculative is ever visible: a forward pass reads the cache and writes only
scratch; after accept-reject the accepted path is gathered out of scratch and appended.
So there is no rollback. Entries at or past a row's length are never visible.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int

from jaxspec import ring
from jaxspec.scratch import Scratch
from jaxspec.split import on_each_chip
from jaxspec.types import Model, Output

# Keys are read a block at a time, so that attention costs by the live length and not
# by the capacity. A shorter block wastes less, a longer one loops less.
BLOCK = 128
# Axes of a cache's arrays.
ROWS, SLOTS = 2, 4
# What of one row's arrays is split over a mesh.
ROW_AXES = (None, None, "kv_heads", None, None)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["groups", "length"],
    meta_fields=["windows", "width", "whole"],
)
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Committed keys and values of all layers, with a length for each row.

    Attributes:
        groups: layers of equal window lie together. A group is a tuple of arrays:
            on the CPU one a layer, `[1, 2, B, K, slots, D]`, keys and values on axis 1
            (20-50 % faster there); elsewhere one for all its layers,
            `[layers, 1, B, K, slots, 2 D]`, keys and values side by side, because a TPU
            pads the last axis to 128.
        length: committed tokens of each row.
        windows: of each layer, in tokens; None: it sees everything. The arrays of a
            windowed layer are rings and keep what a query may still see.
        width: of the widest commit.
        whole: on a mesh each chip has all heads, as of a drafter that is copied.
    """

    groups: tuple[tuple[Float[Array, "l parts *B K slots width"], ...], ...]
    length: Int[Array, "*B"]
    windows: tuple[int | None, ...]
    width: int
    whole: bool = False

    @classmethod
    def init(
        cls,
        windows: tuple[int | None, ...],
        rows: int,
        kv_heads: int,
        capacity: int,
        width: int,
        head_dim: int,
        dtype,
        *,
        stacked: bool,
        whole: bool = False,
    ) -> "KVCache":
        """An empty cache for `capacity` tokens a row.

        A commit writes its full static `width`, so that much more than the capacity,
        or than the window, is allocated: the padding then lands where nothing is
        visible, and no write is ever clamped.
        """
        groups = []
        for window in dict.fromkeys(windows):
            layers = windows.count(window)
            seen = capacity if window is None else min(capacity, window)
            common = rows, kv_heads, -(-(seen + width) // BLOCK) * BLOCK
            arrays, shape = (
                (1, (layers, 1, *common, 2 * head_dim))
                if stacked
                else (layers, (1, 2, *common, head_dim))
            )
            groups.append(tuple(jnp.zeros(shape, dtype) for _ in range(arrays)))
        length = jnp.zeros(rows, jnp.int32)
        return cls(tuple(groups), length, windows, width, whole)

    @property
    def row_axes(self) -> "KVCache":
        """The axis of the rows in each leaf, as `jax.vmap` wants it."""
        groups: Any = jax.tree.map(lambda _: ROWS, self.groups)
        return dataclasses.replace(self, groups=groups, length=0)

    @property
    def live_blocks(self) -> Int[Array, ""]:
        """How many blocks hold the longest row: one scalar shared by the batch."""
        return (jnp.max(self.length) + BLOCK - 1) // BLOCK

    def live_blocks_of(self, layer: int, live_blocks: Int[Array, ""]) -> Int[Array, ""]:
        """How many of the live blocks a layer has: a ring has its own at most."""
        return jnp.minimum(live_blocks, self.slots(layer) // BLOCK)

    def slots(self, layer: int) -> int:
        """Entries that a row has room for; none in a cache made for no token."""
        group, *_ = self._locate(layer)
        # From the end: there may be no axis of rows.
        return self.groups[group][0].shape[-2]

    def live_shares(self, tokens: int) -> list[float]:
        """How much of each group's arrays is visible when rows have so many tokens."""
        shares = []
        for window, arrays in zip(
            dict.fromkeys(self.windows), self.groups, strict=True
        ):
            seen = tokens if window is None else min(tokens, window)
            shares.append(min(1.0, seen / arrays[0].shape[SLOTS]))
        return shares

    def _locate(self, layer: int) -> tuple[int, int, int]:
        """The group of a layer, its array there, and its index in the array."""
        window = self.windows[layer]
        group = list(dict.fromkeys(self.windows)).index(window)
        rank = self.windows[:layer].count(window)
        return group, *divmod(rank, self.groups[group][0].shape[0])

    def _grouped(self, layers: list[Array]) -> tuple[tuple[list[Array], ...], ...]:
        """Values of each layer, arranged as the arrays that hold the layers."""
        grouped = []
        for window, arrays in zip(
            dict.fromkeys(self.windows), self.groups, strict=True
        ):
            own = [
                value
                for value, its_window in zip(layers, self.windows, strict=True)
                if its_window == window
            ]
            depth = arrays[0].shape[0]
            parts = [own[at : at + depth] for at in range(0, len(own), depth)]
            grouped.append(tuple(parts))
        return tuple(grouped)

    def block(
        self, layer: int, index: Int[Array, ""]
    ) -> tuple[Float[Array, "K block D"], Float[Array, "K block D"]]:
        """One row's keys and values of a layer, slots `index * BLOCK` on."""
        group, array, depth = self._locate(layer)
        stored = self.groups[group][array]
        _, parts, heads, _, width = stored.shape
        start = (depth, 0, 0, index * BLOCK, 0)
        both = lax.dynamic_slice(stored, start, (1, parts, heads, BLOCK, width))
        if parts == 2:
            return both[0, 0], both[0, 1]
        # Else the TPU compiler turns the whole cache, each round, to suit attention.
        axes = (None,) * both.ndim if self.whole else ROW_AXES
        both = on_each_chip(_keep_layout, both, *axes)
        keys, values = jnp.split(both[0, 0], 2, axis=-1)
        return keys, values

    def positions(self, layer: int, index: Int[Array, ""]) -> Int[Array, " block"]:
        """Where the entries of a block stand in one row; negative: there is none."""
        slots = index * BLOCK + jnp.arange(BLOCK)
        # An array that never wraps is a ring too: this says where its entries end.
        return ring.positions(slots, self.slots(layer), self.length)

    def visible(
        self, layer: int, index: Int[Array, ""], positions: Int[Array, " T"]
    ) -> Bool[Array, "T block"]:
        """Which entries of a block each query of one row may see."""
        key_positions = self.positions(layer, index)
        distance = positions[:, None] - key_positions
        return (key_positions >= 0) & within(self.windows[layer], distance)

    def commit(
        self,
        scratch: Scratch,
        path: Int[Array, "B width"],
        count: Int[Array, " B"],
    ) -> "KVCache":
        """Appends the first `count` slots of `path` to each row.

        Raises:
            ValueError: the cache was made for narrower commits.
        """
        if path.shape[1] > self.width:
            raise ValueError(
                f"a commit of {path.shape[1]} slots to a cache that was made for "
                f"{self.width}: `init` takes the largest width"
            )
        fresh = self._gathered(scratch, path, count)

        def write_row(row, groups):
            """All layers of one row; there is always room, so nothing is clamped."""
            start = (0, 0, row, 0, self.length[row], 0)

            def write(window, array, new):
                entries = lax.dynamic_slice_in_dim(new, row, 1, ROWS)
                # Without it libtpu 0.0.42 fails on a wide commit (INTERNAL: RET_CHECK).
                entries = lax.optimization_barrier(entries)
                if window is None:
                    return lax.dynamic_update_slice(array, entries, start)
                return ring.write(array, entries, start, SLOTS)

            def write_group(window, arrays, new):
                pairs = zip(arrays, new, strict=True)
                return tuple(write(window, array, entries) for array, entries in pairs)

            return tuple(map(write_group, dict.fromkeys(self.windows), groups, fresh))

        # One loop over the rows: a vmapped update is a scatter, which becomes a loop
        # for each array and copies it (on the CPU five times a layer and round).
        rows = self.length.shape[0]
        groups = lax.fori_loop(0, rows, write_row, self.groups)
        return dataclasses.replace(self, groups=groups, length=self.length + count)

    def _gathered(self, scratch, path: Int[Array, "B width"], count: Int[Array, " B"]):
        """The entries of a path, arranged as the cache's arrays; zeros past `count`.

        That makes the write wait for `count`, hence for the end of the round. Else XLA
        may write a layer before its attention has read it, on two copies of the cache.
        """

        def gather_row(entries, path, count):
            committed = jnp.arange(path.size) < count
            return jnp.where(committed[:, None], jnp.take(entries, path, axis=1), 0)

        gather = jax.vmap(gather_row)
        parts = self.groups[0][0].shape[1]
        layers = [
            _together(gather(keys, path, count), gather(values, path, count), parts)
            for keys, values in zip(scratch.keys, scratch.values, strict=True)
        ]
        return jax.tree.map(
            jnp.stack,
            self._grouped(layers),
            is_leaf=lambda part: isinstance(part, list),
        )

    def take_rows(self, rows: Int[Array, " n"]) -> "KVCache":
        """The cache of these rows, in this order; a row may come more than once."""
        groups = jax.tree.map(lambda array: jnp.take(array, rows, ROWS), self.groups)
        return dataclasses.replace(self, groups=groups, length=self.length[rows])

    def put_rows(self, rows: Int[Array, " n"], other: "KVCache") -> "KVCache":
        """Overwrites whole rows: row i of `other`, n rows like these, is `rows[i]`."""

        def put(index, groups):
            def overwrite(mine, theirs):
                row = lax.dynamic_slice_in_dim(theirs, index, 1, ROWS)
                return lax.dynamic_update_slice_in_dim(mine, row, rows[index], ROWS)

            return jax.tree.map(overwrite, groups, other.groups)

        # A loop, for the reason that `commit` is one.
        groups = lax.fori_loop(0, rows.shape[0], put, self.groups)
        length = self.length.at[rows].set(other.length)
        return dataclasses.replace(self, groups=groups, length=length)

    def shorten(self, length: Int[Array, " B"]) -> "KVCache":
        """Forgets what stands at or past `length`; never makes a row longer.

        A ring cannot show again what it has overwritten: `length` must be at least
        s - 1, s being the greatest length at which a commit to the row has begun.
        """
        return dataclasses.replace(self, length=jnp.minimum(self.length, length))


def _keep_layout(values: Array) -> Array:
    return with_layout_constraint(values, Layout(tuple(range(values.ndim))))


def _together(keys: Array, values: Array, parts: int) -> Array:
    """Keys and values `[B, K, T, D]` as an array of the cache holds them."""
    if parts == 2:
        return jnp.stack([keys, values])
    return jnp.concatenate([keys, values], axis=-1)[None]


def run_rows(
    model: Model,
    cache: KVCache,
    scratch: Scratch,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    slots: Int[Array, " T"],
    visible: Bool[Array, "B T P"],
    taps: tuple[int, ...] = (),
    *,
    first: int = 0,
    last: int | None = None,
    hidden: Float[Array, "B T E"] | None = None,
) -> tuple[Output, Scratch]:
    """One forward pass of a model, which is written for one row, over all rows.

    Runs blocks `first` to `last`, from `hidden` on where it is given.
    """
    live_blocks = cache.live_blocks

    def one_row(tokens, positions, cache, scratch, visible, hidden):
        return model(
            tokens,
            positions,
            cache,
            scratch,
            slots,
            visible,
            live_blocks=live_blocks,
            first=first,
            last=last,
            hidden=hidden,
            taps=taps,
        )

    rows = jax.vmap(one_row, in_axes=(0, 0, cache.row_axes, 0, 0, 0))
    return rows(tokens, positions, cache, scratch, visible, hidden)


def causal(rows: int, tokens: int) -> Bool[Array, "B T T"]:
    """The visibility of a plain run of tokens: each sees itself and those before."""
    return jnp.broadcast_to(jnp.tri(tokens, dtype=bool), (rows, tokens, tokens))


def within(window: int | None, distance: Int[Array, "*any"]) -> Bool[Array, "*any"]:
    """The one window rule: a query sees keys 0 to `window - 1` positions back."""
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)
