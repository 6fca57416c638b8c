"""Under `coupled` the ids are plain sampling's with the same seed, whatever is drafted.

On table models nothing is rounded differently, so ids are equal; a real decoder is held
to the gap rule, the gap being that of the log-probabilities plus the Gumbel noise.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core import noise
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.prompt_lookup import PromptLookup
from tests import fakes, oracles, runs
from tests.exactness import tables
from tests.exactness.chi_square import run
from tests.exactness.tables import CASES, DRAFT, NODES, PLAIN, TARGET

NEW = 20
PROMPTS = [tables.PROMPT, [3, 3, 3], [0], [5, 1, 2, 5, 1], [4, 2, 4, 2, 4, 2]]
BATCH = tables.batch(list(CASES.values()), PROMPTS, new=NEW)
STRANGER = fakes.TableModel.random(tables.VOCAB, seed=7, scale=3.0, windows=(None,))
DRAFTERS = {
    "draft model": lambda k: DraftModel(DRAFT, k),
    "draft is target": lambda k: DraftModel(TARGET, k),
    "another model": lambda k: DraftModel(STRANGER, k),
    "always 3": lambda k: DraftModel(tables.with_table([0, 0, 0, 9, 0, 0]), k),
    "prompt lookup": lambda k: PromptLookup(k, min_ngram=1),
    "tree": lambda k: tables.TREES["tree"],
    "dynamic tree": lambda k: tables.TREES["dynamic tree"],
    "tree of the likeliest": lambda k: tables.TREES["tree of the likeliest"],
}
# Nothing here rests on how well a program is optimised.
MADE = runs.programs()


@functools.cache
def plain_ids():
    return run(PLAIN, BATCH).ids


@functools.cache
def coupled(drafter):
    return run(DRAFTERS[drafter](NODES), BATCH, rule="coupled")


IN_FULL = ("tree", "tree of the likeliest", "another model")
PARAMS = [
    pytest.param(name, marks=pytest.mark.full if name in IN_FULL else ())
    for name in DRAFTERS
]


@pytest.mark.parametrize("drafter", PARAMS)
def test_ids_are_plain_samplings_whatever_the_drafter(drafter):
    done = coupled(drafter)
    assert done.ids == plain_ids()
    statistics = done.state.statistics
    drafted, accepted = (
        np.asarray(each).sum(axis=0)
        for each in (statistics.drafted, statistics.accepted)
    )
    print(f"drafted {drafted}, accepted {accepted}")
    assert (accepted >= [50, 50, 50, 10]).all()
    if drafter == "draft is target":
        np.testing.assert_array_equal(accepted, drafted)
    else:
        assert (drafted - accepted >= 50).all()


def test_other_seeds_are_other_ids():
    """Else the ids might not be drawn at all."""
    ids = plain_ids()
    other = run(PLAIN, BATCH._replace(seeds=range(5000, 5000 + tables.ROWS))).ids
    same = [one == two for one, two in zip(ids, other, strict=True)]
    assert np.mean(same) < 0.05


@pytest.mark.parametrize("drafter", ["draft model", "prompt lookup"])
def test_ids_do_not_depend_on_the_order_of_the_batch(drafter):
    order = np.random.default_rng(0).permutation(tables.ROWS)
    moved = run(DRAFTERS[drafter](NODES), BATCH.rows(order), rule="coupled")
    assert moved.ids == [plain_ids()[row] for row in order]


SHAPES = [
    (drafter, k, rows)
    for drafter in ("draft model", "prompt lookup")
    for k in (1, 2, 3, 4)
    for rows in (1, 3, 8)
]
# The others take minutes to compile.
QUICKLY = [("draft model", 1, 3), ("prompt lookup", 3, 1)]


@pytest.mark.parametrize(
    ("drafter", "k", "rows"),
    [
        pytest.param(*each, marks=[] if each in QUICKLY else pytest.mark.full)
        for each in SHAPES
    ],
)
def test_ids_do_not_depend_on_k_or_the_size_of_the_batch(drafter, k, rows):
    for first in range(0, 24, rows):
        some = range(first, first + rows)
        batch = BATCH.rows(some)._replace(rule="coupled")
        done = runs.generate(TARGET, DRAFTERS[drafter](k), batch, MADE)
        assert done.ids == [plain_ids()[row] for row in some]


# On a real decoder

PENALTIES = tables.PENALTIES | {"banned": ((1, 3), (7,))}
SIMPLE = [{"temperature": temperature} for temperature in (0.7, 0.3, 1.3, 0.0)]
EVERY = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.4, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 0.7, **PENALTIES},
    {"temperature": 0.3, **PENALTIES, "top_k": 30, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 0.0, **PENALTIES},
    {"temperature": 0.4},
]


def scores(batch, cases, ids, logits):
    """Of each row: `[new, V]` in float64, of which each new token is the arg-max."""
    places = jnp.broadcast_to(jnp.arange(batch.capacity), batch.tokens.shape)
    keys = noise.seed_keys(batch.row_seeds)
    gumbel = np.asarray(noise.shared_gumbels(keys, places, logits.shape[-1]), float)
    for row, (prompt, output) in enumerate(zip(batch.prompts, ids, strict=True)):
        case = dict(cases[row % len(cases)])
        if case["temperature"] == 0:
            gumbel[row] = 0
            del case["temperature"]
        new = range(len(output))
        before = [logits[row, len(prompt) + i - 1] for i in new]
        own = [oracles.adjusted(before[i], prompt, output[:i], **case) for i in new]
        yield np.array(own) + gumbel[row, len(prompt) : len(prompt) + len(output)]


@pytest.fixture(scope="module")
def models():
    rng = np.random.default_rng(8)
    prompts = [rng.integers(0, 64, n).tolist() for n in (1, 2, 17, 33) * 4]
    return fakes.tiny(1), fakes.tiny(2, layers=1), prompts


def plain_run(models, cases, present, blocks=(5, 112)):
    """Plain sampling, with the gaps between the two best of its choices."""
    target, _, prompts = models
    batch = tables.batch(cases, prompts, present, rows=16, vocabulary=64)
    batch = batch._replace(new=64, capacity=112, chunk=48)
    done = runs.generate(target, PLAIN, batch, MADE)
    logits, *others = (
        np.asarray(runs.replay(target, done.state.tokens, block))
        for block in (1, *blocks)
    )
    found = list(scores(batch, cases, done.ids, logits))
    assert [each.argmax(axis=1).tolist() for each in found] == done.ids
    best = [np.sort(each)[:, -2:] for each in found]
    delta = max(np.abs(other - logits).max() for other in others)
    # A change of a logit is one of a score as many times larger.
    delta *= 1.3 / min(case["temperature"] for case in cases if case["temperature"])
    return runs.Plain(done, [each[:, 1] - each[:, 0] for each in best], delta)


def assert_couples(models, drafter, plain, depth_reached):
    batch = plain.run.batch._replace(rule="coupled")
    done = runs.generate(models[0], drafter, batch, MADE)
    runs.assert_same_ids(plain, done.ids)
    accepted = np.asarray(done.state.statistics.accepted).sum(axis=0)
    print(f"accepted {accepted}")
    assert accepted[depth_reached - 1] > 0


def test_a_real_decoder_writes_what_it_writes_alone(models):
    plain = plain_run(models, SIMPLE, (), blocks=(5,))
    assert_couples(models, DraftModel(models[1], NODES), plain, depth_reached=2)


REAL_DRAFTERS = {
    "draft model": (lambda target, draft, k: DraftModel(draft, k), 2),
    "draft is target": (lambda target, draft, k: DraftModel(target, k), NODES),
    "constant": (lambda target, draft, k: DraftModel(fakes.constant(target), k), 1),
    "prompt lookup": (lambda target, draft, k: PromptLookup(k, min_ngram=1), 1),
}


@pytest.fixture(scope="module")
def plain_with_every_option(models):
    return plain_run(models, EVERY, tables.ALL)


@pytest.mark.full
@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("name", REAL_DRAFTERS)
def test_a_real_decoder_with_every_option_and_drafter(
    models, plain_with_every_option, name, k
):
    drafter, depth_reached = REAL_DRAFTERS[name]
    target, draft, _ = models
    reached = min(k, depth_reached)
    assert_couples(models, drafter(target, draft, k), plain_with_every_option, reached)
