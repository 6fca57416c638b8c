"""Real processes, really killed: each prompt has one record all the same."""

import json
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
from etils import epath

from jaxspec.batch.merge import merge
from tests.batch import appending

KINDS = {"local": pathlib.Path, "remote": epath.Path}
RECORDS = 40


def run_until_killed(arguments, delay):
    """Runs `appending` and kills it `delay` seconds after its start, or its ready.

    Args:
        arguments: of `appending`.
        delay: a negative one counts from the start; None does not kill.

    Returns:
        What it printed, but for a torn last line, and how it ended.
    """
    command = [sys.executable, appending.__file__, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        first = ""
        if delay is not None:
            if delay > 0:
                first = process.stdout.readline()
            time.sleep(abs(delay))
            process.send_signal(signal.SIGKILL)
        said = first + process.stdout.read()
    return said.split("\n")[:-1], process.returncode


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_moment_and_started_again(kind, tmp_path):
    chance = random.Random(kind)
    delays = [chance.uniform(0.0001, 0.02) for _ in range(8)]
    delays += [-chance.uniform(0.05, 0.3) for _ in range(4)]
    chance.shuffle(delays)
    killed, said = 0, []
    for seed, delay in enumerate([*delays, None]):
        lines, code = run_until_killed((tmp_path, kind, RECORDS, seed), delay)
        killed += code == -signal.SIGKILL
        said += [int(line) for line in lines if line.isdigit()]
    assert killed >= 4 and code == 0 and lines[-1] == "end"
    if kind == "local":
        # What was said to be recorded was not done again, nor lost.
        assert len(set(said)) == len(said)
    assert merge(KINDS[kind](tmp_path) / "OUT.jsonl", 1, RECORDS) == RECORDS
    records = [
        json.loads(line) for line in (tmp_path / "OUT.jsonl").read_text().splitlines()
    ]
    assert records == [
        {"index": index, "text": appending.text_of(index)} for index in range(RECORDS)
    ]
