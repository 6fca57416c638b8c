"""Joins the processes of a job that spans hosts, when the user asks for it.

`jax.distributed.initialize` aborts the whole process if a peer stays away, so all meet
first, in `rendezvous`.
"""

import math
import os
import re
from collections.abc import Sequence

import jax

# Not public, but jax has no public question that makes no backend; jax is pinned.
from jax._src.xla_bridge import backends_are_initialized

from jaxspec.errors import UserError, refuse
from jaxspec.rendezvous import Job, meet

# Where process 0 of a pod listens: jax's own choice, so firewalls let it through.
POD_PORT = 8482
MOST_PROCESSES = 10_000
_NAMES = ("JAXSPEC_COORDINATOR", "JAXSPEC_NUM_PROCESSES", "JAXSPEC_PROCESS_ID")
_FLAGS = (
    f"--coordinator ({_NAMES[0]})",
    f"--num-processes ({_NAMES[1]})",
    f"--process-id ({_NAMES[2]})",
)
_MISSING = "missing (give all three, or on a TPU pod none)"
_POD = ("TPU_WORKER_HOSTNAMES", "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID")
_ADDRESS = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[\w-]{1,63}(?:\.[\w-]{1,63})*))"
    r":(?P<port>\d{1,5})",
    re.ASCII,
)
# All peers have just been seen, and jax aborts when this ends: a last resort, no wait.
_JOIN_SECONDS = 60


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = 120.0,
) -> None:
    """Joins the processes of a job; to be called first, before any device query.

    What is not given is read from `JAXSPEC_COORDINATOR`, `JAXSPEC_NUM_PROCESSES` and
    `JAXSPEC_PROCESS_ID`. With none of the three the job is a TPU pod that describes
    itself: by `TPU_WORKER_HOSTNAMES` and `TPU_WORKER_ID` (the first host listens at
    `POD_PORT`), else as `jax.distributed.initialize()` finds it, which aborts the
    process if a peer is missing. A job of one process has nobody to join.

    Args:
        coordinator: `HOST:PORT` of process 0; the port is to be free there.
        num_processes: how many processes the job has.
        process_id: which of them this one is, from 0.
        timeout: the seconds that the processes wait for each other.

    Raises:
        UserError: lists what is wrong with the values; or jax has a backend already;
            or says which process did not come, is there twice, or is of another job.
    """
    job, faults = find_job(coordinator, num_processes, process_id)
    if not 0 < timeout < math.inf:
        faults.append(f"timeout is {timeout!r}, expected seconds over 0")
    refuse(faults)
    if backends_are_initialized():
        raise UserError(
            "the job is joined too late: jax has its devices already; call "
            "jaxspec.distributed.initialize once, before anything that uses a device"
        )
    if job is None:
        _join_described(timeout)
    elif job.count > 1:
        meet(job, timeout)
        join(job)


def find_job(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> tuple[Job | None, list[str]]:
    """The job that arguments and environment describe, None if jax is to find it.

    Returns:
        The job, and what is wrong: if anything is, there is no job.
    """
    values = (coordinator, num_processes, process_id)
    given = [
        os.environ.get(name) or None if value is None else value
        for name, value in zip(_NAMES, values, strict=True)
    ]
    if given != [None] * 3:
        return _checked(given, _FLAGS)
    hosts, worker = (os.environ.get(name) for name in _POD[1:])
    # The hosts are those of one slice: how several slices are numbered, jax knows.
    slices = os.environ.get("MEGASCALE_NUM_SLICES") or "1"
    if not hosts or not worker or slices != "1":
        return None, []
    names = [name.strip() for name in hosts.split(",")]
    return _checked([f"{names[0]}:{POD_PORT}", len(names), worker], _POD)


def _checked(
    given: Sequence[object], names: Sequence[str]
) -> tuple[Job | None, list[str]]:
    address = _ADDRESS.fullmatch(str(given[0]))
    port = _whole(address["port"], 1, 65535) if address else None
    count = _whole(given[1], 1, MOST_PROCESSES)
    last = (count or MOST_PROCESSES) - 1
    process_id = _whole(given[2], 0, last)
    if address and port and count and process_id is not None:
        return Job(address["v6"] or address["name"], port, count, process_id), []
    rows = (
        (port, "HOST:PORT, the port from 1 to 65535"),
        (count, f"a whole number from 1 to {MOST_PROCESSES}"),
        (process_id, f"a whole number from 0 to {last}"),
    )
    return None, [
        f"{name} is {_MISSING if value is None else repr(value)}, expected {expected}"
        for name, value, (read, expected) in zip(names, given, rows, strict=True)
        if read is None
    ]


def _whole(value: object, least: int, most: int) -> int | None:
    text = str(value)
    is_number = re.fullmatch(r"\d{1,6}", text, re.ASCII) is not None
    return int(text) if is_number and least <= int(text) <= most else None


def join(job: Job) -> None:
    """Joins the processes in jax; all of them have to be there.

    Raises:
        UserError: jax refuses, or its devices do not span the processes.
    """
    # The port of the rendezvous again, not the next one: jax ends in a segmentation
    # fault where its port is taken, and having listened is the proof that it is free.
    # One port is also one hole in a firewall.
    try:
        jax.distributed.initialize(
            *(job.address, job.count, job.process_id),
            initialization_timeout=_JOIN_SECONDS,
            # By itself jax would open the port to every network.
            coordinator_bind_address=job.address if job.is_local else None,
        )
    except RuntimeError as error:
        raise UserError(f"jax cannot join {job.address}: {_line(error)}") from error
    if jax.process_count() != job.count:
        raise UserError(
            f"jax counts {jax.process_count()} processes where {job.count} joined: the "
            f"{jax.default_backend()} devices of these hosts do not belong together; "
            "start a job on each"
        )


def _join_described(timeout: float) -> None:
    try:
        jax.distributed.initialize(initialization_timeout=math.ceil(timeout))
    except (RuntimeError, ValueError) as error:
        raise UserError(
            "nothing here says which processes belong to the job "
            f"({_line(error)}); give {', '.join(_FLAGS)}, or start it on a TPU pod"
        ) from error


def _line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")
