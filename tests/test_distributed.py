"""Processes meet before jax joins them; whoever is missing is named, in time.

Real processes on this host; where only the meeting matters, threads of this one.
"""

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from jaxspec import UserError, distributed, rendezvous
from jaxspec.rendezvous import Job
from tests.two_processes import (
    HARD_LIMIT,
    JOB,
    POD,
    call,
    free_port,
    join,
    starting,
    told,
)

TIMEOUT, MARGIN = 3, 1.5
JAX_ALONE = (
    "import jax, sys; jax.distributed.initialize"
    "(sys.argv[1], 2, 1, initialization_timeout=1)"
)
NOBODY_ASKED = (
    "import jaxspec, jaxspec.distributed, jax; jax.numpy.ones(2).sum();"
    "print(jax.distributed.is_initialized(), jax.process_count())"
)


# A process whose share is done after so many seconds.
ENDS = """
import sys, time
from jaxspec import distributed
from jaxspec.batch.place import Place
distributed.initialize()
time.sleep(float(sys.argv[1]))
print(Place(None).is_last_to_end())
"""


@pytest.fixture(scope="module")
def start():
    with starting() as start:
        yield start


@pytest.fixture
def unset(monkeypatch):
    for name in (*JOB, *POD):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def members(port, *process_ids, count=2):
    return [Job("127.0.0.1", port, count, process_id) for process_id in process_ids]


@contextlib.contextmanager
def meeting(*jobs, timeout=10.0):
    """Lets them meet in threads; gives what each is refused with, None if all met."""
    refusals = []
    with ThreadPoolExecutor() as pool:
        ends = [pool.submit(rendezvous.meet, job, timeout) for job in jobs]
        yield refusals
        refusals += [end.exception(HARD_LIMIT) for end in ends]


def test_two_processes_compute_together_although_a_stranger_called(start):
    port = free_port()
    first = join(start, port, 0)
    with call(port, b"GET / HTTP/1.1\r\n\r\n"):
        second = join(start, port, 1)
        outcomes = [told(process, 0) for process in (first, second)]
    for outcome in outcomes:
        assert (outcome["devices"], outcome["processes"]) == (8, 2)
        assert outcome["total"] == sum(range(16))
    # Neither has all the numbers.
    assert [outcome["own"] for outcome in outcomes] == [28, 92]


@pytest.mark.full
def test_shares_may_end_far_apart(start):
    """A collective would give up after 30 seconds."""
    port, environment = free_port(), {}
    processes = []
    for own in ("0", "1"):
        environment = dict(zip(JOB, (f"127.0.0.1:{port}", "2", own), strict=True))
        processes.append(start("-c", ENDS, 35 * int(own), **environment))
    for process, expected in zip(processes, ("True", "False"), strict=True):
        out, err = process.communicate(timeout=HARD_LIMIT)
        assert out.split()[-1:] == [expected], err[-2000:]


@pytest.fixture(scope="module")
def lonely(start):
    """Two that wait, each for the other of its job, and jax itself in its place."""
    ports = [free_port() for _ in range(3)]
    alone = start("-c", JAX_ALONE, f"127.0.0.1:{ports[2]}")
    waiting = [join(start, ports[own], own, timeout=TIMEOUT) for own in (0, 1)]
    return [told(process, 2) for process in waiting], alone, ports


@pytest.mark.parametrize("present", [0, 1])
def test_a_missing_process_is_named_in_time(lonely, present):
    """BL-61: by the process that waits for it, whichever of the two that is."""
    outcomes, _, ports = lonely
    outcome = outcomes[present]
    print(f"process {present} waited {outcome['seconds']:.2f} s: {outcome['error']}")
    assert TIMEOUT <= outcome["seconds"] < TIMEOUT + MARGIN
    assert "\n" not in outcome["error"]
    assert f"127.0.0.1:{ports[present]}" in outcome["error"]
    assert ("missing --process-id 1:", "process 0 at")[present] in outcome["error"]


def test_jax_alone_aborts_where_a_process_is_missing(lonely):
    _, alone, _ = lonely
    alone.communicate(timeout=HARD_LIMIT)
    assert alone.returncode < 0


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([(1, 3), (1, 3)], "two processes say that they are process 1 of 3"),
        ([(1, 2)], "told of 3 processes and process 1 of 2"),
    ],
)
def test_what_contradicts_ends_all_at_once(start, others, expected):
    port = free_port()
    processes = [join(start, port, *each) for each in [(0, 3), *others]]
    outcomes = [told(process, 2) for process in processes]
    for outcome in outcomes:
        assert expected in outcome["error"]
        assert "\n" not in outcome["error"]
    ends = [outcome["at"] for outcome in outcomes]
    assert max(ends) - min(ends) < MARGIN


def test_without_being_asked_nothing_is_joined(start):
    """BL-61: however much the environment looks like a pod's."""
    described = {**POD, **dict(zip(JOB, "abc", strict=True))}
    out, err = start("-c", NOBODY_ASKED, **described).communicate(timeout=HARD_LIMIT)
    assert out.split() == ["False", "1"], err


def test_a_job_of_one_process_meets_nobody(monkeypatch):
    monkeypatch.setattr(distributed, "backends_are_initialized", lambda: False)
    distributed.initialize("nowhere:1", 1, 0)
    assert not jax.distributed.is_initialized()


def test_where_nothing_describes_a_job_it_is_asked_for(unset):
    def find_none(**_):
        raise ValueError("coordinator_address should be defined.")

    unset.setattr(distributed, "backends_are_initialized", lambda: False)
    unset.setattr(jax.distributed, "initialize", find_none)
    with pytest.raises(UserError, match=r"defined\); give --coordinator .* TPU pod"):
        distributed.initialize()


def test_too_late_after_a_device_query():
    jax.devices()
    started = time.monotonic()
    with pytest.raises(UserError, match="before anything that uses a device"):
        distributed.initialize(f"127.0.0.1:{free_port()}", 2, 0, timeout=30)
    assert time.monotonic() - started < MARGIN


def test_devices_that_do_not_span_the_processes_are_seen(monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: None)
    with pytest.raises(UserError, match="counts 1 processes where 2 joined"):
        distributed.join(*members(1, 0))


@pytest.mark.parametrize(
    ("words", "calls"),
    [
        *((b"", 70), (b"jaxspec 1 1", 70)),
        *((b"jaxspec 1 5 2\n", 1), (b"jaxspec 1 1 2\nmore", 1), (b"x" * 100_000, 1)),
    ],
)
def test_strangers_do_not_disturb(words, calls):
    port = free_port()
    with meeting(*members(port, 0)) as first, contextlib.ExitStack() as held:
        lines = [held.enter_context(call(port, words)) for _ in range(calls)]
        lines[0].settimeout(MARGIN)
        # Nonsense ends the call, and so does a crowd of the silent.
        with contextlib.suppress(ConnectionError):
            assert lines[0].recv(10) == b""
        started = time.monotonic()
        with meeting(*members(port, 1)) as second:
            pass
        assert time.monotonic() - started < MARGIN
    assert first == second == [None]


def test_the_right_words_are_taken_for_the_process():
    port = free_port()
    with meeting(*members(port, 0)) as ended, call(port, b"jaxspec 1 1 2\n") as line:
        assert line.recv(10) == b"go\n"
    assert ended == [None]


def test_who_hangs_up_is_missing_and_the_others_hear_of_it():
    port = free_port()
    waiting, other = members(port, 0, 1, count=3)
    with meeting(waiting, timeout=1.0) as first:
        call(port, b"jaxspec 1 2 3\n").close()
        with meeting(other) as second:
            pass
    assert str(first) == str(second)
    assert "missing --process-id 2:" in str(first[0])


def test_two_processes_0_on_a_host_hear_of_each_other():
    with meeting(*members(free_port(), 0, 0)) as ended:
        pass
    assert ["they are process 0 of 2" in str(each) for each in ended] == [True] * 2


@pytest.mark.parametrize("words", [b"SSH-2.0\r\n", b"no \x1b[31mwell\n", b"y" * 5000])
def test_another_program_at_the_port_is_no_coordinator(words):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        quiet = contextlib.suppress(TimeoutError)
        port = server.getsockname()[1]
        with meeting(*members(port, 1), timeout=0.6) as ended, quiet:
            while line := server.accept()[0]:
                with line, contextlib.suppress(ConnectionError):
                    line.sendall(words)
    assert "did not say go" in str(ended[0])
    assert "\x1b" not in str(ended[0])


def test_a_port_that_is_taken_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        (job,) = members(server.getsockname()[1], 0)
        with pytest.raises(UserError, match="another port"):
            rendezvous.meet(job, timeout=5.0)


@pytest.mark.parametrize(
    ("given", "faults"),
    [
        ((None, 2, None), ["--coordinator", "--process-id"]),
        (("host", 0, "x"), ["HOST:PORT", "--num-processes", "from 0 to 9999"]),
        (("a:70000", 2, 2), ["JAXSPEC_COORDINATOR", "'a:70000'", "from 0 to 1"]),
    ],
)
def test_all_that_is_wrong_is_listed(unset, given, faults):
    with pytest.raises(UserError) as refused:
        distributed.initialize(*given, timeout=0)
    assert [fault for fault in faults if fault not in str(refused.value)] == []
    assert "timeout" in str(refused.value)


def test_where_the_job_is_described(unset):
    assert distributed.find_job(None, None, None) == (None, [])
    for name, value in POD.items():
        unset.setenv(name, value)
    pod = Job("10.9.9.1", distributed.POD_PORT, 2, 1)
    assert distributed.find_job(None, None, None) == (pod, [])
    unset.setenv("TPU_WORKER_ID", "2")
    assert "TPU_WORKER_ID is '2'" in distributed.find_job(None, None, None)[1][0]
    for name, value in zip(JOB, ("[::1]:80", "4", "3"), strict=True):
        unset.setenv(name, value)
    assert distributed.find_job(None, None, 0) == (Job("::1", 80, 4, 0), [])
