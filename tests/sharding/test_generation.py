"""A `Generator` over a mesh, whose rows the prompts do not fill."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest

import jaxspec
from jaxspec.sharding import COPIED, Partition, Rules
from tests import fakes
from tests.sharding import on_devices
from tests.sharding.on_devices import HEAD_DIM

MESH = "2x4"
DRAFT_RULES = {"split": Rules(), "copied": COPIED}
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8] * 17]
OPTIONS = {
    "max_new_tokens": [24, 30, 27],
    "temperature": [0.0, 1.0, 0.8],
    "top_p": [1.0, 0.9, 0.7],
    "seed": [5, 6, 7],
    "log_probs": 2,
}


def results(generator):
    """What a call gives; times apart."""
    found = generator.generate(PROMPTS, **OPTIONS)
    return [
        {
            "ids": each.token_ids,
            "finish": each.finish_reason,
            "from_draft": each.from_draft,
            "rounds": each.stats.rounds,
            "drafted": each.stats.drafted,
            "accepted": each.stats.accepted,
            "log_probs": [each.log_probs.raw, each.log_probs.warped],
        }
        for each in found
    ]


def generations(draft_rules):
    """On one device, and twice over the mesh."""
    target, draft = fakes.tiny(1), fakes.tiny(2, layers=1)
    language = functools.partial(jaxspec.LanguageModel, "tiny")
    make = functools.partial(jaxspec.Generator, draft_tokens=3)
    rules = DRAFT_RULES[draft_rules]
    partition = Partition(on_devices.mesh_of(MESH), draft_rules=rules)
    placed = language(partition.place(target, HEAD_DIM), None, partition)
    generator = make(placed, language(draft))
    head = generator.drafter.model.lm_head.weight[...]
    return {
        "alone": results(make(language(target), language(draft))),
        "apart": results(generator),
        "again": results(generator),
        "programs": [each.compilations for each in generator.programs],
        "rows": [generator.whole_rows(count) for count in (1, 3, 4)],
        "head": head.addressable_shards[0].data.shape,
    }


@pytest.fixture(
    scope="module",
    params=["split", pytest.param("copied", marks=pytest.mark.full)],
)
def case(request):
    report = on_devices.call(generations, request.param)
    return SimpleNamespace(rules=request.param, **report)


def test_three_prompts_over_two_parts_come_to_what_they_come_to_alone(case):
    """BL-59: the fourth row is inert."""
    assert case.rows == [2, 4, 4]
    for here, there in zip(case.alone, case.apart, strict=True):
        assert {**there, "log_probs": None} == {**here, "log_probs": None}
        np.testing.assert_allclose(
            there["log_probs"], here["log_probs"], atol=1e-4, rtol=0
        )
    assert [len(each["ids"]) for each in case.apart] == OPTIONS["max_new_tokens"]
    assert sum(each["accepted"] for each in case.apart) >= 5


def test_a_draft_lies_as_its_rules_say(case):
    assert case.head == {"split": [16, 32], "copied": [64, 32]}[case.rules]


def test_a_second_call_compiles_nothing(case):
    assert case.again == case.apart
    assert case.programs == [1, 0, 1]


def long_prompts():
    """A prompt of three pieces beside a short one, alone and over the mesh."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("batching", "generator"):
            patch.setattr(f"jaxspec.{module}.LARGEST_CHUNK", 32)
        return in_pieces((70, 9))


def in_pieces(lengths):
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, 64, length).tolist() for length in lengths]
    target, draft = fakes.tiny(1), fakes.tiny(2, layers=1)
    language = functools.partial(jaxspec.LanguageModel, "tiny")
    partition = Partition(on_devices.mesh_of(MESH))
    placed = language(partition.place(target, HEAD_DIM), None, partition)
    report = {}
    for name, model in (("alone", language(target)), ("apart", placed)):
        made = jaxspec.Generator(model, language(draft), draft_tokens=3)
        found = made.generate(prompts, max_new_tokens=12, temperature=0.0)
        report[name] = [each.token_ids for each in found]
        report[f"{name} pieces"] = [each.dispatches for each in made.programs[:2]]
    return report


def test_a_prompt_of_several_pieces_comes_to_the_same_over_a_mesh():
    report = on_devices.call(long_prompts)
    assert report["apart"] == report["alone"]
    assert report["apart pieces"] == report["alone pieces"] == [1, 2]
