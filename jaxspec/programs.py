"""Compiled programs: one for each set of shapes, compiling timed apart from running."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxspec.sharding import Partition, place


class Program:
    """A function that is compiled ahead for each new set of shapes.

    Attributes:
        compilations: how many programs there are.
        compile_seconds: tracing, lowering and compiling, all of them together.
        dispatches: how often one was executed.
        seconds: from dispatch to `block_until_ready`, all of them together.
    """

    def __init__(
        self,
        function: Callable,
        *,
        static: int = 0,
        donate: tuple = (),
        partition: Partition | None = None,
    ):
        """Wraps `function`, whose last `static` arguments are not arrays.

        With a partition, as `Partition.spread` says, it runs over a mesh.
        """
        self._function, self._static = function, static
        self._donate, self._partition = donate, partition
        self._compiled: dict[Any, Any] = {}
        self.compilations = self.dispatches = 0
        self.compile_seconds = self.seconds = 0.0

    def __call__(self, *args: Any) -> Any:
        """Runs the program for these shapes and waits for its result."""
        arrays, static = self._split(args)
        # Placed first: a host array cannot be lowered for a mesh of several processes.
        arrays = self._placed(arrays)
        compiled = self.compile(*arrays, *static)
        start = time.perf_counter()
        result = jax.block_until_ready(compiled(*arrays))
        self.seconds += time.perf_counter() - start
        self.dispatches += 1
        return result

    def compile(self, *args: Any) -> Any:
        """The executable for these shapes: arrays, or `jax.ShapeDtypeStruct`s.

        Shapes whose sharding names devices of another machine are compiled for it.
        """
        arrays, static = self._split(args)
        leaves, tree = jax.tree.flatten(arrays)
        key = (tree, static, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._compiled:
            start = time.perf_counter()
            self._compiled[key] = self.lower(*args).compile()
            self.compilations += 1
            self.compile_seconds += time.perf_counter() - start
        return self._compiled[key]

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """What `compile` compiles: traced and lowered anew at each call."""
        arrays, static = self._split(args)

        @functools.wraps(self._function)
        def function(*arrays):
            return self._function(*arrays, *static)

        if self._partition is None:
            jitted = jax.jit(function, donate_argnums=self._donate)
        else:
            spread = self._partition.spread(function, arrays)
            jitted = jax.jit(
                spread.function,
                donate_argnums=self._donate,
                in_shardings=spread.given,
                out_shardings=spread.made,
            )
        # float32 means float32: TPU and GPU would use fewer bits by default.
        with jax.default_matmul_precision("highest"):
            return jitted.lower(*arrays)

    def _placed(self, arrays: tuple) -> tuple:
        """Host arrays on the mesh; without one JAX places them by itself."""
        if self._partition is None:
            return arrays
        where = self._partition.state(arrays[2:])
        return *arrays[:2], *jax.tree.map(place, arrays[2:], where)

    def _split(self, args: tuple) -> tuple[tuple, tuple]:
        count = len(args) - self._static
        return args[:count], args[count:]
