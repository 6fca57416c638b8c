"""Over a split vocabulary the warp moves numbers between devices, never logits."""

import json
import os
import subprocess
import sys

import pytest

from tests.core.sharded_warp import ALTERNATIVES, ROWS, SLOTS, VOCABULARY


@pytest.fixture(scope="module")
def report():
    # Not in the module that is run: every test process imports it too.
    eight = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    run = subprocess.run(
        [sys.executable, "-m", "tests.core.sharded_warp"],
        capture_output=True,
        text=True,
        env=os.environ | eight,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", ["warp", "alternatives"])
def test_no_collective_moves_more_than_a_few_numbers_a_slot(report, name):
    assert 0 < report[name]["largest_moved"] <= ROWS * SLOTS * ALTERNATIVES * 8
    assert report[name]["difference"] < 1e-6


def test_the_library_top_k_gathers_the_vocabulary(report):
    """The control, and the reason for repeated arg-max."""
    assert report["library_top_k"]["largest_moved"] >= ROWS * SLOTS * VOCABULARY
