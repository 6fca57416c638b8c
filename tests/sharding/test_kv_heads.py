"""BL-59: with fewer kv heads than chips on the model axis each chip has them all."""

import dataclasses

import pytest
from flax import nnx

from jaxspec.drafters.draft_model import DraftModel
from jaxspec.models.decoder import Decoder
from jaxspec.sharding import COPIED, Partition, Rules
from tests import fakes, runs
from tests.sharding import on_devices

ROWS, DRAFTED = 8, 2
# kv heads, mesh, rules of the draft, platform. The 8 query heads are split over each.
# A cache as on a TPU, which has all layers in one array, is laid out on each chip.
USUAL = [
    (1, "2x4", "split", "cpu"),
    (1, "1x8", "copied", "cpu"),
    (2, "4x2", "copied", "tpu"),
]
IN_FULL = [
    (1, "2x4", "copied", "tpu"),
    (1, "1x8", "split", "tpu"),
    (2, "1x8", "split", "cpu"),
    (2, "2x4", "split", "tpu"),
    (2, "2x4", "copied", "cpu"),
    (2, "1x8", "copied", "tpu"),
    (2, "4x2", "split", "tpu"),
]
DRAFT_RULES = {"split": Rules(), "copied": COPIED}


def decoder(seed, kv_heads, layers, platform):
    config = fakes.tiny(seed, layers).config
    config = dataclasses.replace(
        config, num_heads=8, num_kv_heads=kv_heads, head_dim=4, query_scale=0.5
    )
    return Decoder(config, dtype="float32", platform=platform, rngs=nnx.Rngs(seed))


def generations(cases):
    asked = runs.Batch(
        [list(range(first, first + 2 * first + 1)) for first in range(ROWS)],
        new=[24 + row for row in range(ROWS)],
        temperature=[0.0, 1.0] * 4,
    )
    report = {}
    for kv_heads, platform in dict.fromkeys((kv, where) for kv, _, _, where in cases):
        target = decoder(1, kv_heads, 2, platform)
        drafter = DraftModel(decoder(2, kv_heads, 1, platform), DRAFTED)
        alone = runs.generate(target, drafter, asked, runs.programs())
        for kv, mesh, rules, where in cases:
            if (kv, where) == (kv_heads, platform):
                over = Partition(
                    on_devices.mesh_of(mesh), draft_rules=DRAFT_RULES[rules]
                )
                run = on_devices.generate(over, target, drafter, asked)
                report[" ".join(map(str, (kv, mesh, rules, where)))] = {
                    "alone": on_devices.outcome(alone),
                    "apart": on_devices.outcome(run),
                    "held": held(run.state),
                }
    return report


def held(state):
    """Of how many kv heads a chip has the target's keys, and the draft's."""
    caches = state.cache, state.drafter.cache
    return [each.groups[0][0].addressable_shards[0].data.shape[3] for each in caches]


@pytest.mark.parametrize(
    ("case", "full"),
    [
        *((case, False) for case in USUAL),
        *(pytest.param(case, True, marks=pytest.mark.full) for case in IN_FULL),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_kv_heads_are_split_if_they_divide_and_else_on_each_chip(case, full):
    report = on_devices.call(generations, IN_FULL if full else USUAL)
    found = report[" ".join(map(str, case))]
    assert found["apart"] == found["alone"]
    kv_heads, mesh, rules, _ = case
    parts = 2 if mesh == "4x2" and kv_heads == 2 else 1
    copied = rules == "copied"
    assert found["held"] == [kv_heads // parts, kv_heads // (1 if copied else parts)]
    assert sum(map(sum, found["alone"]["accepted"])) >= 5
