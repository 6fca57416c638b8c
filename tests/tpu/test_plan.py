"""The roofline, by numbers that can be checked by hand, and which meshes there are."""

import dataclasses

import pytest

from jaxspec.errors import UserError
from jaxspec.job import Job
from jaxspec.tpu.chips import CHIPS, COLLECTIVE_SECONDS, meshes_of
from jaxspec.tpu.plan import make_plan

V5E = CHIPS["v5e"]
SIZES = {"peak_bytes": 10**9, "compile_seconds": 1.0}
NOTHING = {"hbm": 0.0, "flops": 0.0, "moved": {}, "calls": 0.0, "largest": 0}
# A verify of 4 ms by its bytes, 1 ms by its operations.
VERIFY = NOTHING | {"hbm": 4e-3 * V5E.hbm_bandwidth, "flops": 1e-3 * V5E.flops}


def compiled(verify, depth=3):
    steps = {"draft": NOTHING, "verify": verify, "accept": NOTHING}
    sizes = SIZES | {"state_bytes": 0, "round_bytes": 1.0, "floor_bytes": 1.0}
    rounds = sizes | {"steps": steps, "depth": depth}
    return {"speculative": rounds | {"prefill": SIZES}, "plain": rounds | {"depth": 0}}


JOB = Job("m", dtype="bfloat16", batch_size=8, topology="v5e:2x4", mesh=(1, 8))


def test_a_round_takes_as_long_as_its_bytes_or_its_operations():
    plan = make_plan(JOB, compiled(VERIFY))
    assert plan.round_seconds == pytest.approx(4e-3)
    assert plan.plain_tokens_per_second == pytest.approx(8 / 4e-3)
    # (1 - a^4) / (1 - a) tokens of a draft of three.
    assert plan.tokens_per_second["0.5"] == pytest.approx(1.875 * 8 / 4e-3)


def test_float32_takes_six_passes():
    plan = make_plan(dataclasses.replace(JOB, dtype="float32"), compiled(VERIFY))
    assert plan.round_seconds == pytest.approx(6e-3)


def test_collectives_come_on_top():
    moved = {"all-reduce": 1e-3 * V5E.ici_bandwidth}
    plan = make_plan(JOB, compiled(VERIFY | {"moved": moved, "calls": 5.0}))
    # The parts of a sum go round twice.
    assert plan.round_seconds == pytest.approx(6e-3 + 5 * COLLECTIVE_SECONDS)


@pytest.mark.parametrize("needed, fits", [(0.9, True), (0.901, False)])
def test_a_tenth_of_the_memory_is_to_spare(needed, fits):
    report = compiled(VERIFY)
    report["speculative"]["peak_bytes"] = int(needed * V5E.hbm_bytes)
    assert make_plan(JOB, report).fits == fits


@pytest.mark.parametrize(
    ("topology", "mesh", "count"),
    [
        ("v5e:1x1", (1, 1), 1),
        ("v5e:2x4", (1, 8), 1),
        # One mesh a VM, however small it is: the other chips are idle.
        ("v5e:2x4", (1, 1), 1),
        ("v5e:16x16", (64, 4), 1),
        ("v5p:2x2x4", (1, 4), 4),
        ("v5p:2x2x4", (2, 8), 1),
    ],
)
def test_a_mesh_is_of_a_vm_or_of_all(topology, mesh, count):
    assert meshes_of(topology, mesh) == count
    job = dataclasses.replace(JOB, topology=topology, mesh=mesh)
    rate = make_plan(job, compiled(NOTHING | {"hbm": 1e9})).plain_tokens_per_second
    chip = CHIPS[topology[:3]]
    assert rate == pytest.approx(8 * count * chip.hbm_bandwidth / 1e9)


@pytest.mark.parametrize(
    ("topology", "mesh", "words"),
    [
        ("v5e:16x16", (4, 1), "a program of v5e runs on one chip or on the whole"),
        ("v6e:2x4", (2, 2), "such as 1x8"),
        ("v5p:2x2x4", (1, 8), "at most the 4 chips of a VM or all 16 of v5p:2x2x4"),
    ],
)
def test_other_meshes_are_refused(topology, mesh, words):
    with pytest.raises(UserError, match=words):
        meshes_of(topology, mesh)
