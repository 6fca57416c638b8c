"""What is split over a mesh, said to the compiler in the middle of a program.

Code names logical axes; the partition that is followed while a program is traced says
which of them are split.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array


class Splits(Protocol):
    """A mesh, and the axis of it that splits a logical one, if any does."""

    @property
    def mesh(self) -> Mesh: ...  # noqa: D102

    def split(self, axis: str | None, size: int) -> str | None: ...  # noqa: D102


_FOLLOWED: ContextVar[Splits | None] = ContextVar("followed", default=None)


@contextlib.contextmanager
def following(splits: Splits) -> Iterator[None]:
    """While a program is traced, it is split like this."""
    token = _FOLLOWED.set(splits)
    try:
        yield
    finally:
        _FOLLOWED.reset(token)


def on_each_chip(
    function: Callable[[Array], Array], values: Array, *axes: str | None
) -> Array:
    """`function` of each chip's own part of the values, split by these logical axes.

    For what the compiler cannot split by itself, and would gather the values for.
    """
    splits = _FOLLOWED.get()
    if splits is None:
        return function(values)
    pairs = zip(axes, values.shape, strict=True)
    spec = PartitionSpec(*[splits.split(axis, size) for axis, size in pairs])
    names = {axis for axis in spec if axis is not None}
    if not names:
        return function(values)
    # Inside of a `shard_map` the mesh is already there, with its rows by hand.
    inside = not jax.sharding.get_abstract_mesh().empty
    mesh: Any = None if inside else splits.mesh
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        axis_names=names,
        check_vma=False,
    )(values)
