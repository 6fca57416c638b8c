"""The prompts of a job, from a JSONL file in which lines may be wrong."""

import codecs
import hashlib
import json
from typing import Any, NamedTuple

from jaxspec.batch.store import AnyPath, as_path, reaching
from jaxspec.errors import UserError
from jaxspec.prompt_records import prompt_of
from jaxspec.requests import Prompt

# A chat has three levels; what has so many more could not be written to a record.
_MOST_LEVELS = 64


class Item(NamedTuple):
    """A line of the input: its prompt, or what is wrong with it.

    Attributes:
        index: its place among the lines that are not blank, from 0.
        prompt: None if there is an error.
        error: names the line's number, blank ones counted, from 1.
    """

    index: int
    prompt: Prompt | None
    error: str | None


def read_items(path: str | AnyPath, chat: bool) -> list[Item]:
    """The lines of a file; with `chat` a text is what the user says in a chat.

    Raises:
        UserError: the file cannot be read, has no lines, or is no text in UTF-8.
    """
    path = as_path(path)
    # As some editors write it, which is a part of no line.
    content = _read(path).removeprefix(codecs.BOM_UTF8)
    lines = [
        (number, line)
        for number, line in enumerate(content.split(b"\n"), 1)
        if not _is_blank(line)
    ]
    if not lines:
        raise UserError(f"{path}: no prompts; expected one JSON object a line")
    if _is_no_text(content, [line for _, line in lines]):
        raise UserError(f"{path}: not UTF-8 text; expected a JSONL file of prompts")
    return [
        _item(index, f"{path} line {number}", line, chat)
        for index, (number, line) in enumerate(lines)
    ]


def digest(path: str | AnyPath) -> str:
    """The SHA-256 of a file, in hexadecimal.

    Raises:
        UserError: the file cannot be read.
    """
    return hashlib.sha256(_read(as_path(path))).hexdigest()


def _read(path: AnyPath) -> bytes:
    with reaching(path):
        return path.read_bytes()


def _text(line: bytes) -> str | None:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _is_blank(line: bytes) -> bool:
    text = _text(line)
    return text is not None and not text.strip()


def _is_no_text(content: bytes, lines: list[bytes]) -> bool:
    """Whether this is another kind of file, and not some lines that are spoilt."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return True
    return all(_text(line) is None for line in lines)


def _item(index: int, where: str, line: bytes, chat: bool) -> Item:
    try:
        return Item(index, _parse(line, chat), None)
    except ValueError as error:
        return Item(index, None, f"{where}: {error}")


def _parse(line: bytes, chat: bool) -> Prompt:
    """The prompt of a line; raises `ValueError` if it has none."""
    text = _text(line)
    if text is None:
        raise ValueError("not UTF-8 text")
    try:
        record = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    except RecursionError:
        raise ValueError("nested too deep") from None
    prompt = prompt_of(record, chat) if isinstance(record, dict) else None
    if prompt is None:
        raise ValueError('expected an object with "prompt" or "messages"')
    _check_writable(prompt)
    return prompt


def _check_writable(prompt: Prompt) -> None:
    """Raises `ValueError` for what no tokenizer takes and no record can hold."""
    if _is_deeper(prompt, _MOST_LEVELS):
        raise ValueError(f"nested too deep, over {_MOST_LEVELS} levels")
    try:
        json.dumps(prompt, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise ValueError("has half of a surrogate pair, which is no text") from None
    except ValueError:
        raise ValueError("has NaN or an infinite number, which JSON has not") from None


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested deeper than `levels`."""
    if not isinstance(value, (list, dict)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(each, levels - 1) for each in inner)
