"""Prompts from a JSONL file."""

import json
import pathlib

from jaxspec.errors import UserError, refuse
from jaxspec.requests import Prompt


def read_prompts(file: str, chat: bool) -> list[Prompt]:
    """The prompts of a file; with `chat` a text is what the user says in a chat.

    Raises:
        UserError: lists every line that is wrong, by its number.
    """
    path = pathlib.Path(file)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(f"{path}: {reason}; expected a JSONL file of prompts") from None
    faults: list[str] = []
    prompts = [
        _parse_line(line, f"{path} line {number}", chat, faults)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    refuse(faults)
    if not prompts:
        raise UserError(f"{path}: no prompts; expected one JSON object a line")
    return prompts


def _parse_line(line: str, where: str, chat: bool, faults: list[str]) -> Prompt:
    """The prompt of a line; a fault is noted with the line's number."""
    try:
        record = json.loads(line)
    except ValueError as error:
        faults.append(f"{where}: not JSON ({error})")
        return ""
    if isinstance(record, dict):
        prompt, messages = record.get("prompt"), record.get("messages")
        if isinstance(prompt, str):
            return as_chat(prompt) if chat else prompt
        for given in (prompt, messages):
            if isinstance(given, list):
                return given
    faults.append(f'{where}: expected an object with "prompt" or "messages"')
    return ""


def as_chat(text: str) -> Prompt:
    """A chat in which the user says this."""
    return [{"role": "user", "content": text}]
