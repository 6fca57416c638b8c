"""Medusa heads from the files of Cai et al. and from those of vLLM's layout."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.checkpoints.fields import refuse_all, shown
from jaxspec.checkpoints.head_files import (
    find_weights,
    id_faults,
    is_whole,
    open_weights,
    places_of,
)
from jaxspec.checkpoints.tensors import StoredTensor
from jaxspec.drafters.medusa import Heads
from jaxspec.errors import UserError
from jaxspec.models.config import ModelConfig

_FILES = (
    *("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
    *("model.safetensors", "pytorch_model.bin"),
)
# A folder of the whole model has its heads under a prefix, and other tensors beside.
_PREFIXES = ("medusa_head.", "medusa_heads.")
# Up to 64 heads and layers, each number written in one way only.
_N = r"([0-9]|[1-5][0-9]|6[0-3])"
_BLOCK = (
    re.compile(rf"{_N}\.{_N}\.linear\.(weight|bias)"),
    re.compile(rf"blocks\.{_N}\.layers\.{_N}\.(weight|bias)"),
)
_OWN = re.compile(rf"{_N}\.{_N}\.weight")
_VLLM = re.compile(rf"lm_heads\.{_N}\.weight")

# ("weight" | "bias" | "vocabulary", head, layer) or ("ids", 0, 0).
Key = tuple[str, int, int]
_IDS: Key = ("ids", 0, 0)


def load_heads(
    path: str | os.PathLike[str], config: ModelConfig, dtype: Any = jnp.float32
) -> Heads:
    """Reads the heads; how many there are is counted in the tensors.

    The config that lies beside them is not asked: published ones say 2 where the file
    has 5.

    Args:
        path: a safetensors file, a `.pt` or `.bin` (with PyTorch at hand), or a folder
            with one of the usual names.
        config: of the target.
        dtype: of the heads.

    Raises:
        UserError: lists every tensor that is missing, unknown or of another shape.
    """
    file = find_weights(Path(path), _FILES)
    opened = open_weights(file)
    if all(any(n.startswith(prefix) for n in opened) for prefix in _PREFIXES):
        raise UserError(f"{file}: holds heads under {' and '.join(_PREFIXES)}")
    tensors = _own_tensors(opened)
    found: dict[Key, StoredTensor] = {}
    faults = []
    for name, stored in tensors.items():
        key = _key(name)
        if key is None:
            faults.append(f"tensor `{shown(name)[1:-1]}` is none of Medusa heads")
        elif key in found:
            faults.append(f"`{found[key].source}` and `{name}` name one tensor")
        else:
            found[key] = stored
    refuse_all(faults + _faults(found, config), str(file))
    return _read_heads(found, config.vocab_size, dtype)


def _own_tensors(tensors: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """Those under a prefix if there are any; else all of them."""
    own = {
        name.removeprefix(prefix): stored
        for name, stored in tensors.items()
        for prefix in _PREFIXES
        if name.startswith(prefix)
    }
    return own or tensors


def _key(name: str) -> Key | None:
    for pattern in _BLOCK:
        if match := pattern.fullmatch(name):
            return match[3], int(match[1]), int(match[2])
    if match := _OWN.fullmatch(name):
        return "vocabulary", int(match[1]), int(match[2])
    if match := _VLLM.fullmatch(name):
        # Its number of layers is not in the name.
        return "vocabulary", int(match[1]), -1
    return _IDS if name == "token_map" else None


def _sizes(found: Mapping[Key, StoredTensor]) -> tuple[int, int]:
    """How many heads there are, and how many blocks a head has."""
    weights = [key for key in found if key[0] == "weight"]
    heads = max((head for _, head, _ in weights), default=-1) + 1
    return heads, max((layer for *_, layer in weights), default=-1) + 1


def _faults(found: Mapping[Key, StoredTensor], config: ModelConfig) -> list[str]:
    """What keeps the tensors from being heads of the target."""
    heads, layers = _sizes(found)
    if not heads:
        return ["holds no Medusa head"]
    ids = found.get(_IDS)
    if ids is not None and (faults := id_faults(ids, config.vocab_size)):
        return faults
    faults = []
    width, rows = config.hidden_size, config.vocab_size
    if ids is not None:
        rows = ids.shape[0]
    wanted: dict[Key, tuple[int, ...]] = {}
    own = {key for key in found if key[0] == "vocabulary"}
    biased = any(key[0] == "bias" for key in found)
    for head in range(heads):
        for layer in range(layers):
            wanted["weight", head, layer] = (width, width)
            if biased:
                wanted["bias", head, layer] = (width,)
        if own:
            last = -1 if ("vocabulary", head, -1) in found else layers
            wanted["vocabulary", head, last] = (rows, width)
    for key, shape in wanted.items():
        if key not in found:
            faults.append(f"head {key[1]} lacks its {key[0]}")
        elif found[key].shape == shape and is_whole(found[key]):
            faults.append(f"tensor `{found[key].source}` holds whole numbers")
        elif found[key].shape != shape:
            faults.append(
                f"tensor `{found[key].source}` has shape {list(found[key].shape)}, "
                f"expected {list(shape)} for a target of width {width} and "
                f"{config.vocab_size} ids"
            )
    for key in set(found) - set(wanted) - {_IDS}:
        faults.append(f"tensor `{found[key].source}` belongs to no head")
    return faults


def _read_heads(
    found: Mapping[Key, StoredTensor], vocabulary_size: int, dtype: Any
) -> Heads:
    heads, layers = _sizes(found)

    def whole(key: Key) -> jax.Array:
        stored = found[key]
        return jnp.asarray(stored.rows(0, stored.shape[0]), dtype)

    def stack(kind: str) -> jax.Array:
        return jnp.stack(
            [
                jnp.stack([whole((kind, head, layer)) for layer in range(layers)])
                for head in range(heads)
            ]
        )

    weights = stack("weight")
    biased = any(key[0] == "bias" for key in found)
    biases = stack("bias") if biased else jnp.zeros(weights.shape[:3], dtype)
    own = sorted(key for key in found if key[0] == "vocabulary")
    vocabulary = jnp.stack([whole(key) for key in own]) if own else None
    stored = found.get(_IDS)
    if stored is None:
        return Heads(weights, biases, vocabulary)
    ids = stored.rows(0, stored.shape[0])
    places = places_of(ids, vocabulary_size)
    return Heads(weights, biases, vocabulary, jnp.asarray(ids), places)
