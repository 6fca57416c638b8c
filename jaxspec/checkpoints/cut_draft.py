"""Draft models that are cut from their target: a few layers between its two ends.

The embedding and the vocabulary head are the target's own arrays, so that a file holds
no more than the layers.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxspec.checkpoints.disk import sha256
from jaxspec.checkpoints.head_files import places_of
from jaxspec.checkpoints.load import (
    expected_shapes,
    named_parameters,
    with_parameters,
)
from jaxspec.checkpoints.own_files import WEIGHTS, open_config, read_own, write_own
from jaxspec.drafters.some_ids import SomeIds
from jaxspec.errors import UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder

_KIND = "draft"
_SHARED = ("embed_tokens.weight", "lm_head.weight")


class CutDraft(NamedTuple):
    """What a file holds.

    Attributes:
        layers: of the target, that it began as.
        own: its parameters but those that it shares with the target.
        known: the ids that it drafts; None: all.
    """

    layers: tuple[int, ...]
    own: Mapping[str, jax.Array]
    known: Int[np.ndarray, " v"] | None

    def model(self, target: Decoder) -> Decoder | SomeIds:
        """What drafts, with the target's own arrays at both ends."""
        decoder = cut_decoder(target, self.layers, self.own)
        if self.known is None:
            return decoder
        places = places_of(self.known, target.vocab_size)
        return SomeIds(decoder, jnp.asarray(self.known), places)


def cut_config(target: ModelConfig, layers: tuple[int, ...]) -> ModelConfig:
    """The config of a decoder of these layers of the target.

    Raises:
        UserError: there are none, or the target has no such layer.
    """
    count = target.num_layers
    if not layers or not all(0 <= layer < count for layer in layers):
        raise UserError(
            f"a draft model of the layers {list(layers)}, expected one or more from 0 "
            f"to {count - 1} (the target has {count})"
        )
    return dataclasses.replace(
        target,
        num_layers=len(layers),
        windows=tuple(target.windows[layer] for layer in layers),
        ropes=tuple(target.ropes[layer] for layer in layers),
    )


def cut_parameters(target: Decoder, layers: tuple[int, ...]) -> dict[str, jax.Array]:
    """What a cut draft has of its own before it has learned anything: the target's."""
    parameters = named_parameters(target)
    own = {"final_norm.weight": parameters["final_norm.weight"]}
    for place, layer in enumerate(layers):
        begin = f"layers.{layer}."
        own |= {
            f"layers.{place}.{name.removeprefix(begin)}": array
            for name, array in parameters.items()
            if name.startswith(begin)
        }
    return own


def cut_decoder(
    target: Decoder, layers: tuple[int, ...], own: Mapping[str, Any]
) -> Decoder:
    """The draft model: its own layers and norm, the target's embedding and head."""
    parameters = named_parameters(target)
    shared = {name: parameters[name] for name in _SHARED if name in parameters}
    config = cut_config(target.config, layers)
    return with_parameters(config, {**shared, **own}, target.dtype)


def write_cut(folder: Path, draft: CutDraft, dtype: Any = jnp.bfloat16) -> None:
    """Writes `config.json` and `model.safetensors`; `dtype` is that of the file."""
    write_own(folder, _KIND, draft.layers, draft.own, draft.known, dtype)


def load_cut(
    path: str | os.PathLike[str], target: ModelConfig, dtype: Any = jnp.float32
) -> CutDraft:
    """Reads what `write_cut` has written.

    Raises:
        UserError: lists what is missing, unknown, or does not fit the target.
    """
    folder = Path(path)
    layers = _layers(folder, target)
    shapes = {
        name: shape
        for name, shape in expected_shapes(cut_config(target, layers)).items()
        if name not in _SHARED
    }
    found = read_own(folder, _KIND, shapes, target.vocab_size, dtype)
    return CutDraft(layers, found.parameters, found.known)


def load_cut_model(path: str | os.PathLike[str], target: Decoder) -> Decoder | SomeIds:
    """The model that a file holds, in the dtype of its target.

    Raises:
        UserError: as of `load_cut`.
    """
    return load_cut(path, target.config, target.dtype).model(target)


def cut_sha256(path: str | os.PathLike[str]) -> str:
    """The hash of what `load_cut` reads, by which texts know who wrote them."""
    return sha256(Path(path) / WEIGHTS)


def _layers(folder: Path, target: ModelConfig) -> tuple[int, ...]:
    fields = open_config(folder, _KIND)
    layers = fields.raw("layers")
    count = target.num_layers
    if not isinstance(layers, list) or not all(
        type(layer) is int and 0 <= layer < count for layer in layers or [None]
    ):
        fields.fault("layers", f"some of the target's, 0 to {count - 1}")
    fields.refuse_unread()
    fields.finish()
    assert isinstance(layers, list)
    return tuple(layers)
