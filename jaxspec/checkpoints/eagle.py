"""EAGLE heads from the files of their authors and from those of `speculators`."""

import dataclasses
import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoints.eagle_config import parse_eagle
from jaxspec.checkpoints.fields import read_json, refuse_all, shown
from jaxspec.checkpoints.head_files import (
    find_weights,
    is_whole,
    open_weights,
    places_of,
)
from jaxspec.checkpoints.load import block_shapes, fill, read_tensor
from jaxspec.checkpoints.tensors import StoredTensor, is_norm, tensor_faults
from jaxspec.drafters.eagle_head import (
    Eagle3Config,
    Eagle3Head,
    EagleConfig,
    EagleHead,
)
from jaxspec.errors import UserError
from jaxspec.models.config import ModelConfig

_FILES = ("model.safetensors", "pytorch_model.bin")
# The names of either layout, and those that a head's parameters have here.
_RENAMED = (
    (re.compile(r"midlayer\."), "layers.0."),
    (re.compile(r"transformer\."), "layers.0."),
    (re.compile(r"fusion_fc\."), "fc."),
)
# Rotary frequencies follow from the config; the target's parts serve training only.
_UNUSED = re.compile(r"(.*\.)?rotary_emb\.inv_freq|verifier_(lm_head|norm)\.weight")

Config = EagleConfig | Eagle3Config


def load_eagle(
    path: str | os.PathLike[str], target: ModelConfig, dtype: Any = jnp.float32
) -> tuple[EagleHead | Eagle3Head, jax.Array | None]:
    """Reads a head of EAGLE-1, 2 or 3.

    Args:
        path: a folder with `config.json` and `model.safetensors` or, with PyTorch at
            hand, `pytorch_model.bin`.
        target: the config of the model that it drafts for.
        dtype: of the head.

    Returns:
        The head, and `Eagle.places` of its reduced vocabulary.

    Raises:
        UserError: lists what is missing, unknown, or does not fit the target.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{folder}: expected a folder with config.json and weights")
    file = find_weights(folder, _FILES)
    values = read_json(folder / "config.json")
    tensors, faults = _named(open_weights(file))
    sources = [stored.source for stored in tensors.values()]
    is_eagle3 = any(source.startswith("midlayer.") for source in sources)
    origin = str(folder / "config.json")
    config = parse_eagle(values, origin, target, is_eagle3=is_eagle3)
    config, missing = _with_own_parts(config, tensors, target)
    shapes = head_shapes(config)
    to_target, of_target = tensors.pop("d2t", None), tensors.pop("t2d", None)
    refuse_all(faults + missing + _tensor_faults(tensors, shapes), str(file))
    places = _places(config, to_target, of_target, str(file))
    parameters = {
        name: jnp.asarray(read_tensor(tensors[name], _dtype_of(name, dtype)))
        for name in shapes
    }
    made = EagleHead if isinstance(config, EagleConfig) else Eagle3Head
    return fill(functools.partial(made, config, dtype=dtype), parameters), places


def head_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The parameters of a head: canonical name to shape."""
    decoder = config.decoder
    width = decoder.hidden_size
    shapes = {
        f"layers.{layer}.{name}": shape
        for layer in range(decoder.num_layers)
        for name, shape in block_shapes(decoder).items()
    }
    if config.own_embedding:
        shapes["embed_tokens.weight"] = (decoder.vocab_size, width)
    if isinstance(config, EagleConfig):
        shapes["fc.weight"] = (width, 2 * width)
        if config.bias:
            shapes["fc.bias"] = (width,)
        del shapes["layers.0.input_layernorm.weight"]
        return shapes
    return shapes | _eagle3_shapes(config, shapes)


def _eagle3_shapes(config: Eagle3Config, layers) -> dict[str, tuple[int, ...]]:
    width, taps = config.decoder.hidden_size, len(config.taps)
    joint = taps * config.target_size
    shapes: dict[str, tuple[int, ...]] = {
        f"layers.0.self_attn.{name}_proj.weight": (
            layers[f"layers.0.self_attn.{name}_proj.weight"][0],
            2 * width,
        )
        for name in "qkv"
    }
    shapes["layers.0.hidden_norm.weight"] = shapes["norm.weight"] = (width,)
    shapes["fc.weight"] = (width, joint)
    if config.draft_vocabulary is not None:
        shapes["lm_head.weight"] = (config.draft_vocabulary, width)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (joint,)
    for tap in range(taps * config.norm_each_tap):
        shapes[f"fc_norm.{tap}.weight"] = (config.target_size,)
    return shapes


def _named(
    opened: Mapping[str, StoredTensor],
) -> tuple[dict[str, StoredTensor], list[str]]:
    """The tensors by canonical name."""
    tensors: dict[str, StoredTensor] = {}
    faults = []
    for source, stored in opened.items():
        if _UNUSED.fullmatch(source):
            continue
        name = source
        for pattern, replacement in _RENAMED:
            name = (
                pattern.sub(replacement, name, count=1) if pattern.match(name) else name
            )
        if name in tensors:
            faults.append(f"`{tensors[name].source}` and `{source}` name one tensor")
        tensors[name] = stored
    return tensors, faults


def _with_own_parts(
    config: Config, tensors: Mapping[str, StoredTensor], target: ModelConfig
) -> tuple[Config, list[str]]:
    """Embedding and head are the file's own if it holds them, else the target's."""
    faults = []
    fits = config.decoder.hidden_size == target.hidden_size
    own = "embed_tokens.weight" in tensors
    config = dataclasses.replace(config, own_embedding=own)
    if not own and not fits:
        faults.append(_needs_own("embed_tokens.weight", config, target))
    if isinstance(config, Eagle3Config) and "lm_head.weight" not in tensors:
        reduced = config.draft_vocabulary != target.vocab_size
        if reduced or not fits:
            faults.append(_needs_own("lm_head.weight", config, target))
        config = dataclasses.replace(config, draft_vocabulary=None)
    return config, faults


def _needs_own(name: str, config: Config, target: ModelConfig) -> str:
    ids = getattr(config, "draft_vocabulary", None) or config.decoder.vocab_size
    return (
        f"`{name}` is missing, and a head of width {config.decoder.hidden_size} and "
        f"{ids} ids cannot use the target's, of width {target.hidden_size} and "
        f"{target.vocab_size} ids"
    )


def _tensor_faults(
    tensors: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """What keeps the tensors from being exactly the head's parameters."""

    def unused(source):
        return f"tensor `{shown(source)[1:-1]}` is not used by a head of this config"

    faults = tensor_faults(tensors, shapes, shapes, unused)
    fitting = (t for n, t in tensors.items() if t.shape == shapes.get(n))
    return faults + [
        f"tensor `{shown(stored.source)[1:-1]}` holds whole numbers"
        for stored in fitting
        if is_whole(stored)
    ]


def _places(
    config: Config,
    to_target: StoredTensor | None,
    of_target: StoredTensor | None,
    origin: str,
) -> jax.Array | None:
    """Where each target id stands in the draft vocabulary; None: at its own place."""
    ids = config.decoder.vocab_size
    reduced = getattr(config, "draft_vocabulary", None) or ids
    faults = []
    for stored, size in ((to_target, reduced), (of_target, ids)):
        if stored is not None and (stored.shape != (size,) or not is_whole(stored)):
            faults.append(
                f"`{stored.source}` has shape {list(stored.shape)}, expected {size} "
                "whole numbers"
            )
    refuse_all(faults, origin)
    if to_target is None:
        if reduced != ids:
            raise UserError(
                f"{origin}: `d2t` is missing: which of {ids} ids are the {reduced} of "
                "the draft vocabulary?"
            )
        return None
    offsets = to_target.rows(0, reduced).astype(np.int64)
    known = np.arange(reduced) + offsets
    if known.min() < 0 or known.max() >= ids or np.unique(known).size != reduced:
        raise UserError(
            f"{origin}: `d2t` leads to ids from {known.min()} to {known.max()}, "
            f"expected different ones from 0 to {ids - 1}"
        )
    _confirm(known, offsets, of_target, ids, origin)
    return places_of(known, ids)


def _confirm(known, offsets, of_target: StoredTensor | None, ids: int, origin) -> None:
    """Holds the two maps against each other, as far as the file has both."""
    if of_target is None:
        if not offsets.any() and known.size < ids:
            raise UserError(
                f"{origin}: `d2t` is all zero, as if it had never been filled, and "
                "there is no `t2d` to confirm it"
            )
        return
    there = np.flatnonzero(of_target.rows(0, ids))
    if not np.array_equal(there, np.sort(known)):
        differing = np.setxor1d(there, known)
        raise UserError(
            f"{origin}: `t2d` marks {there.size} ids and `d2t` leads to {known.size}, "
            f"and they differ at id {differing[0]}"
        )


def _dtype_of(name: str, dtype: Any) -> Any:
    norm = is_norm(name) or name.startswith("fc_norm.")
    return jnp.float32 if norm else dtype
