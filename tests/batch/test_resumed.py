"""The real command killed at any moment: what it writes in the end is the same."""

import random
import signal

import pytest

from tests.batch import jobs

PROMPTS = 30


@pytest.fixture(scope="module")
def begin(tmp_path_factory):
    with jobs.jobs(tmp_path_factory.getbasetemp() / "programs") as begin:
        yield begin


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Of a job that samples with a draft model; all but the output."""
    folder = tmp_path_factory.mktemp("job")
    prompts = jobs.write_prompts(folder / "in.jsonl", PROMPTS)
    return (
        *("--model", jobs.write_model(folder / "target")),
        *("--draft-model", jobs.write_model(folder / "draft", noise=0.03)),
        *("--draft-tokens", "3", "--input", str(prompts), "--max-new-tokens", "100"),
        *("--temperature", "1", "--seed", "3", "--batch-size", "2"),
        *("--capacity", "256"),
    )


@pytest.fixture(scope="module")
def unbroken(begin, arguments, tmp_path_factory):
    output = tmp_path_factory.mktemp("unbroken") / "OUT.jsonl"
    jobs.finished(begin(*arguments, "--output", str(output)))
    return output.read_bytes()


def stop(begin, arguments, output, more, number):
    """Runs the job until it has some more records; how many it has then, and stderr."""
    path = jobs.journal(output)
    before = jobs.recorded(path)
    process = begin(*arguments, "--output", str(output))
    jobs.wait_for(path, before + more, process)
    process.send_signal(number)
    _, err = jobs.end(process)
    assert process.returncode == (143 if number == signal.SIGTERM else -number), err
    # A record that SIGTERM found half written is taken back, to be done again.
    least = before + more - (number == signal.SIGTERM)
    assert least <= jobs.recorded(path) < PROMPTS
    assert not output.exists()
    return jobs.recorded(path), err


def test_stopped_and_started_again(begin, arguments, unbroken, tmp_path):
    output, chance = tmp_path / "OUT.jsonl", random.Random(5)
    # At first as soon as the journal is there.
    for more in (0, *(chance.randrange(1, 5) for _ in range(3))):
        count, err = stop(begin, arguments, output, more, signal.SIGKILL)
        print(f"killed with {count} of {PROMPTS} records")
    count, err = stop(begin, arguments, output, 2, signal.SIGTERM)
    assert err == "jaxspec: stopped; start it again to go on\n"
    kept = jobs.journal(output).read_bytes().splitlines()
    _, err = jobs.finished(begin(*arguments, "--output", str(output)))
    assert err == f"jaxspec: {PROMPTS} records in {output}\n"
    assert output.read_bytes() == unbroken
    # What was finished before is there as it was: not done again.
    assert len(kept) == count and set(kept) <= set(output.read_bytes().splitlines())
    assert not jobs.journal(output).exists()


@pytest.mark.full
def test_the_seed_matters(begin, arguments, unbroken, tmp_path):
    """Negative control: what is compared is sampled, so it could differ."""
    output = tmp_path / "OUT.jsonl"
    other = [*arguments, "--seed", "4", "--output", str(output)]
    jobs.finished(begin(*other))
    pairs = zip(output.read_bytes().splitlines(), unbroken.splitlines(), strict=True)
    assert sum(one == other for one, other in pairs) == 0
