"""Texts and chats that somebody else has written, as training texts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.errors import UserError, refuse
from jaxspec.loading import LanguageModel
from jaxspec.tokenizer import Tokenizer
from jaxspec.train.corpus import Corpus, Texts

# What a text has past so many tokens is left out: a batch of them is read at once.
LONGEST = 2048

# A text, or a chat that ends with what the assistant says.
GivenText = str | Sequence[Mapping[str, str]]


def keep_texts(
    model: LanguageModel, corpus: Corpus, rows: int, given: Sequence[GivenText]
) -> Iterator[int]:
    """Adds given texts, `rows` to a part; yields how many are kept so far.

    Of a text all is learned, of a chat the last thing that the assistant says.

    Raises:
        UserError: lists the texts that cannot be learned from, by their number.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise UserError(f"{model.reference} has no tokenizer")
    faults: list[str] = []
    longest = min(LONGEST, model.decoder.config.max_positions)
    encoded = [
        _encode(tokenizer, text, longest, f"text {number}", faults)
        for number, text in enumerate(given, 1)
    ]
    refuse(faults)
    for part in range(len(corpus), -(-len(encoded) // rows)):
        yield part * rows
        corpus.write_texts(part, _joined(encoded[part * rows : (part + 1) * rows]))
    yield len(encoded)


def _encode(
    tokenizer: Tokenizer, text: GivenText, longest: int, name: str, faults: list[str]
) -> tuple[list[int], int]:
    """The ids, and where what is learned begins."""
    try:
        if isinstance(text, str):
            ids, start = tokenizer.encode(text), 0
        else:
            ids, start = _encode_chat(tokenizer, text)
    except UserError as error:
        faults.append(f"{name}: {error}")
        return [], 0
    ids = ids[:longest]
    if start >= len(ids):
        faults.append(
            f"{name}: nothing to learn from within {longest} tokens; leave it out"
        )
    return ids, start


def _encode_chat(tokenizer: Tokenizer, chat: Any) -> tuple[list[int], int]:
    last = chat[-1] if chat else None
    if not isinstance(last, dict) or last.get("role") != "assistant":
        raise UserError("a chat to learn from ends with what the assistant says")
    ids = tokenizer.encode_chat(chat, add_generation_prompt=False)
    asked = tokenizer.encode_chat(chat[:-1])
    same = [one == other for one, other in zip(ids, asked, strict=False)]
    return ids, same.index(False) if False in same else len(same)


def _joined(encoded: list[tuple[list[int], int]]) -> Texts:
    return Texts(
        np.concatenate([np.array(ids, np.int32) for ids, _ in encoded]),
        np.array([len(ids) for ids, _ in encoded], np.int32),
        np.array([start for _, start in encoded], np.int32),
    )
