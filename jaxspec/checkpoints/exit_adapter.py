"""Files of exit adapters: this project's own, since nobody else publishes any."""

import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from jaxspec.checkpoints.atomic import replace
from jaxspec.checkpoints.fields import Fields, read_json, refuse_all, shown
from jaxspec.checkpoints.head_files import id_faults, open_weights, places_of
from jaxspec.checkpoints.load import fill, named_parameters, read_tensor
from jaxspec.checkpoints.tensors import is_norm, tensor_faults
from jaxspec.drafters.early_exit import ExitAdapter
from jaxspec.errors import UserError
from jaxspec.models.config import ModelConfig

_CONFIG, _WEIGHTS, _IDS = "config.json", "model.safetensors", "token_map"


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
    from safetensors.flax import save

    tensors = {n: a.astype(dtype) for n, a in named_parameters(adapter).items()}
    if known is not None:
        tensors[_IDS] = jnp.asarray(known, jnp.int32)
    folder.mkdir(parents=True, exist_ok=True)
    replace(folder / _WEIGHTS, save(tensors))
    config = {"drafter": "early-exit", "layers": layers}
    replace(folder / _CONFIG, (json.dumps(config, indent=2) + "\n").encode())


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
    file = folder / _WEIGHTS
    tensors = dict(open_weights(file))
    stored = tensors.pop(_IDS, None)
    width = target.hidden_size
    shapes = {"norm.weight": (width,), "linear.weight": (width, width)}

    def unused(source):
        return f"tensor `{shown(source)[1:-1]}` is none of an exit adapter"

    refuse_all(tensor_faults(tensors, shapes, shapes, unused), str(file))
    parameters = {
        name: jnp.asarray(
            read_tensor(tensors[name], jnp.float32 if is_norm(name) else dtype)
        )
        for name in shapes
    }

    def make(rngs: nnx.Rngs) -> ExitAdapter:
        return ExitAdapter(width, target.norm_eps, dtype, rngs)

    adapter = fill(make, parameters)
    if stored is None:
        return adapter, layers, None, None
    refuse_all(id_faults(stored, target.vocab_size), str(file))
    ids = stored.rows(0, stored.shape[0])
    return adapter, layers, jnp.asarray(ids), places_of(ids, target.vocab_size)


def _layers(folder: Path, target: ModelConfig) -> int:
    path = folder / _CONFIG
    if not path.is_file():
        raise UserError(f"{folder}: holds no {_CONFIG} of an exit adapter")
    fields = Fields(read_json(path), str(path))
    fields.choice("drafter", {"early-exit": True})
    layers = fields.integer("layers")
    fields.refuse_unread()
    fields.finish()
    if layers >= target.num_layers:
        raise UserError(
            f"{path}: an exit after {layers} layers, but the target has "
            f"{target.num_layers}; the exit lies before the last"
        )
    return layers
