"""What a checkpoint is to the loader: a config and tensors under canonical names."""

import dataclasses
from collections.abc import Callable, Collection, Mapping

import numpy as np

from jaxspec.checkpoints.fields import shown
from jaxspec.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, read in blocks of rows so that no second copy is held.

    Attributes:
        source: the name inside the file, for messages.
        shape: as the model sees it, `[out, in]` for a projection.
        rows: `rows(start, stop)` decodes these rows (elements, if the tensor has one
            axis) into an array of a float dtype of the format's choice.
    """

    source: str
    shape: tuple[int, ...]
    rows: Callable[[int, int], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened model file or folder of which no weight has been read yet.

    Attributes:
        path: as the user gave it.
        config: the decoder that the checkpoint describes.
        tensors: by canonical name, a parameter's path in `Decoder`: the Hugging Face
            name without `model.`, and `final_norm` for its last norm.
        faults: what opening found wrong with single tensors; `load_parameters` reports
            them together with its own.
    """

    path: str
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    faults: tuple[str, ...] = ()


def is_norm(name: str) -> bool:
    """Whether a canonical name is the scale of a norm, which stays float32."""
    return name.endswith("norm.weight")


def unused_tensor(source: str, config: ModelConfig) -> str:
    """The fault of a tensor of the file that no parameter of the decoder takes."""
    return (
        f"tensor `{shown(source)[1:-1]}` is not used by a {config.family} decoder of "
        "this config"
    )


def tensor_faults(
    tensors: Mapping[str, StoredTensor],
    needed: Collection[str],
    allowed: Mapping[str, tuple[int, ...]],
    unused: Callable[[str], str],
) -> list[str]:
    """What keeps the tensors of a file from being exactly the parameters.

    Args:
        tensors: by canonical name.
        needed: the parameters.
        allowed: shapes of the parameters, and of what else may stand in the file.
        unused: the fault of a tensor, by its name in the file, that is none of these.
    """
    faults = [f"tensor `{name}` is missing" for name in needed if name not in tensors]
    for name, stored in tensors.items():
        if name not in allowed:
            faults.append(unused(stored.source))
        elif stored.shape != allowed[name]:
            faults.append(
                f"tensor `{shown(stored.source)[1:-1]}` has shape "
                f"{list(stored.shape)}, expected {list(allowed[name])}"
            )
    return faults
