"""`typical` is lossy: its texts have a law, and it is not the target's."""

import functools

import numpy as np
import pytest

from tests import oracles
from tests.exactness import tables
from tests.exactness.chi_square import DAMNING, Law, assert_law, draw, law_of
from tests.exactness.tables import DRAFT, DRAFTERS, NODES, TARGET, VOCAB

NAMES = ("T=0.7, none", "T=1.0, none", "T=1.3, none")
CASES = [tables.CASES[name] for name in NAMES]
REPEATS, AGAIN = 8, 27


def is_typical(probs):
    """Cai et al. 2024, section 2.3.1: p > min(0.09, 0.3 exp(-entropy))."""
    entropy = -(probs * np.log(probs)).sum(axis=-1)
    return probs > np.minimum(0.09, 0.3 * np.exp(-entropy))[:, None]


def typically(case):
    """The step of `walk` of a round after the other, as Medusa's rule has it.

    A text has a weight for each number of draft tokens that its newest round has
    accepted so far; a refused one is replaced by the target's own, and so is the one
    after `NODES`: then a round begins.
    """

    def step(texts, weights):
        target = tables.next_probs(TARGET, case, texts)
        after = np.zeros((*target.shape, NODES + 1))
        if texts.shape[1] == 0:
            # Prefill's.
            after[:, :, 0] = target
            return after
        draft = tables.next_probs(DRAFT, case, texts)
        taken = np.where(is_typical(target), draft, 0)
        after[:, :, 1:] = taken[:, :, None] * weights[:, None, :-1]
        refused = weights[:, :-1].sum(axis=1) * (1 - taken.sum(axis=1))
        after[:, :, 0] = (refused + weights[:, -1])[:, None] * target
        return after

    return step


@functools.cache
def laws(name):
    """The law of the rule, and the target's."""
    case = tables.CASES[name]
    texts, weights = list(tables.walk(typically(case), np.zeros(NODES + 1)))[-1]
    return Law(texts, weights.sum(axis=1)), law_of(case)


def drawn(cases, repeats):
    batch = tables.batch(cases, present=())
    return draw(DRAFTERS["draft model"], batch, repeats, rule="typical").texts


@functools.cache
def texts():
    return drawn(CASES, REPEATS)


def test_the_text_has_the_rules_own_law():
    def again(name):
        return laws(name)[0].p_values(drawn([tables.CASES[name]], AGAIN))

    found = {
        name: laws(name)[0].p_values(texts()[place :: len(NAMES)])
        for place, name in enumerate(NAMES)
    }
    assert_law(found, again)


@pytest.mark.parametrize("name", NAMES)
def test_the_text_has_not_the_targets_law(name):
    own = texts()[NAMES.index(name) :: len(NAMES)]
    found = laws(name)[1].p_values(own)
    # Prefill draws the first token, which is the target's.
    assert found.pop("token 0") > 1e-4
    print(f"{name}: p {min(found.values()):.1e}")
    assert min(found.values()) < DAMNING


def test_the_law_is_made_of_the_definition():
    rows = np.random.default_rng(0).dirichlet(np.ones(VOCAB), 500)
    wanted = [[oracles.is_typical(p, x) for x in range(VOCAB)] for p in rows]
    np.testing.assert_array_equal(is_typical(rows), wanted)
