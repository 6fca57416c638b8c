"""Greedy ids are the target's own, whatever is drafted and accepted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters.autoregressive import Autoregressive
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.prompt_lookup import PromptLookup
from tests import fakes, runs

NODES = 4


def test_a_draft_that_is_the_target_is_always_accepted(tiny):
    run = runs.generate(tiny.target, DraftModel(tiny.target, NODES), tiny.batch)
    runs.assert_same_ids(tiny.plain, run.ids)
    statistics = run.state.statistics
    np.testing.assert_array_equal(statistics.accepted, statistics.drafted)
    assert int(statistics.rounds.sum()) >= 50
    assert int(statistics.accepted.sum()) >= 800


def test_a_draft_of_one_constant_token_changes_nothing(tiny):
    mute = DraftModel(fakes.constant(tiny.target), NODES)
    run = runs.generate(tiny.target, mute, tiny.batch)
    runs.assert_same_ids(tiny.plain, run.ids)
    written = sum(row[1:].count(0) for row in tiny.plain.run.ids)
    assert 0 < int(run.state.statistics.accepted.sum()) <= written


@pytest.fixture(scope="module")
def table():
    """A table target of two windowed layers, over three blocks of cache.

    The plain run has one array a layer, as on a CPU; the drafted runs a stacked cache.
    """
    windows = (None, 6, 6)
    target = fakes.TableModel.random(12, seed=0, scale=3.0, windows=windows)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 12, n).tolist() for n in (1, 2, 17, 24)]
    batch = runs.Batch(prompts, new=252, capacity=280)
    plain = runs.plain(target, Autoregressive(), batch, blocks=())
    return dataclasses.replace(target, stacked=True), plain


def test_a_table_model_writes_what_its_table_says(table):
    target, plain = table
    texts = [target.greedy_text(prompt, 252) for prompt in plain.run.batch.prompts]
    runs.assert_same_ids(plain, texts)


def test_fifty_rounds_are_fully_accepted_where_draft_and_target_are_one(table):
    target, plain = table
    run = runs.generate(target, DraftModel(target, NODES), plain.run.batch)
    runs.assert_same_ids(plain, run.ids)
    assert len({token for row in run.ids for token in row}) >= 8
    statistics = run.state.statistics
    assert (np.asarray(statistics.rounds) >= 50).all()
    np.testing.assert_array_equal(statistics.accepted, statistics.drafted)


def test_a_table_model_that_reads_through_the_cache_is_exact(table):
    target, plain = table
    near = DraftModel(target.near(seed=1, noise=0.7), NODES)
    run = runs.generate(target, near, plain.run.batch)
    runs.assert_same_ids(plain, run.ids)
    accepted = np.asarray(run.state.statistics.accepted).sum(axis=0)
    rounds = int(run.state.statistics.rounds.sum())
    print(f"rounds {rounds}, accepted by depth {accepted}")
    assert accepted[-1] > 20 and rounds - accepted[0] > 20


def oracle(tiny, rows=range(16), nodes=NODES, draft=None, forced=True):
    inner = DraftModel(tiny.draft if draft is None else draft, nodes)
    text = jnp.asarray(np.asarray(tiny.plain.run.state.tokens)[list(rows)])
    return fakes.Oracle(inner, text, jnp.array(forced), jnp.int32(0))


@pytest.mark.parametrize("forced", [True, False])
def test_a_prompt_in_pieces_is_a_prompt_in_one(tiny, forced):
    pieces = tiny.batch._replace(chunk=17)
    run = runs.generate(tiny.target, oracle(tiny, forced=forced), pieces)
    runs.assert_same_ids(tiny.plain, run.ids)


def test_a_row_alone_writes_what_it_writes_in_a_batch(tiny):
    """BL-06, BL-35: sixteen rows of unequal length that accept unequal counts."""
    for row in range(16):
        alone = tiny.batch.rows([row])
        ids = runs.generate(tiny.target, oracle(tiny, [row]), alone).ids
        runs.assert_same_ids(tiny.plain, ids, [row])


@pytest.mark.full
@pytest.mark.parametrize("size", range(2, 9))
def test_any_batch_size_writes_the_same(tiny, size):
    for first in range(0, 16 - size + 1, size):
        rows = list(range(first, first + size))
        run = runs.generate(tiny.target, oracle(tiny, rows), tiny.batch.rows(rows))
        runs.assert_same_ids(tiny.plain, run.ids, rows)
        accepted = np.asarray(run.state.statistics.accepted)
        assert len({tuple(each) for each in accepted}) > 1


DRAFTS = {
    "draft": lambda tiny, k: DraftModel(tiny.draft, k),
    "draft is target": lambda tiny, k: DraftModel(tiny.target, k),
    "constant": lambda tiny, k: DraftModel(fakes.constant(tiny.target), k),
    "lookup": lambda tiny, k: PromptLookup(k, min_ngram=1),
    "oracle": lambda tiny, k: oracle(tiny, nodes=k),
    "oracle, draft is target": lambda tiny, k: oracle(tiny, nodes=k, draft=tiny.target),
}


@pytest.mark.full
@pytest.mark.parametrize("nodes", range(1, 7))
@pytest.mark.parametrize("name", DRAFTS)
def test_every_drafter_and_every_k_is_exact(tiny, name, nodes):
    """BL-01: all prompt lengths are rows of one batch."""
    run = runs.generate(tiny.target, DRAFTS[name](tiny, nodes), tiny.batch)
    runs.assert_same_ids(tiny.plain, run.ids)
    np.testing.assert_array_equal(run.state.cache.length + 1, run.state.length)
    if name == "draft is target":
        statistics = run.state.statistics
        np.testing.assert_array_equal(statistics.accepted, statistics.drafted)


def test_garbage_past_the_length_and_in_other_slots_changes_no_bit(tiny, monkeypatch):
    batch = tiny.batch._replace(new=24, temperature=[0.0, 1.0] * 8)
    drafter = oracle(tiny, forced=False)
    clean = runs.generate(tiny.target, drafter, batch).state

    fakes.soil(monkeypatch)
    soiled = runs.generate(tiny.target, drafter, batch, runs.programs()).state
    past = np.asarray(jax.tree.leaves(soiled.cache.groups)[0])[:, :, :, :, -1]
    assert (past == np.float32(fakes.GARBAGE)).all()
    runs.assert_same_texts_and_caches(clean, soiled)


def test_a_difference_is_reported_with_its_place_and_its_gap(tiny):
    ids = [list(row) for row in tiny.plain.run.ids]
    ids[3][11] = (ids[3][11] + 1) % 64
    gap = tiny.plain.gaps[3][11]
    with pytest.raises(
        AssertionError, match="row 3 differs first at new token 11"
    ) as e:
        runs.assert_same_ids(tiny.plain, ids)
    assert f"gap there is {gap:.2e} (no near tie" in str(e.value)
    ids[3] = ids[3][:5]
    with pytest.raises(AssertionError, match="row 3: 5 tokens instead of 64"):
        runs.assert_same_ids(tiny.plain, ids)


def test_a_run_near_a_tie_proves_nothing(tiny):
    shaky = tiny.plain._replace(delta=min(gap.min() for gap in tiny.plain.gaps) / 5)
    with pytest.raises(AssertionError, match="near tie"):
        runs.assert_same_ids(shaky, shaky.run.ids)
