"""The whole generation compiles for a TPU v5e, fits it, and never talks to the host."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from jaxspec.tpu.aot import ENVIRONMENT

pytestmark = pytest.mark.tpu

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = ROOT / "tpu_configs" / "v5e-1.yaml"
HBM_BYTES = 16e9
# The rest is the compiler's and the runtime's own.
USABLE = 0.9
PROGRAMS = ("first chunk", "later chunk", "rounds")
GENERATIONS = (
    *("slice", "draft model"),
    *("every option, block", "every option, coupled"),
    *("draft model, tree", "early exit, tree", "medusa, tree"),
    *("eagle, tree", "eagle3, dynamic tree"),
)
CPU_RUN = """
import pathlib, sys
import jaxspec
from jaxspec.decoding.state import EOS
from tests import fakes, runs
from jaxspec.drafters.prompt_lookup import PromptLookup

batch = runs.Batch([[1, 2, 3]], new=4)
runs.generate(fakes.tiny(1), PromptLookup(2), batch)
maps = pathlib.Path("/proc/self/maps")
loaded = maps.exists() and "libtpu" in maps.read_text()
sys.exit(loaded or "libtpu" in sys.modules)
"""


@pytest.fixture(scope="module")
def compiled():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs the [tpu] extra")
    command = [sys.executable, "-m", "tests.tpu.compile_generation", str(CONFIG)]
    environment = os.environ | ENVIRONMENT
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout)


def peak_bytes(report):
    return (
        report["argument_bytes"]
        + report["temporary_bytes"]
        + report["output_bytes"]
        - report["aliased_bytes"]
    )


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_is_one_module_without_host_traffic(compiled, generation, program):
    report = compiled[generation][program]
    assert report["modules"] == 1
    assert report["host_traffic"] == []


def test_a_loop_that_prints_is_refused(compiled):
    assert compiled["printing"]["host_traffic"]


def test_known_traffic_is_counted(compiled):
    known = compiled["known traffic"]
    assert known["weight_bytes"] <= known["hbm"] <= 1.05 * known["weight_bytes"]
    assert known["flops"] == known["expected_flops"]


def test_a_pair_is_compiled_from_its_shapes_alone(compiled):
    report = compiled["over four chips"]
    assert (report["modules"], report["host_traffic"]) == (1, [])
    # Each chip has half of the weights: of two layers, a draft's one, and their heads.
    assert 4e5 < report["bytes"] < report["peak_bytes"] < 16e9
    assert report["flops"] > 0
    assert report["collectives"]["all-reduce"] > 0


@pytest.mark.parametrize("program", PROGRAMS)
def test_fits_the_chip(compiled, program):
    report = compiled["slice"][program]
    print(f"{program}: {peak_bytes(report) / 1e9:.2f} GB at most, {report}")
    assert peak_bytes(report) <= USABLE * HBM_BYTES


@pytest.mark.parametrize("program", PROGRAMS)
def test_weights_are_arguments_and_not_constants(compiled, program):
    report = compiled["slice"][program]
    given = report["parameter_bytes"] + report["cache_bytes"]
    assert given <= report["argument_bytes"] <= 1.05 * given


@pytest.mark.parametrize("program", PROGRAMS[1:])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_caches_are_updated_where_they_lie(compiled, generation, program):
    report = compiled[generation][program]
    assert report["aliased_bytes"] >= report["cache_bytes"] > 0


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_cache_is_never_copied(compiled, program):
    assert compiled["slice"][program]["cache_copies"] == 0


@pytest.mark.parametrize("generation", GENERATIONS)
def test_no_round_copies_a_cache_whole_or_ring(compiled, generation):
    assert compiled[generation]["rounds"]["cache_copies"] == 0


def test_a_round_commits_all_layers_in_one_loop(compiled):
    assert compiled["slice"]["rounds"]["commit_loops"] == 1


def test_running_on_the_cpu_never_loads_libtpu():
    command = [sys.executable, "-c", CPU_RUN]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
