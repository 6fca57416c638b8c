"""Compiles the warp for a vocabulary that is split over 8 devices, and runs it.

Run as `python -m tests.core.sharded_warp` in a process of its own with 8 devices,
because their number is fixed when JAX starts. Prints one JSON object: the largest array
that any collective moves, by program, and how far the results are from those of one
device.
"""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxspec.core.report import top
from jaxspec.core.sampling import Sampling
from jaxspec.core.warp import warp

ROWS, SLOTS, VOCABULARY, ALTERNATIVES = 2, 5, 151_936, 3
COLLECTIVE = re.compile(
    r"= (.*) (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\("
)
SHAPE = re.compile(r"\w+\[([\d,]*)\]")


def largest_moved(text):
    """Entries of the largest array in the result of any collective."""
    results = [found[1] for found in map(COLLECTIVE.search, text.splitlines()) if found]
    sizes = [
        np.prod([int(side) for side in shape.split(",") if side] or [1])
        for result in results
        for shape in SHAPE.findall(result)
    ]
    return int(max(sizes, default=0))


def alternatives(logits, sampling):
    return top(logits, ALTERNATIVES)


def library_top_k(logits, sampling):
    """The control: it gathers the vocabulary."""
    values, ids = jax.lax.top_k(logits, ALTERNATIVES)
    return ids, values


def main():
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec(None, None, "model"))
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (ROWS, SLOTS, VOCABULARY)).astype(np.float32)
    full = lambda value, dtype: jnp.full(ROWS, value, dtype)  # noqa: E731
    sampling = Sampling(
        full(0.8, "f4"), full(50, "i4"), full(0.95, "f4"), full(0.01, "f4")
    )
    report = {}
    for function in (warp, alternatives, library_top_k):
        program = jax.jit(function)
        apart = jax.device_put(logits, split)
        text = program.lower(apart, sampling).compile().as_text()
        here, there = (
            jax.tree.map(np.asarray, program(given, sampling))
            for given in (logits, apart)
        )
        both = zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True)
        report[function.__name__] = {
            "largest_moved": largest_moved(text),
            "difference": float(
                max(np.abs(np.exp(a) - np.exp(b)).max() for a, b in both)
                if function is warp
                else max(np.abs(a - b).max() for a, b in both)
            ),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
