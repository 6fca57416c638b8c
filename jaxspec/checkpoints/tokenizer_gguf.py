"""Builds the tokenizer that the metadata of a GGUF file describes."""

import collections
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.checkpoints.gguf_header import LazyArray, read_header
from jaxspec.checkpoints.tokenizer_files import checked_ids, package_faults
from jaxspec.errors import UserError, refuse

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
# What a chat template calls a token, and what the file calls its id.
_NAMED = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
# Types of the tokens.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5

# The split of each named pre-tokenizer, before the byte-level alphabet is applied.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"qwen2": _WORDS % r"\p{N}", "llama-bpe": _WORDS % r"\p{N}{1,3}"}
_PRE_TOKENIZERS = ("gpt-2", "llama-bpe", "qwen2", "smollm")


def read_gguf(path: Path) -> dict[str, Any]:
    """Returns the arguments of `Tokenizer` that a GGUF file describes.

    Raises:
        UserError: the file is cut or corrupt, or its tokenizer is of a kind that is
            not supported (named in the message).
    """
    fields = _fields(path)
    faults: list[str] = []
    tokens, types = _vocabulary(fields, faults)

    def ids(name: str) -> list[int]:
        key = f"{name}_token_id"
        return checked_ids(fields.get(key), _PREFIX + key, len(tokens), faults)

    eos = ids("eos") + ids("eot") + ids("eom")
    named = {name: ids(key) for name, key in _NAMED.items()}
    template = fields.get(_TEMPLATE)
    if template is not None and not isinstance(template, str):
        faults.append(f"{_TEMPLATE} is not a text")
    is_bytes = fields.get("model") == "gpt2"
    build = _byte_level if is_bytes else _sentencepiece
    with package_faults(path):
        backend = build(fields, tokens, types, faults)
    # What llama.cpp does with a file that does not say.
    adds_bos = not is_bytes or fields.get("pre") == "llama-bpe"
    return {
        "backend": backend,
        "source": str(path),
        "bos_id": next(iter(named["bos"]), None),
        "eos_ids": eos,
        "adds_bos": bool(fields.get("add_bos_token", adds_bos)),
        "chat_template": template,
        "unused": [index for index, kind in enumerate(types) if kind == _UNUSED],
        "named_tokens": {f"{n}_token": tokens[i[0]] for n, i in named.items() if i},
    }


def _fields(path: Path) -> dict[str, Any]:
    """The tokenizer's metadata, without the common prefix of the keys."""
    fields = {}
    for key, value in read_header(path).metadata.items():
        if key.startswith((_PREFIX, _TEMPLATE)):
            try:
                value = value.read() if isinstance(value, LazyArray) else value
            except UserError as error:
                raise UserError(f"{path}: {key}: {error}") from None
            fields[key.removeprefix(_PREFIX)] = value
    return fields
