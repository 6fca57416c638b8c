"""How a generation is spread over a mesh: rows over one axis, the models over another.

Rows never meet: each part of the `data` axis runs the whole loop on rows of its own, as
a `shard_map` by hand, so that no collective and no bound (live blocks, the branch of a
round) crosses it. The `model` axis is left to the compiler: where the weights lie says
what it needs to move.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxspec.cache import ROWS, KVCache
from jaxspec.core.history import Counts
from jaxspec.core.sampling import Sampling
from jaxspec.errors import UserError
from jaxspec.scratch import Scratch
from jaxspec.split import following

MESH_AXES = ("data", "model")
KV_HEADS = 3
# Logical axes of the parameters, by the end of their names; all others are everywhere.
PARAMETERS: Mapping[str, tuple[str | None, ...]] = {
    "embed_tokens.weight": ("vocabulary", None),
    "lm_head.weight": ("vocabulary", None),
    "q_proj.weight": ("heads", None),
    "q_proj.bias": ("heads",),
    "k_proj.weight": ("kv_heads", None),
    "k_proj.bias": ("kv_heads",),
    "v_proj.weight": ("kv_heads", None),
    "v_proj.bias": ("kv_heads",),
    "o_proj.weight": (None, "heads"),
    "gate_proj.weight": ("inner", None),
    "gate_proj.bias": ("inner",),
    "up_proj.weight": ("inner", None),
    "up_proj.bias": ("inner",),
    "down_proj.weight": (None, "inner"),
}
# What the second axis of each array is, in these parts of a state; the first is rows.
SECOND_AXES: Mapping[type, str] = {Scratch: "kv_heads", Counts: "vocabulary"}


@dataclasses.dataclass(frozen=True)
class Rules:
    """The mesh axis that splits each logical axis; None: no axis does.

    A logical axis that does not divide is not split: attention of 9 heads over 8 chips
    is computed on each of them.
    """

    rows: str | None = "data"
    heads: str | None = "model"
    kv_heads: str | None = "model"
    inner: str | None = "model"
    vocabulary: str | None = "model"


COPIED = Rules(heads=None, kv_heads=None, inner=None, vocabulary=None)


def make_mesh(data: int = 1, model: int = 1, devices: Any = None) -> Mesh:
    """A mesh of `data` times `model` devices, by default the first that there are.

    Raises:
        UserError: there are not so many.
    """
    devices = jax.devices() if devices is None else list(devices)
    if min(data, model) < 1 or data * model > len(devices):
        raise UserError(
            f"mesh is {data}x{model}, but there are {len(devices)} devices; choose "
            "data and model sizes, 1 or more, whose product is at most that"
        )
    grid = np.array(devices[: data * model]).reshape(data, model)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * 2)


@dataclasses.dataclass(frozen=True)
class Partition:
    """A mesh and what of a generation lies where on it.

    Attributes:
        mesh: with the axes that the rules name.
        rules: for the target.
        draft_rules: for the drafter's own parameters; `COPIED`: all on each chip.
    """

    mesh: Mesh
    rules: Rules = Rules()
    draft_rules: Rules = Rules()

    @property
    def row_parts(self) -> int:
        """In how many parts the rows are split: a batch is a multiple of it."""
        axis = self.rules.rows
        return 1 if axis is None else self.mesh.shape[axis]

    def parameter(
        self, name: str, shape: tuple[int, ...], head_dim: int, *, draft: bool = False
    ) -> NamedSharding:
        """Where a parameter lies, by the end of its name."""
        rules = self.draft_rules if draft else self.rules
        axes = PARAMETERS.get(".".join(name.split(".")[-2:]), ())
        units = {"heads": head_dim, "kv_heads": head_dim}
        split = [
            self.split(axis, size // units.get(axis or "", 1), rules)
            for axis, size in zip(axes, shape, strict=False)
        ]
        return NamedSharding(self.mesh, PartitionSpec(*split))

    def place(self, tree: Any, head_dim: int, *, draft: bool = False) -> Any:
        """Puts a model's or a drafter's parameters where they belong.

        A leaf that is shapes only is given the sharding.
        """

        def put(path, leaf):
            names = [
                str(getattr(key, "name", getattr(key, "key", key))) for key in path
            ]
            name = ".".join(each for each in names if each != "value")
            where = self.parameter(name, leaf.shape, head_dim, draft=draft)
            return place(leaf, where)

        return jax.tree_util.tree_map_with_path(put, tree)

    def state(self, tree: Any) -> Any:
        """The sharding of each array of a state, of options, of a piece of prompt."""
        apart = (KVCache, Sampling, *SECOND_AXES)

        def put(path, part):
            drafts = any(getattr(key, "name", None) == "drafter" for key in path)
            rules = self.draft_rules if drafts else self.rules
            return self._of_part(part, dataclasses.replace(rules, rows=self.rules.rows))

        is_part = lambda each: isinstance(each, apart)  # noqa: E731
        return jax.tree_util.tree_map_with_path(put, tree, is_leaf=is_part)

    def _of_part(self, part: Any, rules: Rules) -> Any:
        if isinstance(part, KVCache):
            return jax.tree.map(
                lambda rows, leaf: self._of_cache(rows, leaf, rules),
                part.row_axes,
                part,
            )
        # The rows first, and what the second axis is.
        axes = {0: "rows", 1: SECOND_AXES.get(type(part))}
        where = jax.tree.map(lambda leaf: self._named(leaf, axes, rules), part)
        if isinstance(part, Sampling) and part.logit_bias is not None:
            axes = {0: "rows", 1: "vocabulary"}
            bias = self._named(part.logit_bias, axes, rules)
            return where._replace(logit_bias=bias)
        if isinstance(part, Scratch):
            # Its second axis is the slots.
            positions = self._named(part.positions, {0: "rows"}, rules)
            return where._replace(positions=positions)
        return where

    def _of_cache(self, rows: int, leaf: Any, rules: Rules) -> NamedSharding:
        axes = {ROWS: "rows", KV_HEADS: "kv_heads"} if rows == ROWS else {0: "rows"}
        return self._named(leaf, axes, rules)

    def _named(
        self, leaf: Any, axes: Mapping[int, str | None], rules: Rules
    ) -> NamedSharding:
        spec = [
            self.split(axes.get(axis), size, rules)
            for axis, size in enumerate(leaf.shape)
        ]
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def split(
        self, axis: str | None, size: int, rules: Rules | None = None
    ) -> str | None:
        """The mesh axis over which `size` of a logical axis are split, if they are."""
        over = getattr(rules or self.rules, axis) if axis else None
        return over if over and size % self.mesh.shape[over] == 0 else None

    def spread(self, function: Callable, arrays: tuple) -> "Spread":
        """The function over the mesh, and where its arguments and results lie.

        Its first two arguments are target and drafter, which lie where they are; the
        others and the results have rows.
        """
        models = jax.tree.map(lambda leaf: leaf.sharding, arrays[:2])
        given = (*models, *self.state(arrays[2:]))
        made = self.state(jax.eval_shape(function, *arrays))

        @functools.wraps(function)
        def traced(*arrays):
            with following(self):
                return function(*arrays)

        if self.row_parts == 1:
            return Spread(traced, given, made)
        by_hand = jax.tree.map(lambda where: self._rows_only(where), (given, made))
        nothing = jax.tree.map(lambda _: PartitionSpec(), models)
        mapped = jax.shard_map(
            traced,
            mesh=self.mesh,
            in_specs=(*nothing, *by_hand[0][2:]),
            out_specs=by_hand[1],
            axis_names={self.rules.rows},
            check_vma=False,
        )
        return Spread(mapped, given, made)

    def _rows_only(self, where: NamedSharding) -> PartitionSpec:
        rows = self.rules.rows
        return PartitionSpec(*(axis if axis == rows else None for axis in where.spec))


def fetch(tree: Any) -> Any:
    """The arrays on the host, whichever process holds which rows of them.

    Where other processes hold some, all must call it.
    """
    if all(map(_is_here, jax.tree.leaves(tree))):
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def _is_here(leaf: Any) -> bool:
    """Whether this process can read it alone: host arrays, and what it has whole."""
    if not isinstance(leaf, jax.Array):
        return True
    return leaf.is_fully_addressable or leaf.is_fully_replicated


@dataclasses.dataclass(frozen=True)
class Spread:
    """A function over a mesh."""

    function: Callable
    given: tuple
    made: Any


def place(leaf: Any, where: NamedSharding) -> Any:
    """An array on the mesh: its own devices' parts of a host array that all know."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
    if isinstance(leaf, jax.Array):
        return jax.device_put(leaf, where)
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, where, lambda part: host[part])
