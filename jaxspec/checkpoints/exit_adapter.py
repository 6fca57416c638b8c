"""Files of exit adapters."""

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from jaxspec.checkpoints.load import fill, named_parameters
from jaxspec.checkpoints.own_files import open_config, read_own, write_own
from jaxspec.drafters.early_exit import ExitAdapter
from jaxspec.errors import UserError
from jaxspec.models.config import ModelConfig

_KIND = "early-exit"


def write_adapter(
    folder: Path,
    adapter: ExitAdapter,
    layers: int,
    known: Int[np.ndarray, " v"] | None,
    dtype: Any = jnp.bfloat16,
) -> None:
    """Writes an adapter for an exit after `layers` layers.

    Args:
        folder: made if it is not there.
        adapter: of the exit.
        layers: of the target, before the exit.
        known: the ids that are drafted; None: all.
        dtype: of the file.
    """
    write_own(folder, _KIND, layers, named_parameters(adapter), known, dtype)


def load_adapter(
    path: str | os.PathLike[str], target: ModelConfig, dtype: Any = jnp.float32
) -> tuple[ExitAdapter, int, jax.Array | None, jax.Array | None]:
    """Reads what `write_adapter` has written.

    Returns:
        The adapter, the layers before its exit, and `EarlyExit.known` and `.places`.

    Raises:
        UserError: lists what is missing, unknown, or does not fit the target.
    """
    folder = Path(path)
    layers = _layers(folder, target)
    width = target.hidden_size
    shapes = {"norm.weight": (width,), "linear.weight": (width, width)}
    found = read_own(folder, _KIND, shapes, target.vocab_size, dtype)

    def make(rngs: nnx.Rngs) -> ExitAdapter:
        return ExitAdapter(width, target.norm_eps, dtype, rngs)

    adapter = fill(make, found.parameters)
    known = None if found.known is None else jnp.asarray(found.known)
    return adapter, layers, known, found.places(target.vocab_size)


def _layers(folder: Path, target: ModelConfig) -> int:
    fields = open_config(folder, _KIND)
    layers = fields.integer("layers")
    fields.refuse_unread()
    fields.finish()
    if layers >= target.num_layers:
        raise UserError(
            f"{fields.origin}: an exit after {layers} layers, but the target has "
            f"{target.num_layers}; the exit lies before the last"
        )
    return layers
