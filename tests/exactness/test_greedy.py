"""Greedy rows with penalties write what the oracle writes, with every rule and drafter.

A penalty at a node must count the draft tokens before it, or an id differs.
"""

import functools

import numpy as np
import pytest

from jaxspec.drafters.draft_model import DraftModel
from tests.exactness import tables
from tests.exactness.chi_square import ACCEPTABLE, draw, law_of, run
from tests.exactness.tables import DRAFT, LOSSLESS, NODES, PLAIN, TARGET

NEW, SMALLEST_GAP = 20, 1e-3
PROMPTS = [tables.PROMPT, [3, 3, 3, 3, 3], [0, 1], [4, 1, 3, 3, 0, 3, 3]]
# BL-27: left alone it writes token 3 for ever.
ALWAYS_3 = tables.with_table([0.31, 0.17, -0.45, 3.0, 0.23, -0.4])
CASES = [
    {},
    {"frequency_penalty": 2.0},
    {"presence_penalty": 1.0},
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 2.0, "presence_penalty": 1.0, "repetition_penalty": 1.5},
    tables.PENALTIES,
    tables.CASES["everything, and stops"],
    {"logit_bias": {3: -100.0}, "min_p": 0.3},
    {"banned": ((3, 3), (1,)), "min_new_tokens": 5, "stops": ((0,), (4, 2))},
]
CASES = [case | {"temperature": 0.0} for case in CASES]
FREQUENCY, THREE_AT_ONCE = 1, 4
PAIRS = [(case, prompt) for case in range(len(CASES)) for prompt in range(len(PROMPTS))]
BATCH = tables.batch(
    [CASES[case] for case, _ in PAIRS],
    [PROMPTS[prompt] for _, prompt in PAIRS],
    new=NEW,
)
TARGETS = {"always 3": ALWAYS_3, "a table": TARGET}
DRAFTS = {
    "none": lambda target: PLAIN,
    "draft model": lambda target: DraftModel(DRAFT, NODES),
    "draft is target": lambda target: DraftModel(target, NODES),
    "draft always proposes 3": lambda target: DraftModel(PROPOSES_3, NODES),
    "prompt lookup": lambda target: tables.DRAFTERS["prompt lookup"],
    "tree": lambda target: tables.TREES["tree"],
}
# `block` takes no trees.
DRAFTED = [
    pytest.param(
        *(rule, drafter),
        marks=pytest.mark.full if drafter == "tree" else (),
    )
    for rule in LOSSLESS
    for drafter in DRAFTS
    if drafter != "none" and (rule, drafter) != ("block", "tree")
]
# BL-29: even after its bias.
PROPOSES_3 = tables.with_table([0, 0, 0, 1000, 0, 0])


def greedy_text(model, case, prompt):
    """What the model must write, in float64; no choice may be a matter of rounding."""
    text = np.zeros((1, 0), int)
    while text.shape[1] < NEW and not tables.has_ended(case, text)[0]:
        logits = tables.next_logits(model, case, text, prompt)[0]
        *_, second, best = np.sort(logits)
        assert best - second > SMALLEST_GAP, (case, prompt, text)
        text = np.append(text, [[logits.argmax()]], axis=1)
    return text[0].tolist()


@functools.cache
def texts(target):
    return [
        greedy_text(TARGETS[target], CASES[case], PROMPTS[prompt])
        for case, prompt in PAIRS
    ]


@functools.cache
def written(rule, target, drafter):
    model = TARGETS[target]
    return run(DRAFTS[drafter](model), BATCH, model, rule=rule)


@pytest.mark.parametrize("target", TARGETS)
def test_the_penalties_show(target):
    """Else equal ids would prove nothing."""
    assert len({tuple(text) for text in texts(target)}) >= len(CASES)
    plain = written("rejection", target, "none").ids
    assert plain[: len(PAIRS)] == texts(target)
    if target == "always 3":
        by_case = dict(zip(PAIRS, texts(target), strict=True))
        for prompt in range(len(PROMPTS)):
            assert by_case[0, prompt] == [3] * NEW
            for case in (FREQUENCY, THREE_AT_ONCE):
                assert len(set(by_case[case, prompt])) == tables.VOCAB


@pytest.mark.parametrize(("rule", "drafter"), DRAFTED)
@pytest.mark.parametrize("target", TARGETS)
def test_greedy_ids_are_the_oracles(rule, target, drafter):
    """BL-27."""
    done = written(rule, target, drafter)
    assert done.ids[: len(PAIRS)] == texts(target)
    statistics = done.state.statistics
    drafted, accepted = (
        np.asarray(each)[: len(PAIRS)].sum(axis=0)
        for each in (statistics.drafted, statistics.accepted)
    )
    print(f"drafted {drafted}, accepted {accepted}")
    assert (drafted >= 20).all()
    if drafter == "draft is target":
        # The drafter's warp knows its own path just as the verified nodes know theirs.
        np.testing.assert_array_equal(accepted, drafted)
    else:
        assert 0 < accepted[0] < drafted[0]


BARRED = [
    {"temperature": temperature, "logit_bias": {3: -100.0}, "min_p": 0.3}
    for temperature in (0.0, 0.7, 1.0, 1.3)
]
FLAT = tables.with_table([0.7, 0.4, 0.1, 3.0, -0.1, -1.5])


@pytest.mark.parametrize("drafter", ["draft always proposes 3", "prompt lookup"])
@pytest.mark.parametrize("rule", LOSSLESS)
def test_a_barred_token_that_is_always_proposed_never_appears(rule, drafter):
    """BL-29: min-p and bias apply to every verified row."""
    batch = tables.batch(BARRED, prompts=[[3] * 9])
    drawn = draw(DRAFTS[drafter](FLAT), batch, 4, FLAT, rule=rule)
    assert (drawn.drafted.sum(axis=0) >= 500).all()
    assert not (drawn.texts == 3).any()
    assert (drawn.turn(0, len(BARRED)).texts == 0).all()
    if drafter == "draft always proposes 3":
        assert not drawn.accepted.any()
    for place, case in enumerate(BARRED[1:], start=1):
        own = drawn.turn(place, len(BARRED)).texts
        found = law_of(case, FLAT).p_values(own)
        print(f"{case}: smallest p {min(found.values()):.1e}")
        assert min(found.values()) > ACCEPTABLE
