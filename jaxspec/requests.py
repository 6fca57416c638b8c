"""What a user asks for, checked as a whole before any compute."""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

from jaxspec.errors import UserError, refuse
from jaxspec.loading import LanguageModel
from jaxspec.row_options import as_sequences, as_texts, columns_of

# A text, a chat (messages with `role` and `content`), or token ids.
Prompt: TypeAlias = str | Sequence[Mapping[str, str]] | Sequence[int]
PerRow: TypeAlias = float | Sequence[float] | None
# Sequences of ids (a bare id is one of length 1), or a list of such for each prompt.
IdSequences: TypeAlias = Sequence[Any] | None


@dataclasses.dataclass(frozen=True)
class Request:
    """One row: its prompt's ids and its options; None or empty: there is none."""

    prompt: Prompt
    ids: list[int]
    max_new_tokens: int
    min_new_tokens: int | None
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float]
    banned_sequences: list[list[int]]
    stop_sequences: list[list[int]]
    stop: list[str]
    seed: int


def is_single(prompts: Any) -> bool:
    """Whether this is one prompt (a text, a chat, ids) and not a list of prompts."""
    if isinstance(prompts, str):
        return True
    return bool(prompts) and isinstance(prompts[0], (int, Mapping))


def make_requests(
    model: LanguageModel, prompts: Sequence[Prompt], **options: Any
) -> list[Request]:
    """One request a prompt; an option is one value for all rows, or one value each.

    Raises:
        UserError: lists every fault of every option and prompt.
    """
    columns, faults = columns_of(len(prompts), options)
    ids = [_ids(model, prompt, row, faults) for row, prompt in enumerate(prompts)]
    refuse(faults)
    rows = zip(*columns.values(), strict=True)
    requests = [
        make_request(prompt, ids[row], dict(zip(columns, values, strict=True)))
        for row, (prompt, values) in enumerate(zip(prompts, rows, strict=True))
    ]
    faults = [
        f"prompt {row}: {fault}"
        for row, request in enumerate(requests)
        for fault in _unknown_ids(request, model.decoder.vocab_size)
    ]
    if any(request.stop for request in requests) and model.tokenizer is None:
        faults.append(
            f"{model.reference} has no tokenizer to find stop texts with; use "
            "stop_sequences, which are ids"
        )
    refuse(faults)
    return requests


def make_request(prompt: Prompt, ids: list[int], values: dict[str, Any]) -> Request:
    """A row from the values of `OPTIONS`, all of them, as a user gives them."""
    values["logit_bias"] = values["logit_bias"] or {}
    values["stop"] = as_texts(values["stop"])
    for name in ("banned_sequences", "stop_sequences"):
        values[name] = as_sequences(values[name])
    return Request(prompt, ids, **values)


def _unknown_ids(request: Request, size: int) -> list[str]:
    named = {
        "logit_bias": request.logit_bias,
        "banned_sequences": [*chain(*request.banned_sequences)],
        "stop_sequences": [*chain(*request.stop_sequences)],
    }
    return [
        f"{name} names id {max(ids)}, outside the {size} known ids"
        for name, ids in named.items()
        if max(ids, default=0) >= size
    ]


def _ids(model: LanguageModel, prompt: Any, row: int, faults: list[str]) -> list[int]:
    """The ids of a prompt; faults are noted with the row's number."""
    try:
        ids = prompt_ids(model, prompt)
    except UserError as error:
        faults.append(f"prompt {row}: {error}")
        return []
    size = model.decoder.vocab_size
    if not ids:
        faults.append(
            f"prompt {row} is empty and {model.reference} has no BOS token to begin "
            "with; give at least one token"
        )
    for token in ids:
        if not 0 <= token < size:
            faults.append(f"prompt {row}: id {token} is outside the {size} known ids")
            break
    return ids


def prompt_ids(model: LanguageModel, prompt: Any) -> list[int]:
    """The ids of a prompt, not yet held against the vocabulary.

    Raises:
        UserError: it is no prompt, or the model cannot encode it.
    """
    is_ids = isinstance(prompt, (list, tuple)) and all(
        isinstance(token, int) and not isinstance(token, bool) for token in prompt
    )
    if is_ids and not isinstance(prompt, str):
        return list(prompt)
    if model.tokenizer is None:
        raise UserError(f"{model.reference} has no tokenizer, so prompts must be ids")
    if isinstance(prompt, str):
        return model.tokenizer.encode(prompt)
    return model.tokenizer.encode_chat(prompt)
