"""Over a mesh every drafter comes to what it comes to on one device."""

import numpy as np
import pytest

from jaxspec.drafters.autoregressive import Autoregressive
from jaxspec.sharding import Partition
from jaxspec.tpu.hlo import host_traffic
from tests import fakes, runs
from tests.conformance.test_drafters import DRAFTERS
from tests.sharding import on_devices
from tests.sharding.on_devices import HEAD_DIM, MESHES

VOCABULARY, ROWS, BLOCK = 64, 8, 5
LENGTHS = (1, 2, 17, 33, 5, 9, 20, 12)
NEW = (24, 31, 40, 27, 25, 26, 33, 29)
TEMPERATURES = (0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0)
GREEDY = [row for row, value in enumerate(TEMPERATURES) if value == 0]
# Some rows write few ids, so that what is drafted is often right.
FEW = 6


def spread(first):
    """Each drafter on one mesh; `first` is which mesh the first drafter is on."""
    names = list(MESHES)
    return [
        (names[(first + place) % len(names)], drafter)
        for place, drafter in enumerate(DRAFTERS)
    ]


# Of kinds that are there by another topology: each mesh costs a compilation.
ONLY_IN_FULL = ("eagle, tree", "eagle, dynamic tree", "eagle3", "early_exit", "medusa")
EVERYWHERE = [(mesh, "draft_model") for mesh in MESHES]
USUAL = [case for case in spread(0) if case[1] not in ONLY_IN_FULL]
USUAL += [case for case in EVERYWHERE if case not in USUAL]
IN_FULL = [case for case in spread(2) if case not in USUAL]


def batch():
    rng = np.random.default_rng(0)
    bias = np.zeros((ROWS, VOCABULARY), np.float32)
    for row in range(0, ROWS, 2):
        bias[row, rng.permutation(VOCABULARY)[FEW:]] = -np.inf
    return runs.Batch(
        [rng.integers(0, VOCABULARY, length).tolist() for length in LENGTHS],
        new=NEW,
        temperature=TEMPERATURES,
        seeds=range(10, 18),
        options={"logit_bias": bias},
    )


def reports(cases):
    """Of each drafter: what comes out on one device, and over its meshes."""
    target, draft, asked = fakes.tiny(1), fakes.tiny(2, layers=1), batch()
    found = {}
    for name in dict.fromkeys(drafter for _, drafter in cases):
        drafter = DRAFTERS[name](draft)
        alone = runs.generate(target, drafter, asked, runs.programs())
        found[name] = {"alone": on_devices.outcome(alone)}
        for mesh in [mesh for mesh, other in cases if other == name]:
            found[name][mesh] = over_mesh(mesh, target, drafter, asked)
    return {"drafters": found, "near": nearness(target, asked)}


def over_mesh(mesh, target, drafter, asked):
    partition = Partition(on_devices.mesh_of(mesh))
    made = on_devices.programs(partition)
    run = on_devices.generate(partition, target, drafter, asked, made)
    texts, model = [each.text for each in made], MESHES[mesh][1]
    state = run.state
    return {
        "outcome": on_devices.outcome(run),
        "devices": len(state.tokens.sharding.device_set),
        "rows": state.tokens.addressable_shards[0].data.shape[0],
        "collectives": [len(on_devices.collectives(text)) for text in texts],
        "host": [line for text in texts for line in host_traffic(text)],
        # Over a mesh of one part of the rows they cannot meet.
        "meetings": [
            line
            for text in texts
            if model < on_devices.DEVICES
            for line in on_devices.meetings_of_rows(text, model)
        ],
    }


def nearness(target, asked):
    """How near a tie the greedy rows come, and how much a mesh changes a logit."""
    run = runs.generate(target, Autoregressive(), asked, runs.programs())
    tokens, bias = np.asarray(run.state.tokens), asked.options["logit_bias"]
    logits = np.asarray(runs.replay(target, tokens, 1))
    best = np.sort(logits + bias[:, None], axis=-1)
    gaps = best[..., -1] - best[..., -2]
    spans = zip(asked.lengths, np.asarray(run.state.length), strict=True)
    met = [gaps[row, a - 1 : b - 1] for row, (a, b) in enumerate(spans)]
    changes = {}
    for mesh in ("1x8", "4x2"):
        placed = Partition(on_devices.mesh_of(mesh)).place(target, HEAD_DIM)
        other = np.asarray(runs.replay(placed, tokens, BLOCK))
        changes[mesh] = float(np.abs(other - logits).max())
    return {
        "ids": run.ids,
        "smallest": float(min(met[row].min() for row in GREEDY)),
        "changes": changes,
    }


def reported(drafter, full=False):
    cases = IN_FULL if full else USUAL
    return on_devices.call(reports, cases)["drafters"][drafter]


def near(full=False):
    return on_devices.call(reports, IN_FULL if full else USUAL)["near"]


def parametrized(usual, in_full):
    cases = [(*case, False) for case in usual]
    cases += [pytest.param(*case, True, marks=pytest.mark.full) for case in in_full]
    return pytest.mark.parametrize(("mesh", "drafter", "full"), cases)


@parametrized(USUAL, IN_FULL)
def test_over_a_mesh_a_row_comes_to_what_it_comes_to_on_one_device(mesh, drafter, full):
    report = reported(drafter, full)
    alone, apart = report["alone"], report[mesh]["outcome"]
    assert alone.keys() == apart.keys()
    for name, wanted in alone.items():
        assert apart[name] == wanted, name
    assert [len(ids) for ids in apart["ids"]] == list(NEW)


@parametrized(USUAL, IN_FULL)
def test_rows_are_apart_and_never_meet(mesh, drafter, full):
    report, (data, model) = reported(drafter, full)[mesh], MESHES[mesh]
    assert (report["devices"], report["rows"]) == (data * model, ROWS // data)
    assert report["meetings"] == []
    assert [count > 0 for count in report["collectives"]] == [model > 1] * 2


@parametrized(USUAL, IN_FULL)
def test_no_program_over_a_mesh_talks_to_the_host(mesh, drafter, full):
    assert reported(drafter, full)[mesh]["host"] == []


@parametrized(
    [case for case in USUAL if case in spread(0)],
    [case for case in spread(2) if case[1] in ONLY_IN_FULL],
)
def test_what_is_compared_is_drafted_accepted_and_rejected(mesh, drafter, full):
    """Also: rows are texts of their own, and greedy ones are the target's."""
    alone, plain = reported(drafter, full)["alone"], near(full)["ids"]
    for row in GREEDY:
        assert alone["ids"][row] == plain[row]
    assert len({tuple(ids[:20]) for ids in alone["ids"]}) == ROWS
    assert len({token for ids in alone["ids"] for token in ids}) >= 32
    drafted, accepted = np.sum(alone["drafted"]), np.sum(alone["accepted"])
    if drafter == "autoregressive":
        assert drafted == accepted == 0
    else:
        assert 30 <= accepted <= drafted - 30


def test_no_greedy_row_comes_near_a_tie():
    smallest, changes = near()["smallest"], near()["changes"]
    print(smallest, changes)
    assert smallest > 10 * max(changes.values())
    assert min(changes.values()) > 0, "a mesh was not in use"
