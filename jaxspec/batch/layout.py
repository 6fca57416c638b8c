"""The names of the files beside an output, and what they say of the job's state.

OUT.jsonl                        the records in order, when all are there
OUT.jsonl.job.json               what the job was started with
OUT.jsonl.merged.json            what OUT.jsonl must be, written just before it
OUT.jsonl.part-00000-of-00002    a process's records, local
OUT.jsonl.parts/                 records of all processes, in a bucket
"""

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

from jaxspec.batch.store import (
    AnyPath,
    as_path,
    create,
    is_local,
    names_in,
    reaching,
    replace,
    size_of,
)
from jaxspec.checkpoints.fields import read_json
from jaxspec.errors import UserError
from jaxspec.pins import pin


class Layout:
    """Where the files of a job are.

    Attributes:
        output: the file that the job is for.
        pin: holds what the job was started with.
        seal: holds what the merged output must be.
        parts: the folder of a bucket's parts.

    Raises:
        UserError: the output is no name of a file.
    """

    def __init__(self, output: str | AnyPath):
        self.output = as_path(output)
        if not self.output.name:
            raise UserError(f"{output}: names no file; expected one such as OUT.jsonl")
        self.pin = self._beside(".job.json")
        self.seal = self._beside(".merged.json")
        self.parts = self._beside(".parts")

    def journal(self, process_id: int, num_processes: int) -> AnyPath:
        """A process's local journal."""
        return self._beside(f".{_shard(process_id, num_processes)}")

    def new_part(self, process_id: int, num_processes: int, index: int) -> AnyPath:
        """A name for a part whose first record is `index`, which no part has or had.

        An index may begin two parts: an evicted machine can write on for some seconds
        while its successor already runs. So chance makes the name its own.
        """
        shard = _shard(process_id, num_processes)
        token = secrets.token_hex(6)
        return self.parts / f"{shard}-index-{index:08d}-{token}.jsonl"

    def parts_of(self, process_id: int, num_processes: int) -> list[AnyPath]:
        """The parts that a process has written, in one order for all who ask."""
        named = re.compile(
            _shard(process_id, num_processes) + r"-index-\d{8,}-[0-9a-f]{12}\.jsonl"
        )
        names = names_in(self.parts)
        return [self.parts / name for name in names if named.fullmatch(name)]

    def _beside(self, suffix: str) -> AnyPath:
        return self.output.with_name(self.output.name + suffix)


def _shard(process_id: int, num_processes: int) -> str:
    return f"part-{process_id:05d}-of-{num_processes:05d}"


def hold_pin(layout: Layout, num_processes: int, pinned: Mapping[str, Any]) -> None:
    """Notes what the job is, or holds it against what was noted.

    Raises:
        UserError: lists what differs.
    """
    values = {**pinned, "num_processes": num_processes}
    fix = "ask for the same, or choose another output"
    if not _is_begun(layout):
        fix = "ask for the same, or delete that file: no record was kept yet"
    pin(layout.pin, values, write=create, fix=fix)


def _is_begun(layout: Layout) -> bool:
    """Whether there is a record of the job."""
    if not is_local(layout.output):
        return bool(names_in(layout.parts)) or size_of(layout.output) is not None
    folder, name = layout.output.parent, layout.output.name
    return any(
        size_of(folder / each)
        for each in names_in(folder)
        if each == name or each.startswith(f"{name}.part-")
    )


def processes_of(output: str | AnyPath) -> int:
    """Of how many processes the job of an output is.

    Raises:
        UserError: no job was begun there.
    """
    layout = Layout(output)
    with reaching(layout.output):
        if not layout.pin.exists():
            raise UserError(
                f"{layout.pin} is missing: no job was begun for this output; run it "
                "first, without --merge"
            )
        return read_json(layout.pin).get("num_processes", 0)


def is_merged(
    output: str | AnyPath, num_processes: int, pinned: Mapping[str, Any]
) -> bool:
    """Whether this job is finished, so that nothing is left to do. Writes nothing.

    Raises:
        UserError: the output is there, but is not what this job has made; or a job of
            other options was begun.
    """
    layout = Layout(output)
    with reaching(layout.output):
        if size_of(layout.output) is None:
            if layout.pin.exists():
                hold_pin(layout, num_processes, pinned)
            return False
        if not layout.pin.exists():
            raise foreign(layout)
        hold_pin(layout, num_processes, pinned)
        if not is_sealed(layout):
            raise foreign(layout)
        return True


def foreign(layout: Layout) -> UserError:
    """The error for an output that the job has not made."""
    return UserError(
        f"{layout.output} is there and is not what this job wrote; move it away, or "
        "choose another output"
    )


def seal(layout: Layout, records: int, size: int) -> None:
    """Notes what the output will be, before it is there: so it is never foreign."""
    replace(layout.seal, json.dumps({"records": records, "bytes": size}).encode())


def is_sealed(layout: Layout) -> bool:
    """Whether the output is there and of the size that was noted."""
    size = size_of(layout.output)
    return (
        size is not None
        and layout.seal.exists()
        and read_json(layout.seal).get("bytes") == size
    )
