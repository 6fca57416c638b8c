"""What a user asks for, checked as a whole before any compute."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

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


class Option(NamedTuple):
    """What an option of a row may be."""

    default: Any
    whole: bool
    least: float
    most: float
    expected: str

    def takes(self, value: Any) -> bool:
        """Whether a value is in range; None is, where that is the default."""
        if value is None:
            return self.default is None
        kinds = int if self.whole else (int, float)
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        return is_number and self.least <= value <= self.most and math.isfinite(value)


_SMALLEST = math.ulp(0.0)
OPTIONS = {
    "max_new_tokens": Option(128, True, 0, 2**31 - 1, "a whole number, 0 or more"),
    "temperature": Option(0.0, False, 0, math.inf, "a number, 0 (greedy) or more"),
    "top_k": Option(None, True, 0, 2**31 - 1, "a whole number, 0 (all) or more"),
    "top_p": Option(None, False, _SMALLEST, 1, "a number over 0, at most 1"),
    "min_p": Option(None, False, 0, 1, "a number from 0 to 1"),
    "seed": Option(0, True, 0, 2**64 - 1, "a whole number from 0 to 2**64 - 1"),
}


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
    columns, faults = _columns(len(prompts), options)
    ids = [_ids(model, prompt, row, faults) for row, prompt in enumerate(prompts)]
    refuse(faults)
    return [
        Request(
            prompt, ids[row], **{name: column[row] for name, column in columns.items()}
        )
        for row, prompt in enumerate(prompts)
    ]


def check_options(rows: int, **options: Any) -> None:
    """Refuses bad options without a model at hand.

    Raises:
        UserError: lists every fault.
    """
    refuse(_columns(rows, options)[1])


def _columns(
    rows: int, options: Mapping[str, Any]
) -> tuple[dict[str, list], list[str]]:
    """The value of every option for every row, and what is wrong with them."""
    if unknown := set(options) - set(OPTIONS):
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    faults: list[str] = []
    columns = {}
    for name, option in OPTIONS.items():
        value = options.get(name, option.default)
        if name == "seed" and isinstance(value, int):
            value = [value + row for row in range(rows)]
        columns[name] = _column(name, option, value, rows, faults)
    return columns, faults


def _column(
    name: str, option: Option, value: Any, rows: int, faults: list[str]
) -> list:
    values = list(value) if isinstance(value, (list, tuple)) else [value] * rows
    if len(values) != rows:
        faults.append(
            f"{name} has {len(values)} values for {rows} prompts; give one for all or "
            "one for each"
        )
    if len({each is None for each in values}) > 1:
        faults.append(f"{name} must be given for every prompt or for none")
    for each in dict.fromkeys(map(repr, values)):
        bad = [v for v in values if repr(v) == each and not option.takes(v)]
        faults += [f"{name} is {each}, expected {option.expected}"] if bad else []
    return values


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
