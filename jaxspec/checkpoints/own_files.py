"""Files of drafters in this project's own format: of kinds that nobody else publishes.

A folder with `config.json`, which has the kind and the target's layers, and
`model.safetensors`: the parameters and, in `token_map`, the ids that are drafted.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec.checkpoints.atomic import replace
from jaxspec.checkpoints.fields import Fields, read_json, refuse_all, shown
from jaxspec.checkpoints.head_files import id_faults, open_weights, places_of
from jaxspec.checkpoints.load import read_tensor
from jaxspec.checkpoints.tensors import is_norm, tensor_faults
from jaxspec.errors import UserError

WEIGHTS = "model.safetensors"
_CONFIG, _IDS = "config.json", "token_map"
Layers = int | tuple[int, ...]


class Contents(NamedTuple):
    """What a file holds.

    Attributes:
        known: the ids that are drafted; None: all.
    """

    parameters: dict[str, jax.Array]
    known: Int[np.ndarray, " v"] | None

    def places(self, vocabulary: int) -> Int[Array, " V"] | None:
        """Where each id stands among those drafted, their number if nowhere."""
        return None if self.known is None else places_of(self.known, vocabulary)


def write_own(
    folder: Path,
    kind: str,
    layers: Layers,
    parameters: Mapping[str, jax.Array],
    known: Int[np.ndarray, " v"] | None,
    dtype: Any,
) -> None:
    """Writes a drafter.

    Args:
        folder: made if it is not there.
        kind: of drafter.
        layers: of the target, that the drafter is about.
        parameters: by name.
        known: the ids that are drafted; None: all.
        dtype: of the file.
    """
    from safetensors.flax import save

    tensors = {name: array.astype(dtype) for name, array in parameters.items()}
    if known is not None:
        tensors[_IDS] = jnp.asarray(known, jnp.int32)
    folder.mkdir(parents=True, exist_ok=True)
    replace(folder / WEIGHTS, save(tensors))
    config = {"drafter": kind, "layers": layers}
    replace(folder / _CONFIG, (json.dumps(config, indent=2) + "\n").encode())


def open_config(folder: Path, kind: str) -> Fields:
    """The config of a drafter; its `layers` are still to be read.

    Raises:
        UserError: there is none, or it is of another kind.
    """
    path = folder / _CONFIG
    if not path.is_file():
        raise UserError(
            f"{folder}: holds no {_CONFIG} of what `jaxspec train {kind}` writes"
        )
    fields = Fields(read_json(path), str(path))
    fields.choice("drafter", {kind: True})
    return fields


def read_own(
    folder: Path,
    kind: str,
    shapes: Mapping[str, tuple[int, ...]],
    vocabulary: int,
    dtype: Any,
) -> Contents:
    """Reads the parameters, of these shapes.

    Raises:
        UserError: lists what is missing, unknown, or of another shape.
    """
    file = folder / WEIGHTS
    tensors = dict(open_weights(file))
    stored = tensors.pop(_IDS, None)

    def unused(source: str) -> str:
        return f"tensor `{shown(source)[1:-1]}` is none of `jaxspec train {kind}`"

    faults = tensor_faults(tensors, shapes, shapes, unused)
    faults += [] if stored is None else id_faults(stored, vocabulary)
    refuse_all(faults, str(file))
    parameters = {
        name: jnp.asarray(
            read_tensor(tensors[name], jnp.float32 if is_norm(name) else dtype)
        )
        for name in shapes
    }
    known = None if stored is None else stored.rows(0, stored.shape[0])
    return Contents(parameters, known)
