"""The processes of a job meet over plain sockets, with a deadline of their own.

What a socket says is hostile until it is checked.
"""

import contextlib
import dataclasses
import errno
import ipaddress
import re
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxspec.errors import UserError

_HELLO = re.compile(rb"jaxspec 1 (\d{1,6}) (\d{1,6})\n")
_LONGEST_HELLO = 32
_LONGEST_ANSWER = 1024
# A stranger that is slow to speak, or one of a crowd of them, is shown out.
_HELLO_SECONDS = 5.0
_MOST_STRANGERS = 64
_CONNECT_SECONDS = 2.0
_RETRY_SECONDS = 0.1


class Job(NamedTuple):
    """The processes of a job and this one among them; process 0 is at the address."""

    host: str
    port: int
    count: int
    process_id: int

    @property
    def address(self) -> str:
        """`HOST:PORT`, an IPv6 address in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """True if the address can mean this host only."""
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"


def meet(job: Job, timeout: float) -> None:
    """Returns once all processes of the job are there, in all of them at once.

    Raises:
        UserError: somebody is missing after `timeout` seconds, or does not belong.
    """
    until = time.monotonic() + timeout
    if job.process_id:
        _report(job, timeout, until)
        return
    with _listen(job) as listener, contextlib.closing(_Room(job, listener)) as room:
        try:
            room.fill(timeout, until)
        except UserError as error:
            room.tell(f"no {error}")
            raise
        # From "go" on jax's own connections come to this port: not to this listener.
        listener.close()
        room.tell("go")


def _report(job: Job, timeout: float, until: float) -> None:
    """Tells process 0 that this one is there, and waits for its word."""
    seen = "no answer"
    while time.monotonic() < until:
        try:
            return _ask(job, until)
        except OSError as error:
            seen = error.strerror or str(error)
        # Process 0 may come up yet, as may its name in a young cluster.
        time.sleep(_RETRY_SECONDS)
    raise UserError(
        f"process 0 at {job.address} did not say go to process {job.process_id} of "
        f"{job.count} within {timeout:g} s ({seen}); start it, or mend --coordinator "
        "(JAXSPEC_COORDINATOR)"
    )


def _ask(job: Job, until: float) -> None:
    """Returns if process 0 says go; raises `UserError` if it says no."""
    left = min(_left(until), _CONNECT_SECONDS)
    with socket.create_connection((job.host, job.port), left) as connection:
        connection.sendall(b"jaxspec 1 %d %d\n" % (job.process_id, job.count))
        answer = _read_line(connection, until)
    if re.fullmatch(r"no [ -~]+", answer):
        raise UserError(answer.removeprefix("no "))
    if answer != "go":
        raise ConnectionError("something else than jaxspec answers there")


def _read_line(connection: socket.socket, until: float) -> str:
    heard = b""
    while b"\n" not in heard and len(heard) < _LONGEST_ANSWER:
        connection.settimeout(_left(until))
        try:
            more = connection.recv(_LONGEST_ANSWER)
        except TimeoutError as error:
            raise TimeoutError("reached, so others may be missing") from error
        if not more:
            raise ConnectionError("it hung up")
        heard += more
    return heard.partition(b"\n")[0].decode("ascii", "replace")


def _left(until: float) -> float:
    # Zero would mean not to wait at all, and fail in another way.
    return max(until - time.monotonic(), 0.001)


def _listen(job: Job) -> socket.socket:
    try:
        return _server(job)
    except OSError as error:
        # The first of two processes 0 is to hear of the second.
        if error.errno == errno.EADDRINUSE:
            with contextlib.suppress(OSError):
                _ask(job, time.monotonic() + _CONNECT_SECONDS)
        raise UserError(
            f"process 0 cannot listen at {job.address} ({error.strerror}); choose "
            "another port for all processes"
        ) from error


def _server(job: Job) -> socket.socket:
    # The addresses that jax will listen to, so that the port is free in its sense.
    if job.is_local:
        family = socket.AF_INET6 if ":" in job.host else socket.AF_INET
        return socket.create_server((job.host, job.port), family=family)
    if not socket.has_dualstack_ipv6():
        return socket.create_server(("", job.port))
    return socket.create_server(
        ("", job.port), family=socket.AF_INET6, dualstack_ipv6=True
    )


@dataclasses.dataclass(eq=False)
class _Guest:
    """Who connected; `process_id` is None while it has not said who it is."""

    connection: socket.socket
    until: float
    process_id: int | None = None
    heard: bytes = b""


class _Room:
    """Where process 0 waits for the others; strangers are let in, and out again."""

    def __init__(self, job: Job, listener: socket.socket):
        self.job = job
        self.guests: list[_Guest] = []
        self.selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ)

    def fill(self, timeout: float, until: float) -> None:
        """Lets guests in until all processes of the job are there."""
        while missing := self._missing():
            if (left := until - time.monotonic()) <= 0:
                raise UserError(_absence(missing, self.job, timeout))
            self._serve(min(left, _HELLO_SECONDS))
            if not self._missing():
                # Who hung up meanwhile is missing again: better now than in jax.
                self._serve(0)

    def _serve(self, seconds: float) -> None:
        for key, _ in self.selector.select(seconds):
            if key.data:
                self._hear(key.data)
            else:
                self._let_in(key.fileobj)
        self._show_out()

    def tell(self, line: str) -> None:
        """Sends the line to every process of the job that is there."""
        for guest in self.guests:
            # One that is gone by now has nothing to be told.
            if guest.process_id is not None:
                with contextlib.suppress(OSError):
                    guest.connection.sendall(line.encode() + b"\n")

    def close(self) -> None:
        """Closes all connections."""
        self.selector.close()
        for guest in self.guests:
            guest.connection.close()

    def _missing(self) -> list[int]:
        present = {guest.process_id for guest in self.guests}
        return [other for other in range(1, self.job.count) if other not in present]

    def _let_in(self, listener: Any) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            # It is gone again, or there are too many open files: then no busy waiting.
            time.sleep(_RETRY_SECONDS)
            return
        connection.setblocking(False)
        guest = _Guest(connection, time.monotonic() + _HELLO_SECONDS)
        self.guests.append(guest)
        self.selector.register(connection, selectors.EVENT_READ, guest)

    def _show_out(self) -> None:
        strangers = [guest for guest in self.guests if guest.process_id is None]
        crowd, now = strangers[:-_MOST_STRANGERS], time.monotonic()
        for guest in strangers:
            if guest in crowd or guest.until < now:
                self._drop(guest)

    def _drop(self, guest: _Guest) -> None:
        self.selector.unregister(guest.connection)
        self.guests.remove(guest)
        guest.connection.close()

    def _hear(self, guest: _Guest) -> None:
        """Reads on; drops whoever hangs up or talks nonsense."""
        try:
            more = guest.connection.recv(_LONGEST_HELLO)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        guest.heard += more
        hello = _HELLO.fullmatch(guest.heard)
        if more and hello and int(hello[1]) < int(hello[2]):
            self._seat(guest, int(hello[1]), int(hello[2]))
        elif not more or b"\n" in guest.heard or len(guest.heard) >= _LONGEST_HELLO:
            self._drop(guest)

    def _seat(self, guest: _Guest, process_id: int, count: int) -> None:
        is_new = process_id in self._missing()
        guest.process_id = process_id
        if count != self.job.count:
            raise UserError(
                f"process 0 was told of {self.job.count} processes and process "
                f"{process_id} of {count}: give all the same --num-processes "
                "(JAXSPEC_NUM_PROCESSES)"
            )
        if not is_new:
            raise UserError(
                f"two processes say that they are process {process_id} of {count}: "
                "give each its own --process-id (JAXSPEC_PROCESS_ID) from 0 to "
                f"{count - 1}"
            )


def _absence(missing: Sequence[int], job: Job, timeout: float) -> str:
    listed = ", ".join(map(str, missing[:20])) + (", ..." if missing[20:] else "")
    return (
        f"{len(missing)} of {job.count} processes did not come to {job.address} within "
        f"{timeout:g} s, missing --process-id {listed}: start them with the same "
        "--coordinator and --num-processes"
    )
