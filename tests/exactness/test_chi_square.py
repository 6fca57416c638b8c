"""Sampled ids have the target's law, through the production loop.

Every lossless rule x every drafter x temperatures x options, the options of one batch
differing by row, so that each rule and drafter is one program.
"""

import functools
import itertools

import numpy as np
import pytest

from jaxspec.drafters.draft_model import DraftModel
from tests import fakes, oracles
from tests.exactness import tables
from tests.exactness.chi_square import assert_law, draw, law_of
from tests.exactness.tables import (
    ALL,
    CASES,
    DRAFT,
    DRAFTERS,
    LOSSLESS,
    NODES,
    PLAIN,
    TARGET,
    TREES,
    TRUNCATIONS,
    VOCAB,
)

REPEATS = 16
EVERY_DRAFTER = {
    "none": PLAIN,
    **DRAFTERS,
    **TREES,
    "one token": DraftModel(DRAFT, 1),
    "4 ids": DraftModel(fakes.TableModel.random(4, seed=5, windows=(None,)), NODES),
    "8 ids": DraftModel(fakes.TableModel.random(8, seed=5, windows=(None,)), NODES),
}
# Drafts accepted at each depth, and refused there, for each case.
FLOOR = 20


@functools.cache
def law(name):
    return law_of(CASES[name])


def cases_of(present):
    """The cases that a program with these options can serve."""
    able = {"temperature", *present}
    return tuple(name for name, case in CASES.items() if set(case) <= able)


def drawn_of(rule, drafter, present, names, repeats):
    # With all options present the programs are many: then prefill is one for all rules.
    own = {} if present == ALL else {"rule": rule}
    batch = tables.batch([CASES[name] for name in names], present=present, **own)
    return draw(EVERY_DRAFTER[drafter], batch, repeats, rule=rule)


@functools.cache
def sampled(rule, drafter, present=ALL):
    return drawn_of(rule, drafter, present, cases_of(present), REPEATS)


def assert_every_law(rule, drafter, present=ALL):
    names = cases_of(present)
    drawn = sampled(rule, drafter, present)

    def again(name):
        """Ten times the samples, the failing ones among them: never another seed."""
        repeats = -(-10 * REPEATS // len(names))
        more = drawn_of(rule, drafter, present, [name], repeats)
        return law(name).p_values(more.texts)

    found = {
        name: law(name).p_values(drawn.turn(place, len(names)).texts)
        for place, name in enumerate(names)
    }
    assert_law(found, again)


def assert_really_drafted(drawn, names):
    """Nothing is proven of a rule that had nothing to decide."""
    for place, name in enumerate(names):
        part = drawn.turn(place, len(names))
        accepted, drafted = part.accepted.sum(axis=0), part.drafted.sum(axis=0)
        print(f"{name}: drafted {drafted}, accepted {accepted}")
        assert (accepted >= FLOOR).all()
        assert (drafted - accepted >= FLOOR).all()


def test_plain_sampling_has_the_law():
    assert_every_law("rejection", "none")


ONCE = [("rejection", drafter) for drafter in DRAFTERS]
ONCE += [(rule, "draft model") for rule in ("block", "coupled")]
ONCE += [
    pytest.param(rule, "prompt lookup", marks=pytest.mark.full)
    for rule in ("block", "coupled")
]


@pytest.mark.parametrize(("rule", "drafter"), ONCE)
def test_every_rule_has_the_law_with_every_drafter(rule, drafter):
    assert_every_law(rule, drafter)
    assert_really_drafted(sampled(rule, drafter), cases_of(ALL))


def full(name):
    return pytest.param(name, marks=pytest.mark.full)


@pytest.mark.parametrize(
    "drafter", [full("tree"), full("tree of the likeliest"), full("dynamic tree")]
)
def test_trees_keep_the_law(drafter):
    assert_every_law("rejection", drafter)
    assert_really_drafted(sampled("rejection", drafter), cases_of(ALL))


@pytest.mark.parametrize("drafter", ["draft model", full("prompt lookup")])
def test_coupled_ids_are_those_of_plain_sampling(drafter):
    """Not the law alone: each of 30,720 texts, token by token."""
    plain, coupled = sampled("rejection", "none"), sampled("coupled", drafter)
    np.testing.assert_array_equal(coupled.texts, plain.texts)


PAIRS = [
    ("rejection", "none"),
    *itertools.product(LOSSLESS, DRAFTERS),
    *itertools.product(("rejection", "coupled"), TREES),
]


@pytest.mark.full
@pytest.mark.parametrize(
    "present", [(), TRUNCATIONS], ids=["temperature", "no penalty"]
)
@pytest.mark.parametrize(("rule", "drafter"), PAIRS)
def test_programs_that_lack_an_option_have_the_law(rule, drafter, present):
    assert_every_law(rule, drafter, present)


@pytest.mark.full
@pytest.mark.parametrize("drafter", ["one token", "4 ids", "8 ids"])
@pytest.mark.parametrize("rule", LOSSLESS)
def test_other_drafts_keep_the_law(rule, drafter):
    """A draft of one token; a vocabulary of another size (BL-31)."""
    assert_every_law(rule, drafter)


@pytest.mark.parametrize("name", CASES)
def test_no_threshold_is_a_matter_of_rounding(name):
    """The exact law holds only if float32 keeps the same tokens."""
    case = CASES[name]
    given = {key: case[key] for key in TRUNCATIONS if key in case}
    texts = np.zeros((1, 0), np.int8)
    for longer, _ in tables.walk(tables.plainly(case)):
        going = texts[~tables.has_ended(case, texts)]
        logits = tables.next_logits(TARGET, case, going)
        narrow, wide = (
            oracles.kept_rows(logits, case["temperature"], **given, slack=slack)
            for slack in (-2e-6, 2e-6)
        )
        np.testing.assert_array_equal(narrow, wide)
        texts = longer


def test_the_oracles_of_many_rows_are_those_of_one():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (300, VOCAB)).round(1)
    for options in (*tables.KINDS.values(), CASES["everything, and stops"]):
        given = {name: options[name] for name in TRUNCATIONS if name in options}
        for temperature in (0.3, 1.0, 2.0):
            found = oracles.warp_rows(logits, temperature, **given)
            wanted = [oracles.warp(row, temperature, **given) for row in logits]
            np.testing.assert_allclose(found, wanted, rtol=1e-12)
    case = CASES["everything, and stops"]
    given = {name: case[name] for name in oracles.ADJUSTMENTS} | {"ends": [4]}
    for new in (0, 2, 5):
        texts = rng.integers(0, VOCAB, (300, 4 + new))
        rows = given | {"logit_bias": tables.bias_row(case["logit_bias"])}
        found = oracles.adjusted_rows(logits, texts, 4, **rows)
        pairs = zip(logits, texts.tolist(), strict=True)
        wanted = [oracles.adjusted(row, t[:4], t[4:], **given) for row, t in pairs]
        assert np.isneginf(wanted).any()
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
