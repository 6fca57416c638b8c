"""`typical` is lossy: its texts have a law, and it is not the target's."""

import functools

import numpy as np
import pytest

from tests import oracles
from tests.exactness import tables
from tests.exactness.chi_square import DAMNING, Law, assert_law, draw, law_of
from tests.exactness.tables import DRAFT, DRAFTERS, NEW, NODES, TARGET, TREE, VOCAB

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


def tree_law(case):
    """The law of rounds that draft `TREE` with the likeliest children of each node."""
    first = np.arange(VOCAB)[:, None]
    begun, ended = {1: [(first, tables.next_probs(TARGET, case, first[:1, :0])[0])]}, []
    for written in range(1, NEW):
        parts = begun.pop(written)
        texts, weights = (np.concatenate(each) for each in zip(*parts, strict=True))
        paths, taken = grow(case, texts)
        depths = np.where(taken, np.array(TREE.depths)[:, None], -1)
        end = depths.argmax(axis=0)
        for slot, path in enumerate(paths):
            here = end == slot
            path, weight = path[here], weights[here]
            if path.shape[1] >= NEW:
                ended.append((path[:, :NEW], weight))
                continue
            after = tables.next_probs(TARGET, case, path) * weight[:, None]
            path = np.repeat(path, VOCAB, axis=0)
            last = np.tile(np.arange(VOCAB), len(path) // VOCAB)
            longer = np.concatenate([path, last[:, None]], axis=1)
            done = (
                ended
                if longer.shape[1] == NEW
                else begun.setdefault(longer.shape[1], [])
            )
            done.append((longer, after.ravel()))
    texts, weights = (np.concatenate(each) for each in zip(*ended, strict=True))
    texts, which = np.unique(texts, axis=0, return_inverse=True)
    return Law(texts, np.bincount(which.ravel(), weights))


def grow(case, texts):
    """The text at each slot of the tree, and which slots a round may end at."""
    paths, taken = [texts], [np.ones(len(texts), bool)]
    for node, parent in enumerate(TREE.parents):
        rank = TREE.parents[:node].count(parent)
        draft = tables.next_probs(DRAFT, case, paths[parent])
        child = np.argsort(-draft, axis=1)[:, rank]
        typical = is_typical(tables.next_probs(TARGET, case, paths[parent]))
        taken.append(taken[parent] & typical[np.arange(len(texts)), child])
        paths.append(np.concatenate([paths[parent], child[:, None]], axis=1))
    return paths, np.stack(taken)


@pytest.mark.full
def test_on_a_tree_the_text_has_the_rules_own_law():
    def drawn(cases, repeats):
        batch = tables.batch(cases, present=())
        drafter = tables.TREES["tree of the likeliest"]
        return draw(drafter, batch, repeats, rule="typical")

    wanted = [tree_law(case) for case in CASES]
    run = drawn(CASES, REPEATS)
    assert (run.accepted.sum(axis=0)[: TREE.depth] > 100).all()
    found = {
        name: wanted[place].p_values(run.texts[place :: len(NAMES)])
        for place, name in enumerate(NAMES)
    }

    def again(name):
        own = [tables.CASES[name]]
        return wanted[NAMES.index(name)].p_values(drawn(own, AGAIN).texts)

    assert_law(found, again)


def test_the_law_is_made_of_the_definition():
    rows = np.random.default_rng(0).dirichlet(np.ones(VOCAB), 500)
    wanted = [[oracles.is_typical(p, x) for x in range(VOCAB)] for p in rows]
    np.testing.assert_array_equal(is_typical(rows), wanted)
