"""What a user asks for, checked as a whole before any compute."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jaxspec.errors import UserError, refuse
from jaxspec.loading import LanguageModel

# A text, a chat (messages with `role` and `content`), or token ids.
Prompt: TypeAlias = str | Sequence[Mapping[str, str]] | Sequence[int]
PerRow: TypeAlias = float | Sequence[float] | None


@dataclasses.dataclass(frozen=True)
class Request:
    """One row: its prompt's ids and its options; None: the option is absent."""

    prompt: Prompt
    ids: list[int]
    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int


def is_single(prompts: Any) -> bool:
    """Whether this is one prompt (a text, a chat, ids) and not a list of prompts."""
    if isinstance(prompts, str):
        return True
    return bool(prompts) and isinstance(prompts[0], (int, Mapping))


def make_requests(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: Any = 128,
    temperature: Any = 0.0,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    seed: Any = 0,
) -> list[Request]:
    """One request a prompt; an option is one value for all rows, or one value each.

    An int seed gives row i the seed `seed + i`.

    Raises:
        UserError: lists every fault of every option and prompt.
    """
    rows = len(prompts)
    if isinstance(seed, int):
        seed = [seed + row for row in range(rows)]
    options = {
        "max_new_tokens": (max_new_tokens, _is_count, "a whole number, 0 or more"),
        "temperature": (temperature, _is_temperature, "a number, 0 (greedy) or more"),
        "top_k": (top_k, _is_count, "a whole number, 0 (keep all) or more"),
        "top_p": (top_p, _is_top_p, "a number over 0, at most 1"),
        "min_p": (min_p, _is_min_p, "a number from 0 to 1"),
        "seed": (seed, _is_seed, "a whole number from 0 to 2**64 - 1"),
    }
    faults: list[str] = []
    columns = {
        name: _column(name, *option, rows, faults) for name, option in options.items()
    }
    ids = [_ids(model, prompt, row, faults) for row, prompt in enumerate(prompts)]
    refuse(faults)
    return [
        Request(
            prompt,
            ids[row],
            **{name: column[row] for name, column in columns.items()},
        )
        for row, prompt in enumerate(prompts)
    ]


def _column(name, value, is_good, expected, rows, faults) -> list:
    """The value of an option for every row."""
    values = list(value) if isinstance(value, (list, tuple)) else [value] * rows
    if len(values) != rows:
        faults.append(
            f"{name} has {len(values)} values for {rows} prompts; give one for all or "
            "one for each"
        )
    optional = name in ("top_k", "top_p", "min_p")
    if optional and len({each is None for each in values}) > 1:
        faults.append(f"{name} must be given for every prompt or for none")
    for each in dict.fromkeys(values):
        if not (each is None and optional) and not is_good(each):
            faults.append(f"{name} is {each!r}, expected {expected}")
    return values


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_temperature(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_top_p(value: Any) -> bool:
    return _is_number(value) and 0 < value <= 1


def _is_min_p(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_seed(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64


def _ids(model: LanguageModel, prompt: Any, row: int, faults: list[str]) -> list[int]:
    """The ids of a prompt; faults are noted with the row's number."""
    try:
        ids = _encode(model, prompt)
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


def _encode(model: LanguageModel, prompt: Any) -> list[int]:
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
