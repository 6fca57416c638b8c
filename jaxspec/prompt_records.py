"""The prompt in one record of a JSONL file."""

from collections.abc import Mapping
from typing import Any

from jaxspec.requests import Prompt


def prompt_of(record: Mapping[str, Any], chat: bool) -> Prompt | None:
    """The prompt of a record, a text, ids or messages; None if it has none.

    Args:
        record: with `prompt` (a text, ids, or messages) or `messages`.
        chat: a text is what the user says in a chat.
    """
    prompt, messages = record.get("prompt"), record.get("messages")
    if isinstance(prompt, str):
        return as_chat(prompt) if chat else prompt
    return next((each for each in (prompt, messages) if isinstance(each, list)), None)


def as_chat(text: str) -> Prompt:
    """A chat in which the user says this."""
    return [{"role": "user", "content": text}]
