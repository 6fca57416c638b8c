"""The tensors of a drafter's weights, from safetensors or a checked pickle."""

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoints.fields import refuse_all, shown
from jaxspec.checkpoints.huggingface import open_tensors
from jaxspec.checkpoints.tensors import StoredTensor
from jaxspec.errors import UserError

KINDS = ("F32", "F16", "BF16", "I64", "I32", "BOOL")
PICKLES = (".pt", ".pth", ".bin")


def find_weights(path: Path, names: tuple[str, ...]) -> Path:
    """The file itself, or the first of `names` that is in the folder.

    Raises:
        UserError: there is none.
    """
    if path.is_file():
        return path
    if path.is_dir():
        for name in names:
            if (path / name).is_file():
                return path / name
        raise UserError(f"{path}: holds none of {', '.join(names)}")
    raise UserError(f"{path}: no such file or folder")


def open_weights(path: Path) -> Mapping[str, StoredTensor]:
    """The tensors by their names in the file.

    Raises:
        UserError: the file is broken, or a pickle that cannot be read safely.
    """
    if path.suffix in PICKLES:
        return _open_pickle(path)
    opened = list(open_tensors(path, None, []))
    refuse_all(
        [
            f"tensor `{shown(stored.source)[1:-1]}` holds {kind}, expected one of "
            f"{', '.join(KINDS)}"
            for stored, kind in opened
            if kind not in KINDS
        ],
        str(path),
    )
    return {stored.source: stored for stored, _ in opened}


def is_whole(stored: StoredTensor) -> bool:
    """Whether a tensor holds whole numbers or truth values."""
    return stored.rows(0, 1).dtype.kind in "iub"


def id_faults(stored: StoredTensor, vocabulary: int) -> list[str]:
    """What keeps a tensor from being a list of ids of a vocabulary, each once."""
    name = f"`{stored.source}`"
    if len(stored.shape) != 1 or not 0 < stored.shape[0] <= vocabulary:
        return [
            f"{name} has shape {list(stored.shape)}, expected 1 to {vocabulary} ids"
        ]
    if not is_whole(stored):
        return [f"{name} is no list of ids"]
    ids = stored.rows(0, stored.shape[0])
    if ids.min() < 0 or ids.max() >= vocabulary or np.unique(ids).size != ids.size:
        return [
            f"{name} has ids from {ids.min()} to {ids.max()}, expected different ones "
            f"from 0 to {vocabulary - 1}"
        ]
    return []


def places_of(ids: np.ndarray, vocabulary: int) -> jax.Array:
    """Where each id of a whole vocabulary stands in `ids`; their number if nowhere."""
    places = np.full(vocabulary, len(ids), np.int32)
    places[ids] = np.arange(len(ids))
    return jnp.asarray(places)


def _open_pickle(path: Path) -> Mapping[str, StoredTensor]:
    """Only tensors come out of `weights_only`: no code of the file is run."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        safe = path.with_suffix(".safetensors").name
        raise UserError(
            f"{path}: pickled weights need PyTorch to be read; convert them where it "
            'is installed: python -c "import torch, safetensors.torch as s; '
            f"s.save_file(torch.load('{path.name}', weights_only=True), '{safe}')\""
        ) from None
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: not a file of weights only ({detail})") from None
    kinds = (torch.float32, torch.float16, torch.bfloat16)
    kinds += (torch.int64, torch.int32, torch.bool)
    if not isinstance(values, dict) or not all(
        isinstance(name, str)
        and isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and value.dtype in kinds
        for name, value in values.items()
    ):
        raise UserError(
            f"{path}: expected names and dense tensors of {', '.join(KINDS)}, and "
            "nothing else"
        )

    def stored(name, tensor):
        whole = tensor.is_floating_point()

        def rows(start, stop):
            part = tensor[start:stop]
            return (part.float() if whole else part).numpy()

        return StoredTensor(name, tuple(tensor.shape), rows)

    return {name: stored(name, tensor.detach()) for name, tensor in values.items()}
