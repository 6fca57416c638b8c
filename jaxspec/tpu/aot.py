"""Compiles a generation for a TPU slice, from shapes alone, where there is no TPU.

libtpu compiles for a described topology. Load it only in a process that has
`ENVIRONMENT` set and holds no TPU: `python -m jaxspec.tpu.aot JOB.yaml` is one.
"""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import topologies

from jaxspec.batching import LARGEST_CHUNK, chunks, pack
from jaxspec.core.dynamic_tree import DynamicTree
from jaxspec.core.topology import Topology
from jaxspec.decoding.state import DecodingState, Options
from jaxspec.drafter_names import place_drafter
from jaxspec.generator import Generator
from jaxspec.loading import LanguageModel
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.programs import Program
from jaxspec.requests import make_request
from jaxspec.row_options import OPTIONS
from jaxspec.sharding import COPIED, Partition, Rules, make_mesh

# Else libtpu looks for a metadata server, and a second process dies on its lock file.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def slice_devices(topology: str) -> list[Any]:
    """The devices of a topology such as `v5e:2x4`, none of which is here."""
    grid = [int(size) for size in topology.partition(":")[2].split("x")]
    # A host has 2 x 2 chips by default, and a smaller slice is refused.
    bounds = (*(min(size, 2) for size in grid[:2]), 1)
    described = topologies.get_topology_desc(
        platform="tpu", topology_name=topology, chips_per_host_bounds=bounds
    )
    return list(described.devices)


def abstract_model(
    config: ModelConfig, dtype: str, partition: Partition, *, draft: bool = False
) -> Decoder:
    """A decoder of shapes only, for a TPU, spread over the mesh."""

    def make():
        return Decoder(config, dtype=dtype, platform="tpu", rngs=nnx.Rngs(0))

    shapes = nnx.eval_shape(make)
    return partition.place(shapes, config.head_dim, draft=draft)


def abstract_drafter(drafter: Any, partition: Partition) -> Any:
    """The same drafter of shapes only, for a TPU."""
    own = getattr(drafter, "model", None) or getattr(drafter, "head", None)
    if own is not None:
        own.platform = "tpu"
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), drafter
    )
    return place_drafter(partition, shapes)
