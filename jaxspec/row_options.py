"""The options that each prompt of a call may have: their defaults, ranges and names."""

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxspec.errors import refuse

# Within what float32 holds with room for a few products.
_SMALLEST, _MOST, _LARGEST = math.ulp(0.0), 2**31 - 1, 1e30
_FINITE = "a number from -1e30 to 1e30"
_COUNT = "a whole number from 0 to 2**31 - 1"


class Option(NamedTuple):
    """What an option of a row may be.

    Attributes:
        takes: whether a value of one row is in range.
        expected: the same in words.
        is_column: whether a value is one for each row.
    """

    default: Any
    takes: Callable[[Any], bool]
    expected: str
    is_column: Callable[[Any], bool]


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _number(default: Any, least: float, most: float, expected: str) -> Option:
    return Option(default, _in_range((int, float), least, most), expected, _is_list)


def is_whole(value: Any, least: float, most: float = math.inf) -> bool:
    """Whether a value is an int, and no bool, in a range."""
    return _in_range(int, least, most)(value)


def _whole(default: Any, least: float, most: float, expected: str) -> Option:
    return Option(default, _in_range(int, least, most), expected, _is_list)


def _in_range(kinds: Any, least: float, most: float) -> Callable[[Any], bool]:
    def takes(value: Any) -> bool:
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        return is_number and least <= value <= most

    return takes


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_bias(value: Any) -> bool:
    is_number = _in_range((int, float), -_LARGEST, _LARGEST)
    return isinstance(value, Mapping) and all(
        _is_id(token) and (is_number(bias) or bias == -math.inf)
        for token, bias in value.items()
    )


def _are_sequences(value: Any) -> bool:
    return _is_list(value) and all(
        _is_id(each) or (_is_list(each) and each and all(map(_is_id, each)))
        for each in value
    )


def _is_column_of_sequences(value: Any) -> bool:
    """A list for each row, which holds sequences: one level deeper than for all."""
    return (
        _is_list(value)
        and all(each is None or _is_list(each) for each in value)
        and any(each is None or any(map(_is_list, each)) for each in value)
    )


def _are_texts(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return _is_list(texts) and all(isinstance(each, str) and each for each in texts)


def _is_column_of_texts(value: Any) -> bool:
    return _is_list(value) and any(each is None or _is_list(each) for each in value)


_SEQUENCES = Option(
    None,
    _are_sequences,
    "a list of sequences of ids, none of them empty",
    _is_column_of_sequences,
)
OPTIONS = {
    "max_new_tokens": _whole(128, 0, _MOST, _COUNT),
    "min_new_tokens": _whole(None, 0, _MOST, _COUNT),
    "temperature": _number(0.0, 0, _LARGEST, "a number from 0 (greedy) to 1e30"),
    "top_k": _whole(None, 0, _MOST, f"{_COUNT}; 0 keeps all"),
    "top_p": _number(None, _SMALLEST, 1, "a number over 0, at most 1"),
    "min_p": _number(None, 0, 1, "a number from 0 to 1"),
    "repetition_penalty": _number(
        None, 1 / _LARGEST, _LARGEST, "a number over 0, 1e-30 to 1e30"
    ),
    "presence_penalty": _number(None, -_LARGEST, _LARGEST, _FINITE),
    "frequency_penalty": _number(None, -_LARGEST, _LARGEST, _FINITE),
    "logit_bias": Option(
        None, _is_bias, "a mapping of ids to numbers (to -inf: never)", _is_list
    ),
    "banned_sequences": _SEQUENCES,
    "stop_sequences": _SEQUENCES,
    "stop": Option(
        None, _are_texts, "a text or a list of texts, none empty", _is_column_of_texts
    ),
    "seed": _whole(0, 0, 2**64 - 1, "a whole number from 0 to 2**64 - 1"),
}
# Of these a row may have none beside one that has some.
_COLLECTIONS = {"logit_bias", "banned_sequences", "stop_sequences", "stop"}


def check_options(rows: int, **options: Any) -> None:
    """Refuses bad options without a model at hand.

    Raises:
        UserError: lists every fault.
    """
    refuse(columns_of(rows, options)[1])


def columns_of(
    rows: int, options: Mapping[str, Any]
) -> tuple[dict[str, list], list[str]]:
    """The value of every option for every row, and what is wrong with them."""
    if unknown := set(options) - set(OPTIONS):
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    faults: list[str] = []
    columns = {}
    for name, option in OPTIONS.items():
        value = options.get(name, option.default)
        if name == "seed" and option.takes(value):
            value = [value + row for row in range(rows)]
        columns[name] = _column(name, option, value, rows, faults)
    if not faults:
        faults += _too_short(columns)
    return columns, faults


def _column(
    name: str, option: Option, value: Any, rows: int, faults: list[str]
) -> list:
    values = list(value) if option.is_column(value) else [value] * rows
    if len(values) != rows:
        faults.append(
            f"{name} has {len(values)} values for {rows} prompts; give one for all or "
            "one for each"
        )
    if name not in _COLLECTIONS and len({each is None for each in values}) > 1:
        faults.append(f"{name} must be given for every prompt or for none")
    bad = [each for each in values if not _takes(name, option, each)]
    for each in dict.fromkeys(map(reprlib.repr, bad)):
        faults.append(f"{name} is {each}, expected {option.expected}")
    return values


def _takes(name: str, option: Option, value: Any) -> bool:
    if value is None:
        return option.default is None
    return option.takes(value)


def _too_short(columns: Mapping[str, list]) -> list[str]:
    pairs = zip(columns["min_new_tokens"], columns["max_new_tokens"], strict=True)
    return [
        f"prompt {row}: min_new_tokens is {least}, over max_new_tokens, {most}"
        for row, (least, most) in enumerate(pairs)
        if least is not None and least > most
    ]


def as_sequences(value: Sequence[Any] | None) -> list[list[int]]:
    """The sequences of a row, a bare id being one of length 1."""
    return [list(each) if _is_list(each) else [each] for each in value or ()]


def as_texts(value: str | Sequence[str] | None) -> list[str]:
    """The texts of a row, a bare one being a list of one."""
    return [value] if isinstance(value, str) else list(value or ())
