"""The records of one process, in the order in which they were finished."""

import abc
import os
import time
from collections.abc import Callable, Mapping
from typing import IO, Any, Self

from jaxspec.batch.layout import Layout, hold_pin, is_merged
from jaxspec.batch.records import as_line, index_of, part_records, scan
from jaxspec.batch.store import AnyPath, is_local, reaching, sync_folder
from jaxspec.errors import UserError


class Journal(abc.ABC):
    """What a process has finished; for one thread, and closed at the end of a `with`.

    Attributes:
        done: the indices that have a record, those not yet flushed included.
    """

    def __init__(self):
        self.done: set[int] = set()

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a record, which has the `index` of its prompt.

        Raises:
            ValueError: the record has no index, or one that has a record already.
            UserError: it cannot be written. A local journal is then as it was before;
                in a bucket's journal the record waits for the next flush.
        """
        index = index_of(record)
        if index is None:
            raise ValueError(f"index is {record.get('index')!r}, expected 0 or more")
        if index in self.done:
            raise ValueError(f"index {index} has a record already")
        self._write(index, as_line(record))

    @abc.abstractmethod
    def _write(self, index: int, line: bytes) -> None:
        """Takes a line, whole or not at all, and notes its index as done."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Makes all that was appended outlast the process.

        Raises:
            UserError: it cannot be written; it is kept for the next time.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Flushes, and takes no more records."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # After an error too: what is finished need not be done again.
        self.close()


class LocalJournal(Journal):
    """A file to which each record is added as one line, which is on disk at once.

    Raises:
        UserError: another process has the file open, or it was edited.
    """

    def __init__(self, path: AnyPath):
        super().__init__()
        self._path = path
        self._file = path.open("ab", buffering=0)
        try:
            _lock(self._file, path)
            self._length = self._recover()
        except BaseException:
            self._file.close()
            raise
        sync_folder(path.parent)

    def _recover(self) -> int:
        """Reads what is done and cuts off what is torn; returns the length."""
        end = 0
        with self._path.open("rb") as file:
            for index, offset, length in scan(file, self._path):
                if index in self.done:
                    raise UserError(
                        f"{self._path}: index {index} is there twice; the file was "
                        "edited: delete one of the two lines, and start the job again"
                    )
                self.done.add(index)
                end = offset + length
        self._cut(end)
        return end

    def _cut(self, length: int) -> None:
        self._file.truncate(length)
        _sync(self._file)

    def _write(self, index: int, line: bytes) -> None:
        with reaching(self._path):
            try:
                written = self._file.write(line)
                if written != len(line):
                    raise OSError(f"{written} of {len(line)} bytes written; disk full?")
                _sync(self._file)
            except BaseException:
                # The next line would make of a torn one a bad one in the middle.
                self._cut(self._length)
                raise
        self._length += len(line)
        self.done.add(index)

    def flush(self) -> None:
        """Does nothing: each record is on disk when `append` returns."""

    def close(self) -> None:
        """Lets others open the file."""
        self._file.close()


class RemoteJournal(Journal):
    """Parts in a bucket, each of the records of some seconds.

    What was not yet flushed when the process ends is done again by the next one.

    Args:
        layout: of the job.
        process_id: whose records they are.
        num_processes: of the job.
        most_records: a part is written when it has as many.
        most_seconds: or when a record comes so long after its first one.
        clock: tells seconds.
    """

    def __init__(
        self,
        layout: Layout,
        process_id: int,
        num_processes: int,
        most_records: int = 256,
        most_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__()
        self._layout = layout
        self._shard = (process_id, num_processes)
        self._most_records, self._most_seconds = most_records, most_seconds
        self._clock = clock
        self._pending: list[tuple[int, bytes]] = []
        self._since = clock()
        self._is_closed = False
        layout.parts.mkdir(parents=True, exist_ok=True)
        self.done.update(index for index, _ in part_records(layout, *self._shard))

    def _write(self, index: int, line: bytes) -> None:
        if self._is_closed:
            raise ValueError("the journal is closed")
        if not self._pending:
            self._since = self._clock()
        self._pending.append((index, line))
        self.done.add(index)
        is_old = self._clock() - self._since >= self._most_seconds
        if is_old or len(self._pending) >= self._most_records:
            self.flush()

    def flush(self) -> None:
        """Writes a part, if there is anything to write.

        Raises:
            UserError: it cannot be written; it is kept for the next time.
        """
        if not self._pending:
            return
        path = self._layout.new_part(*self._shard, self._pending[0][0])
        with reaching(path):
            path.write_bytes(b"".join(line for _, line in self._pending))
        self._pending.clear()

    def close(self) -> None:
        """Flushes, and takes no more records."""
        self.flush()
        self._is_closed = True


def open_journal(
    output: str | AnyPath,
    process_id: int,
    num_processes: int,
    pinned: Mapping[str, Any],
    most_records: int = 256,
    most_seconds: float = 30.0,
) -> Journal:
    """The journal of a process, with what it recorded before it was stopped.

    Args:
        output: the file that the job is for, local or `gs://`.
        process_id: from 0.
        num_processes: that share the prompts of the job.
        pinned: what the job is, as JSON can hold it: digest of the input, model,
            options. A journal of another job is refused.
        most_records: in a bucket, a part is written when it has as many.
        most_seconds: or when a record comes so long after the part's first one.

    Raises:
        UserError: the output is there, the journal is of another job, was edited, is
            open in another process, or cannot be reached.
    """
    if not 0 <= process_id < num_processes:
        raise ValueError(f"process_id is {process_id} of {num_processes}")
    layout = Layout(output)
    with reaching(layout.output):
        if is_merged(output, num_processes, pinned):
            raise UserError(f"{layout.output} is finished; there is nothing to do")
        hold_pin(layout, num_processes, pinned)
        if is_local(layout.output):
            return LocalJournal(layout.journal(process_id, num_processes))
        return RemoteJournal(
            layout, process_id, num_processes, most_records, most_seconds
        )


def _sync(file: IO[bytes]) -> None:
    os.fsync(file.fileno())


def _lock(file: IO[bytes], path: AnyPath) -> None:
    """Keeps a second process from the file until this one closes it or ends."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"{path}: another process is writing it; wait for its end, or give each "
            "process its own --process-id"
        ) from None
    except (ImportError, OSError):
        # Not every system and not every network folder has locks.
        return
