"""Opens a Hugging Face folder: `config.json` and one or many safetensors files."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoints.fields import read_json, shown
from jaxspec.checkpoints.hf_config import parse_config
from jaxspec.checkpoints.tensors import Checkpoint, StoredTensor, is_norm
from jaxspec.errors import UserError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = ("F32", "F16", "BF16")
# Longest first: the three places at which files of these families keep the decoder.
_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
_RENAMED = {
    "norm.weight": "final_norm.weight",
    "language_model.lm_head.weight": "lm_head.weight",
}
# Old files store the rotary frequencies, which the config determines.
_DERIVED = re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
# The image tower of a gemma3 folder: images are not an input of the text decoder.
_IMAGE_PART = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")


def open_folder(folder: Path) -> Checkpoint:
    """Reads config and tensor headers of a model folder, and no weight.

    Raises:
        UserError: no or a bad `config.json`, a shard that is missing, truncated or at
            odds with the index, or only pickled weights.
    """
    values = read_json(folder / "config.json")
    config = parse_config(values, str(folder / "config.json"))
    has_images = values.get("model_type") == "gemma3"
    one_plus = config.family in ("gemma2", "gemma3")
    tensors: dict[str, StoredTensor] = {}
    faults: list[str] = []
    for path, names in _weight_files(folder).items():
        for stored, kind in open_tensors(path, names, faults):
            name = _canonical(stored.source)
            if _DERIVED.fullmatch(name) or (
                has_images and _IMAGE_PART.match(stored.source)
            ):
                continue
            if kind not in _FLOATS:
                faults.append(
                    f"tensor `{stored.source}` holds {kind}, expected one of "
                    f"{', '.join(_FLOATS)}: use the unquantised checkpoint"
                )
            if name in tensors:
                faults.append(
                    f"`{tensors[name].source}` and `{stored.source}` name one tensor"
                )
            tensors[name] = _one_plus(stored) if one_plus and is_norm(name) else stored
    return Checkpoint(str(folder), config, tensors, tuple(faults))


def _canonical(source: str) -> str:
    prefix = next((p for p in _PREFIXES if source.startswith(p)), "")
    name = source.removeprefix(prefix)
    return _RENAMED.get(name, name)


def _one_plus(stored: StoredTensor) -> StoredTensor:
    """Gemma stores a norm's distance from one; the decoder wants the scale itself."""

    def rows(start: int, stop: int) -> np.ndarray:
        return stored.rows(start, stop).astype(np.float32) + np.float32(1)

    return StoredTensor(stored.source, stored.shape, rows)


def _weight_files(folder: Path) -> dict[Path, frozenset[str] | None]:
    """Each file with the names that the index puts there (None: there is no index)."""
    if (folder / _SINGLE).is_file():
        return {folder / _SINGLE: None}
    if (folder / _INDEX).is_file():
        return _indexed_files(folder)
    pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
    hint = "; pickled weights are never read: convert them" if pickled else ""
    raise UserError(f"{folder}: holds neither {_SINGLE} nor {_INDEX}{hint}")


def _indexed_files(folder: Path) -> dict[Path, frozenset[str] | None]:
    index = folder / _INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: `weight_map` is missing or empty")
    names: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file):
            raise UserError(
                f"{index}: `{shown(tensor)[1:-1]}` is in {shown(file)}, expected the "
                "name of a safetensors file in the same folder"
            )
        names.setdefault(file, set()).add(tensor)
    missing = [file for file in sorted(names) if not (folder / file).is_file()]
    if missing:
        raise UserError(
            f"{folder}: {', '.join(missing)} missing, though {_INDEX} names "
            "them: download the folder again"
        )
    return {folder / file: frozenset(names[file]) for file in sorted(names)}


def open_tensors(
    path: Path, indexed: frozenset[str] | None, faults: list[str]
) -> Iterator[tuple[StoredTensor, str]]:
    """The tensors of one file with their stored types; index faults go to `faults`."""
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="numpy")
        names = list(file.keys())
    except (SafetensorError, OSError, ValueError) as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{path}: truncated or not a safetensors file ({detail}): download it again"
        ) from None
    if indexed is not None:
        for name in sorted(indexed - set(names)):
            faults.append(f"`{name}` is not in {path.name}, where the index puts it")
        for name in sorted(set(names) - indexed):
            faults.append(f"`{name}` in {path.name} is not in the index")
    for name in sorted(names):
        piece = file.get_slice(name)
        shape = tuple(piece.get_shape())
        yield StoredTensor(name, shape, _reader(piece)), piece.get_dtype()


def _reader(piece: Any) -> Callable[[int, int], np.ndarray]:
    return lambda start, stop: piece[start:stop]
