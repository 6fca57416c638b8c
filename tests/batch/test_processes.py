"""Two processes of four CPU devices: each its share, or one mesh over both."""

import json
import signal

import pytest

from tests.batch import jobs
from tests.two_processes import free_port

# Each prompt's record is the same in a job of fewer prompts.
PROMPTS, FEW = 24, 6


@pytest.fixture(scope="module")
def begin(tmp_path_factory):
    with jobs.jobs(tmp_path_factory.getbasetemp() / "programs") as begin:
        yield begin


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Of a job that samples with a draft model; all but output and mesh."""
    folder = tmp_path_factory.mktemp("job")
    prompts = jobs.write_prompts(folder / "in.jsonl", PROMPTS, lengths=(1, 5, 9, 14))
    return (
        *("--model", jobs.write_model(folder / "target")),
        *("--draft-model", jobs.write_model(folder / "draft", noise=0.03)),
        *("--draft-tokens", "3", "--input", str(prompts), "--max-new-tokens", "40"),
        *("--temperature", "1", "--seed", "3", "--batch-size", "2"),
        *("--capacity", "256"),
    )


@pytest.fixture(scope="module")
def single(begin, arguments, tmp_path_factory):
    """The output of one process on one device."""
    output = tmp_path_factory.mktemp("single") / "OUT.jsonl"
    jobs.finished(begin(*arguments, "--output", str(output)))
    return output.read_bytes().splitlines()


def begin_both(begin, arguments, output, mesh):
    where = f"127.0.0.1:{free_port()}"
    return [
        begin(
            *(*arguments, "--output", str(output), "--mesh", mesh),
            *("--platform", "cpu", "--coordinator", where, "--num-processes", "2"),
            *("--process-id", str(own), "--timeout", "60"),
            flags=jobs.FOUR_DEVICES,
        )
        for own in (0, 1)
    ]


def finish_both(processes, output, expected):
    """Only process 0 says something, and only the whole output is left."""
    texts = [jobs.finished(process) for process in processes]
    # Gloo tells on stdout whom it is connected to, several threads at a time.
    assert not [out for out, _ in texts if "jaxspec" in out or "{" in out]
    said = f"jaxspec: {len(expected)} records in {output}\n"
    assert [err for _, err in texts] == [said, ""]
    assert output.read_bytes().splitlines() == expected
    assert not [path for path in output.parent.iterdir() if ".part" in path.name]


def test_each_its_share_killed_and_started_again(begin, arguments, single, tmp_path):
    output = tmp_path / "OUT.jsonl"
    journals = [jobs.journal(output, own, 2) for own in (0, 1)]
    processes = begin_both(begin, arguments, output, "1x2")
    for path, process in zip(journals, processes, strict=True):
        jobs.wait_for(path, 1, process)
    for process in processes:
        process.kill()
    for process in processes:
        jobs.end(process)
        assert process.returncode == -signal.SIGKILL
    kept = [path.read_bytes().splitlines() for path in journals]
    print(f"killed with {[*map(len, kept)]} of {PROMPTS} records")
    assert not output.exists() and sum(map(len, kept)) < PROMPTS
    for own in (0, 1):
        assert {json.loads(line)["index"] % 2 for line in kept[own]} == {own}
    finish_both(begin_both(begin, arguments, output, "1x2"), output, single)
    assert {*kept[0], *kept[1]} <= set(single)


@pytest.fixture
def few(arguments, tmp_path):
    """The job with the first prompts only."""
    at = arguments.index("--input") + 1
    with open(arguments[at]) as file:
        lines = file.readlines()[:FEW]
    path = tmp_path / "few.jsonl"
    path.write_text("".join(lines))
    return (*arguments[:at], str(path), *arguments[at + 1 :])


@pytest.mark.parametrize(
    "mesh",
    [
        # Each process has one of the two rows.
        "2x4",
        # Each process has a part of every weight.
        pytest.param("1x8", marks=pytest.mark.full),
    ],
)
def test_one_mesh_over_both(begin, few, single, tmp_path, mesh):
    """Rows accept different counts, so that the processes' loops differ in length."""
    stats = [json.loads(line)["stats"] for line in single[:FEW]]
    assert len({each["rounds"] for each in stats}) > FEW / 2
    assert min(each["accepted"] for each in stats) > 0
    output = tmp_path / "OUT.jsonl"
    processes = begin_both(begin, few, output, mesh)
    journal = jobs.journal(output)
    jobs.wait_for(journal, 1, processes[0])
    assert {path.name for path in tmp_path.iterdir()} == {
        *("few.jsonl", journal.name, "OUT.jsonl.job.json")
    }
    finish_both(processes, output, single[:FEW])
