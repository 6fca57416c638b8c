"""Fixtures of the whole test run: small random models and one plain run of them."""

import gc
import os
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxspec.drafters.autoregressive import Autoregressive
from tests import fakes, runs

# Prompt lengths on both sides of every edge that a prompt has.
LENGTHS = (1, 2, 17, 33)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Under JAXSPEC_NO_SKIPS, as in .ci/run, a skipped test is a failed one."""
    report = (yield).get_result()
    if report.skipped and os.environ.get("JAXSPEC_NO_SKIPS"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped under JAXSPEC_NO_SKIPS"


@pytest.fixture(scope="module", autouse=True)
def programs_are_freed():
    """Drops what a module compiled once its other fixtures are gone.

    An executable of XLA's CPU backend holds dozens of memory maps. All modules'
    together pass the 65,530 that Linux grants a process by default, and the compiler
    then ends in a segmentation fault.
    """
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def tiny():
    """A target, a draft, a batch of prompts and what the target alone writes."""
    target, draft = fakes.tiny(1), fakes.tiny(2, layers=1)
    rng = np.random.default_rng(8)
    prompts = [rng.integers(0, 64, n).tolist() for n in LENGTHS * 4]
    batch = runs.Batch(prompts, new=64)
    plain = runs.plain(target, Autoregressive(), batch, blocks=(5, batch.capacity))
    return SimpleNamespace(target=target, draft=draft, batch=batch, plain=plain)
