"""Prompts, or whole texts, from a JSONL file."""

import functools
import json
import pathlib
from typing import Any

from jaxspec.errors import UserError, refuse
from jaxspec.prompt_records import prompt_of
from jaxspec.requests import Prompt


def read_prompts(file: str, chat: bool) -> list[Prompt]:
    """The prompts of a file; with `chat` a text is what the user says in a chat.

    Raises:
        UserError: lists every line that is wrong, by its number.
    """
    return _read_lines(file, "prompt", functools.partial(prompt_of, chat=chat))


def read_texts(file: str) -> list[Any]:
    """The texts of a file, each a text or the messages of a chat.

    Raises:
        UserError: lists every line that is wrong, by its number.
    """

    def parse(record: dict[str, Any]) -> Any:
        text, messages = record.get("text"), record.get("messages")
        if isinstance(text, str):
            return text
        return messages if isinstance(messages, list) else None

    return _read_lines(file, "text", parse)


def _read_lines(file: str, field: str, parse: Any) -> list[Any]:
    """What `parse` makes of the object of each line; None is a fault."""
    path = pathlib.Path(file)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(
            f"{path}: {reason}; expected a JSONL file of {field}s"
        ) from None
    faults: list[str] = []
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            faults.append(f"{path} line {number}: not JSON ({error})")
            continue
        found.append(parse(record) if isinstance(record, dict) else None)
        if found[-1] is None:
            faults.append(
                f'{path} line {number}: expected an object with "{field}" or "messages"'
            )
    refuse(faults)
    if not found:
        raise UserError(f"{path}: no {field}s; expected one JSON object a line")
    return found
