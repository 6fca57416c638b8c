"""Every job of `tpu_configs/` compiles for its slice, fits it and moves little."""

import importlib.util
import pathlib

import pytest

from jaxspec.errors import UserError
from jaxspec.job import read_job
from jaxspec.models.presets import PRESETS
from jaxspec.tpu.compiled_job import compile_job, describe
from jaxspec.tpu.plan import make_plan

pytestmark = pytest.mark.tpu

FOLDER = pathlib.Path(__file__).parents[2] / "tpu_configs"
# Bytes of a round, at most so many times the floor: all weights and live keys once a
# pass. What the memory on a chip keeps from pass to pass may bring it below.
FACTORS = {
    "v5e-1": 2.0,
    "v5e-8": 1.3,
    "v6e-8": 1.3,
    # Of the rings of gemma3 a prefill chunk is read too, four blocks of twelve, and the
    # running sums of attention, of 4 kv heads a chip, leave the memory on the chip.
    "v5p-8": 1.4,
    "v5p-32": 1.3,
    "v5e-256": 1.3,
}
LEAST = 0.6
# Up to twenty minutes to compile each, once; .ci/run has them as far as there is time.
LONG = ("v6e-8", "v5p-8", "v5p-32", "v5e-256")
PARAMS = [
    # A group is one worker's, which then compiles once.
    pytest.param(
        name,
        marks=[pytest.mark.xdist_group(name), *[pytest.mark.full] * (name in LONG)],
    )
    for name in FACTORS
]


@pytest.fixture(scope="module", params=PARAMS)
def compiled(request):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs the [tpu] extra")
    job = read_job(FOLDER / f"{request.param}.yaml")
    return request.param, job, compile_job(job, job.capacity // 2)


def programs(report):
    speculative = report["speculative"]
    return {
        "rounds": speculative,
        "prefill": speculative["prefill"],
        "plain rounds": report["plain"],
    }


def test_all_files_are_tested():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(FACTORS)


def test_is_one_module_without_host_traffic(compiled):
    for program in programs(compiled[2]).values():
        assert program["modules"] == 1
        assert program["host_traffic"] == []


def test_fits_with_a_tenth_to_spare(compiled):
    _, job, report = compiled
    plan = make_plan(job, report)
    print(f"{plan.hbm_bytes_per_chip / 1e9:.2f} of {plan.hbm_capacity_bytes / 1e9} GB")
    assert plan.fits


def test_a_round_moves_little_more_than_weights_and_live_keys(compiled):
    name, _, report = compiled
    for rounds in (report["speculative"], report["plain"]):
        ratio = rounds["round_bytes"] / rounds["floor_bytes"]
        print(f"{name}: {ratio:.2f} times {rounds['floor_bytes'] / 1e6:.0f} MB")
        assert LEAST < ratio <= FACTORS[name]


def test_the_logits_are_never_gathered(compiled):
    _, job, report = compiled
    # Of one slot of each row; the largest that is moved is a sum over the chips.
    logits = job.batch_size // job.mesh[0] * describe(job.model).vocab_size
    for program in (report["speculative"], report["plain"]):
        for step, cost in program["steps"].items():
            assert cost["largest"] < logits, (step, cost)


def test_only_a_model_over_several_chips_talks_to_others(compiled):
    _, job, report = compiled
    calls = sum(cost["calls"] for cost in report["speculative"]["steps"].values())
    assert (calls > 0) == (job.mesh[1] > 1)


def test_published_references_have_shapes():
    assert describe("meta-llama/Llama-3.1-8B-Instruct") == PRESETS["llama-3.1-8b"]
    with pytest.raises(UserError, match="shapes of nobody/knows are not known"):
        describe("nobody/knows")
