"""Records as lines: each on one, each with the index of its prompt."""

import io
import json
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple

from jaxspec.batch.layout import Layout
from jaxspec.batch.store import AnyPath
from jaxspec.errors import UserError


class Place(NamedTuple):
    """Where the record of a prompt lies in a file, in bytes."""

    index: int
    offset: int
    length: int


def index_of(record: Any) -> int | None:
    """The index that a record has, or None if it is no record."""
    index = record.get("index") if isinstance(record, Mapping) else None
    return index if type(index) is int and index >= 0 else None


def as_line(record: Mapping[str, Any]) -> bytes:
    """The record as it is written."""
    # Escapes and nothing but ASCII: a text may have code points that UTF-8 has not.
    return json.dumps(record).encode("ascii") + b"\n"


def scan(file: IO[bytes], path: AnyPath) -> Iterator[Place]:
    """The places of all whole records; a last line that is torn is left out.

    Raises:
        UserError: a line before the last is no record.
    """
    offset = 0
    line = file.readline()
    while line:
        following = file.readline()
        record = _parse(line)
        if record is _TORN and not following:
            return
        index = index_of(record)
        if index is None:
            raise UserError(
                f"{path}: the line at byte {offset} is no record; the file was edited "
                "or damaged: mend or delete the line, and start the job again"
            )
        yield Place(index, offset, len(line))
        offset += len(line)
        line = following


_TORN = object()


def _parse(line: bytes) -> Any:
    """What a line holds, or `_TORN` if it cannot be all of it."""
    try:
        return json.loads(line.decode("utf-8")) if line.endswith(b"\n") else _TORN
    except (ValueError, RecursionError):
        return _TORN


def part_records(
    layout: Layout, process_id: int, num_processes: int
) -> Iterator[tuple[int, bytes]]:
    """The records of a process in a bucket, each index once, as index and line.

    Two machines may have been this process for some seconds, so that an index can be in
    two parts; then the first part of the sorted names counts.
    """
    seen = set()
    for path in layout.parts_of(process_id, num_processes):
        content = path.read_bytes()
        for index, offset, length in scan(io.BytesIO(content), path):
            if index not in seen:
                seen.add(index)
                yield index, content[offset : offset + length]
