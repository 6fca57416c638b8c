"""Where a text ends: EOS, the limit, the room left; all in one place of the loop."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from jaxspec.decoding.state import EOS, LENGTH
from jaxspec.drafters.autoregressive import Autoregressive
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.prompt_lookup import PromptLookup
from tests import fakes, runs

NODES = 4


@pytest.fixture(scope="module")
def itself(tiny):
    """The target as its own draft: every round is fully accepted."""
    return DraftModel(tiny.target, NODES)


def cut_after(ids, eos):
    ends = [place for place, token in enumerate(ids) if token in eos]
    return ids[: ends[0] + 1] if ends else ids


def assert_cut(run, plain, eos):
    finish = np.asarray(run.state.finish)
    for row, ids in enumerate(plain.run.ids):
        wanted = cut_after(ids, eos)
        assert run.ids[row] == wanted
        assert finish[row] == (EOS if wanted[-1] in eos else LENGTH)
        assert not set(wanted[:-1]) & set(eos)


def test_eos_ends_the_text_at_each_offset_of_a_block(tiny, itself):
    met = dict.fromkeys(["prefill", *range(NODES + 1)], 0)
    for eos in range(0, 64, 2):
        run = runs.generate(tiny.target, itself, tiny.batch._replace(eos=[eos]))
        assert_cut(run, tiny.plain, {eos})
        for ids in run.ids:
            # Token 0 is prefill's; then come blocks of NODES accepted and one bonus.
            if ids[-1] == eos:
                place = len(ids) - 1
                met["prefill" if place == 0 else (place - 1) % (NODES + 1)] += 1
    print(f"offsets met: {met}")
    assert min(met.values()) >= 3


def test_a_cut_round_counts_what_it_emits(tiny, itself):
    for eos in range(0, 64, 16):
        run = runs.generate(tiny.target, itself, tiny.batch._replace(eos=[eos]))
        statistics = run.state.statistics
        for row, ids in enumerate(run.ids):
            in_rounds = len(ids) - 1
            full, rest = divmod(in_rounds, NODES + 1)
            by_depth = [full + (depth < rest) for depth in range(NODES)]
            assert statistics.accepted[row].tolist() == by_depth
            assert statistics.drafted[row].tolist() == by_depth
            assert int(statistics.rounds[row]) == full + (rest > 0)


def test_any_of_several_eos_ids_ends_the_text(tiny, itself):
    rows = Counter(token for ids in tiny.plain.run.ids for token in set(ids))
    eos = [token for token, _ in rows.most_common(3)]
    run = runs.generate(tiny.target, itself, tiny.batch._replace(eos=eos))
    assert_cut(run, tiny.plain, set(eos))
    assert {ids[-1] for ids in run.ids} >= set(eos)


def test_without_an_eos_id_nothing_stops_the_text(tiny, itself):
    run = runs.generate(tiny.target, itself, tiny.batch._replace(eos=()))
    runs.assert_same_ids(tiny.plain, run.ids)
    assert (np.asarray(run.state.finish) == LENGTH).all()


def test_no_more_is_written_than_the_room_left(tiny, itself):
    """BL-07: prompts that leave 5 slots down to 1, and far more tokens wanted."""
    capacity = tiny.batch.capacity
    rng = np.random.default_rng(1)
    room = [5, 4, 3, 2, 1, 6, 9, 7] * 2
    prompts = [rng.integers(0, 64, capacity - left).tolist() for left in room]
    batch = runs.Batch(prompts, new=50)
    plain = runs.plain(tiny.target, Autoregressive(), batch, blocks=(5, capacity))
    assert [len(ids) for ids in plain.run.ids] == room
    for state in runs.rounds(tiny.target, itself, batch):
        np.testing.assert_array_equal(state.cache.length + 1, state.length)
        assert (np.asarray(state.length) <= capacity).all()
    runs.assert_same_ids(plain, runs.Run(batch, state).ids)
    assert (np.asarray(state.length) == capacity).all()
    assert (np.asarray(state.finish) == LENGTH).all()


def test_a_row_without_room_or_request_is_inert(tiny, itself):
    rng = np.random.default_rng(2)
    full = rng.integers(0, 64, tiny.batch.capacity).tolist()
    prompts = [[5], [6, 7], full[:-1], full] * 4
    batch = runs.Batch(prompts, new=[0, 20, 0, 20] * 4)
    run = runs.generate(tiny.target, itself, batch)
    assert [len(ids) for ids in run.ids] == [0, 20, 0, 0] * 4
    idle = [0, 2, 3]
    for leaf in run.state.statistics:
        assert (np.asarray(leaf)[idle] == 0).all()
    assert (np.asarray(run.state.finish) == LENGTH).all()
    np.testing.assert_array_equal(np.asarray(run.state.tokens)[3], full)


@pytest.fixture(scope="module")
def table():
    target = fakes.TableModel.random(12, seed=3, scale=3.0)
    return target, PromptLookup(NODES, min_ngram=2)


def test_eos_inside_a_looked_up_ngram_ends_the_text(table):
    """The prompt holds its own continuation, then its own beginning once more."""
    target, lookup = table
    rng = np.random.default_rng(3)
    beginnings = [rng.integers(0, 12, 3).tolist() for _ in range(16)]
    batch = runs.Batch(beginnings, new=12)
    follow = runs.generate(target, Autoregressive(), batch).ids
    prompts = [[*a, *b, *a] for a, b in zip(beginnings, follow, strict=True)]
    again = runs.generate(target, Autoregressive(), batch._replace(prompts=prompts)).ids
    assert again == follow
    met = np.zeros(NODES, int)
    for eos in range(12):
        ended = batch._replace(prompts=prompts, eos=[eos])
        run = runs.generate(target, lookup, ended)
        assert run.ids == [cut_after(ids, {eos}) for ids in follow]
        for row, length in enumerate(np.asarray(run.state.length)):
            place = length - len(prompts[row]) - 1
            looked_up = bool(run.state.from_draft[row, length - 1])
            if run.ids[row][-1] == eos and looked_up and 1 <= place <= NODES:
                met[place - 1] += 1
    print(f"offsets met: {met}")
    assert (met >= 2).all()


def test_lookup_writes_no_more_than_asked(table):
    """BL-24."""
    target, lookup = table
    # The first token repeats the prompt, so that the first round has a draft.
    logits = target.table.at[6 % 3, 1 + 5, 6, 7].set(99.0)
    target = dataclasses.replace(target, table=logits)
    batch = runs.Batch([[5, 6, 7, 8, 9, 5, 6]] * 16, new=range(1, 17))
    run = runs.generate(target, lookup, batch)
    assert run.ids == runs.generate(target, Autoregressive(), batch).ids
    assert [len(ids) for ids in run.ids] == [*range(1, 17)]
    assert int(run.state.statistics.drafted[1].sum()) > 0


def test_a_prompt_shorter_than_the_ngram_is_decoded_plainly(table):
    target, lookup = table
    batch = runs.Batch([[first % 12] for first in range(16)], new=20)
    first, second, *_, last = runs.rounds(target, lookup, batch)
    assert int(second.statistics.drafted.sum()) == 0
    assert (np.asarray(second.length - first.length) == 1).all()
    plain = runs.generate(target, Autoregressive(), batch)
    assert runs.Run(batch, last).ids == plain.ids
