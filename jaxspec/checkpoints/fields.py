"""Typed reading of a hostile mapping in which no field may be overlooked."""

import json
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jaxspec.errors import UserError, refuse

T = TypeVar("T")
REQUIRED: Any = object()
_LISTED_FAULTS = 40
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80
_short.maxlist = _short.maxdict = 6
_short.maxlevel = 3
_LARGEST_JSON = 64 * 2**20


def shown(value: object) -> str:
    """`value` on one short line, for an error message."""
    # Not `repr`: of aliases within aliases it would make a text without end.
    try:
        text = _short.repr(value)
    except ValueError:
        # Python writes no number of more than some thousand digits.
        return "a number that is too long to show"
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: it cannot be read, is too large, or is no JSON object.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_JSON + 1)
        if len(text) > _LARGEST_JSON:
            raise ValueError("it is over 64 MiB")
        values = json.loads(text.decode("utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        detail = str(error).splitlines()[0]
        raise UserError(f"{path}: not valid JSON ({detail})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds {shown(values)}, expected a JSON object")
    return values


def refuse_all(faults: list[str], heading: str) -> None:
    """`refuse`, with the tail of a very long list counted rather than printed."""
    listed = faults[:_LISTED_FAULTS]
    if len(faults) > len(listed):
        listed.append(f"and {len(faults) - len(listed)} more")
    refuse(listed, heading)


class Fields:
    """Takes fields out of a mapping, collecting faults until `finish` raises them.

    A field that is absent and one that is null are the same, but for `states`. After a
    fault the reader returns a harmless stand-in, so that the remaining fields are still
    looked at.
    """

    def __init__(self, values: Mapping[str, Any], origin: str):
        self.origin = origin
        self.faults: list[str] = []
        self._values = values
        self._unread = set(values)

    def fault(self, name: str, expected: str) -> None:
        """Notes that `name` does not hold what was `expected`."""
        value = self._values.get(name)
        self.faults.append(f"`{name}` is {shown(value)}, expected {expected}")

    def states(self, name: str) -> bool:
        """Whether the field is there, be it null."""
        return name in self._values

    def raw(self, name: str) -> Any:
        """The unchecked value of `name`, or None."""
        self._unread.discard(name)
        return self._values.get(name)

    def integer(
        self, name: str, default: Any = REQUIRED, *, low: int = 1, high: int = 2**31 - 1
    ) -> Any:
        """An integer from `low` to `high`; `default` is returned as it is."""
        value = self.raw(name)
        if value is None:
            return self._absent(name, default, low)
        if type(value) is int and low <= value <= high:
            return value
        self.fault(name, f"an integer from {low} to {high}")
        return low

    def number(
        self, name: str, default: Any = REQUIRED, *, low: float = 0.0, high: float
    ) -> Any:
        """A number over `low`, at most `high`; `default` is returned as it is."""
        value = self.raw(name)
        if value is None:
            return self._absent(name, default, high)
        if type(value) in (int, float) and low < value <= high:
            return float(value)
        self.fault(name, f"a number over {low:g}, at most {high:g}")
        return high

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.raw(name)
        if value is None or type(value) is bool:
            return default if value is None else value
        self.fault(name, "true or false")
        return default

    def choice(self, name: str, choices: Mapping[str, T], default: Any = REQUIRED) -> T:
        """What `choices` holds for the field's text."""
        value = self.raw(name)
        first = next(iter(choices.values()))
        if value is None:
            return self._absent(name, default, first)
        if isinstance(value, str) and value in choices:
            return choices[value]
        self.fault(name, f"one of {', '.join(choices)}")
        return first

    def only(self, name: str, *allowed: object) -> None:
        """Refuses `name` unless it is absent or one of the `allowed` values."""
        value = self.raw(name)
        if value is None or any(type(value) is type(a) and value == a for a in allowed):
            return
        listed = " or ".join([*map(shown, allowed), "no such field"])
        self.fault(name, f"{listed}: anything else is not supported yet")

    def ignore(self, names: Iterable[str]) -> None:
        """Names fields that cannot change what the model computes."""
        self._unread.difference_update(names)

    def refuse_unread(self) -> None:
        """Notes each field that nobody asked for: it might change the maths."""
        for name in sorted(self._unread, key=str):
            self.faults.append(f"unknown field `{shown(name)[1:-1]}` is not supported")
        self._unread.clear()

    def finish(self) -> None:
        """Raises one `UserError` with all faults, or returns."""
        refuse_all(self.faults, self.origin)

    def _absent(self, name: str, default: Any, stand_in: T) -> T:
        if default is REQUIRED:
            self.faults.append(f"`{name}` is missing")
            return stand_in
        return default
