"""A model as users hold it: decoder, tokenizer and the reference they came from."""

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from jaxspec.errors import UserError
from jaxspec.models.decoder import Decoder
from jaxspec.sharding import Partition

if TYPE_CHECKING:
    from jaxspec.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A decoder and its tokenizer.

    Attributes:
        reference: what it was loaded by, for messages.
        tokenizer: None: prompts must be ids, and the text of a result is empty.
        partition: the mesh that it is spread over; None: it is on one device.
    """

    reference: str
    decoder: Decoder
    tokenizer: "Tokenizer | None" = None
    partition: Partition | None = None


def load(
    reference: str | os.PathLike[str],
    dtype: str = "float32",
    partition: Partition | None = None,
    *,
    draft: bool = False,
) -> LanguageModel:
    """Loads a model by path, short name or Hugging Face id, fetching it if need be.

    Args:
        reference: a GGUF file, a folder with config.json and safetensors, a short name
            (`jaxspec fetch --list`), or `org/name`.
        dtype: `float32` or `bfloat16`, of the weights and the cache.
        partition: spreads it over a mesh, tensor by tensor.
        draft: it is to draft, so that the partition's rules for drafters apply.

    Raises:
        UserError: the model is unknown, cannot be had, or is not a supported one.
    """
    from jaxspec.checkpoints.hub import fetch
    from jaxspec.checkpoints.load import load_decoder
    from jaxspec.tokenizer import Tokenizer

    path = Path(fetch(reference))
    read = Tokenizer.from_folder if path.is_dir() else Tokenizer.from_gguf
    # The tokenizer first: what is wrong with it is known within a second.
    tokenizer = read(path)
    decoder = load_decoder(path, dtype, partition, draft=draft)
    return LanguageModel(str(reference), decoder, tokenizer, partition)


def require_same_tokenizer(target: LanguageModel, draft: LanguageModel) -> None:
    """Refuses a draft whose ids mean other tokens; padding at the end may differ.

    Raises:
        UserError: names the first token that differs.
    """
    if target.tokenizer is None or draft.tokenizer is None:
        return
    difference = target.tokenizer.first_difference(draft.tokenizer)
    if difference is not None:
        token_id, wanted, found = difference
        raise UserError(
            f"{draft.reference} cannot draft for {target.reference}: their tokenizers "
            f"differ, first at id {token_id} ({wanted!r} against {found!r}); choose a "
            "draft model of the same family, or --drafter prompt-lookup"
        )
