"""All records of all processes in one file, in the order of the prompts."""

import contextlib
import tempfile
from collections.abc import Iterator
from typing import IO, NamedTuple

from jaxspec.batch.layout import Layout, foreign, is_sealed, seal
from jaxspec.batch.records import Place, part_records, scan
from jaxspec.batch.store import (
    AnyPath,
    is_local,
    partial_of,
    reaching,
    size_of,
    writing,
)
from jaxspec.errors import refuse

_LISTED = 10


class _Record(NamedTuple):
    """Which process has a record, and where it lies in a local file."""

    process_id: int
    file: IO[bytes]
    place: Place


def merge(output: str | AnyPath, num_processes: int, expected: int) -> int:
    """Writes the output, each index below `expected` once, and returns their number.

    To be called by one process when all have closed their journals. It may be killed
    and called again; of a finished output it only removes the parts that are left.

    Args:
        output: the file that the job is for, local or `gs://`.
        num_processes: of the job.
        expected: the number of prompts.

    Raises:
        UserError: records are missing, or are there twice; or the output is there
            already and is not what this job wrote.
    """
    layout = Layout(output)
    with reaching(layout.output):
        if not is_sealed(layout):
            if size_of(layout.output) is not None:
                raise foreign(layout)
            with contextlib.ExitStack() as files:
                records = _collect(layout, num_processes, files)
                _write(layout, _in_order(layout, records, num_processes, expected))
        _remove_parts(layout, num_processes)
    return expected


def _collect(
    layout: Layout, num_processes: int, files: contextlib.ExitStack
) -> Iterator[_Record]:
    for process_id in range(num_processes):
        shard = process_id, num_processes
        if not is_local(layout.output):
            spool = files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            for place in _spool(layout, *shard, spool):
                yield _Record(process_id, spool, place)
        elif (path := layout.journal(*shard)).exists():
            file = files.enter_context(path.open("rb"))
            for place in scan(file, path):
                yield _Record(process_id, file, place)


def _spool(
    layout: Layout, process_id: int, num_processes: int, spool: IO[bytes]
) -> Iterator[Place]:
    """Copies a bucket's records to a local file, to be read there in any order."""
    for index, line in part_records(layout, process_id, num_processes):
        yield Place(index, spool.tell(), len(line))
        spool.write(line)


def _in_order(
    layout: Layout, records: Iterator[_Record], num_processes: int, expected: int
) -> list[_Record]:
    """The records by index; raises if they are not each of the expected once."""
    found: dict[int, _Record] = {}
    twice: dict[int, set[int]] = {}
    for record in records:
        first = found.setdefault(record.place.index, record)
        if first is not record:
            twice[record.place.index] = {first.process_id, record.process_id}
    missing = [index for index in range(expected) if index not in found]
    beyond = sorted(index for index in found if index >= expected)
    faults = [
        *_missing_fault(missing, expected, _absent(layout, num_processes)),
        *_twice_fault(twice),
        *_beyond_fault(beyond, expected),
    ]
    refuse(faults, str(layout.output))
    return [found[index] for index in range(expected)]


def _missing_fault(missing: list[int], expected: int, absent: str) -> Iterator[str]:
    if missing:
        yield (
            f"{len(missing)} of {expected} records are missing, index "
            f"{_listed(missing)}{absent}; start the job again with the same "
            "arguments, it goes on with these"
        )


def _twice_fault(twice: dict[int, set[int]]) -> Iterator[str]:
    if twice:
        places = sorted(set().union(*twice.values()))
        yield (
            f"{len(twice)} records are there twice, index {_listed(sorted(twice))}, in "
            f"the files of process {_listed(places)}; delete one line of each two"
        )


def _beyond_fault(beyond: list[int], expected: int) -> Iterator[str]:
    if beyond:
        yield (
            f"there are records of index {_listed(beyond)}, but only {expected} "
            "prompts; the files are of another job: choose another output"
        )


def _absent(layout: Layout, num_processes: int) -> str:
    """Says whose local files are not to be seen from here."""
    if not is_local(layout.output):
        return ""
    absent = [
        each
        for each in range(num_processes)
        if not layout.journal(each, num_processes).exists()
    ]
    if not absent:
        return ""
    return (
        f" (no file of process {_listed(absent)} is here; all processes must see the "
        "same folder)"
    )


def _listed(numbers: list[int]) -> str:
    more = ", ..." if len(numbers) > _LISTED else ""
    return ", ".join(map(str, numbers[:_LISTED])) + more


def _write(layout: Layout, records: list[_Record]) -> None:
    with writing(layout.output) as output:
        for _, file, place in records:
            file.seek(place.offset)
            output.write(file.read(place.length))
        # While the output does not have its name yet: then it is never unknown.
        seal(layout, len(records), sum(place.length for *_, place in records))


def _remove_parts(layout: Layout, num_processes: int) -> None:
    partial_of(layout.output).unlink(missing_ok=True)
    if not is_local(layout.output):
        layout.parts.rmtree(missing_ok=True)
        return
    for process_id in range(num_processes):
        layout.journal(process_id, num_processes).unlink(missing_ok=True)
