"""Stop sequences of ids: one boundary with EOS, length and errors, on the device.

What a row must write is its text without stops, cut on the host.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.batching import pack_sequences
from jaxspec.core.sampling import Sampling
from jaxspec.decoding.boundary import emit
from jaxspec.decoding.state import (
    EOS,
    ERROR,
    LENGTH,
    RUNNING,
    STOP,
    DecodingState,
    Options,
)
from jaxspec.drafters.autoregressive import Autoregressive
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.types import Verdict
from tests import fakes, runs

VOCAB, NODES, NEW, ROWS, CAPACITY = 12, 4, 24, 16, 40
TARGET = fakes.TableModel.random(VOCAB, seed=5, scale=2.0, windows=(None,))
rng = np.random.default_rng(3)
# One prompt repeats itself; sampled rows under `coupled` are plain decoding's too.
PROMPTS = [rng.integers(0, VOCAB, n).tolist() for n in (1, 2, 5, 8) * 4]
BATCH = runs.Batch(
    PROMPTS, new=NEW, temperature=[0.0, 1.0, 1.0, 1.0] * 4, capacity=CAPACITY, chunk=8
)
# Stands in every row, so that there is one shape of sequences; no text holds it.
NEVER = [[VOCAB] * 4]
PLAIN = Autoregressive()
ITSELF = DraftModel(TARGET, NODES)


def run_of(drafter, stops=None, batch=BATCH, least=0, eos=(), rule="coupled"):
    """Every call is the same program of its drafter and rule."""
    stops = [own + NEVER for own in (stops or [[]] * ROWS)]
    batch = batch._replace(
        options={"min_new_tokens": np.broadcast_to(np.int32(least), ROWS)},
        eos=sorted(eos),
        stops=pack_sequences(stops, ROWS),
        rule=rule,
    )
    return runs.generate(TARGET, drafter, batch)


@pytest.fixture(scope="module")
def free():
    """The text of every row without any stop."""
    texts = run_of(PLAIN).ids
    assert run_of(ITSELF).ids == texts
    assert len({token for ids in texts for token in ids}) >= 8
    return texts


def cut(ids, stops, eos=(), least=0):
    """The text up to its first event, and which it is; of two at one token EOS."""
    for end in range(1, len(ids) + 1):
        if ids[end - 1] in eos:
            return ids[:end], EOS
        if end >= least and any(ids[max(0, end - len(s)) : end] == s for s in stops):
            return ids[:end], STOP
    return ids, LENGTH


def assert_cut(run, texts, stops, eos=(), least=0):
    finish = np.asarray(run.state.finish)
    for row, ids in enumerate(texts):
        wanted, reason = cut(ids, stops[row], eos, least)
        assert (run.ids[row], finish[row]) == (wanted, reason), f"row {row}"


def of_each(texts, start, length):
    """For each row the ids at a place of its own text, as its one stop sequence."""
    return [[ids[start : start + length]] for ids in texts]


def offset(place):
    """Where a token stands in a block of ITSELF: NODES accepted ones and a bonus."""
    return "prefill" if place == 0 else (place - 1) % (NODES + 1)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_sequence_ends_the_text_at_each_offset_of_a_block(free, length):
    ends, begins = set(), set()
    for start in range(NEW - length + 1):
        stops = of_each(free, start, length)
        run = run_of(ITSELF, stops)
        assert_cut(run, free, stops)
        for ids in run.ids:
            ends.add(offset(len(ids) - 1))
            # It ends in a later block than it begins.
            if length > 1 and offset(len(ids) - 1) in range(length - 1):
                begins.add(offset(len(ids) - length))
    assert ends >= set(range(NODES + 1)) and ("prefill" in ends) == (length == 1)
    assert begins >= set(range(NODES + 2 - length, NODES + 1)) or length == 1


def test_a_sequence_may_lie_in_several_rounds(free):
    """A draft that is mostly wrong writes one token a round, as plain decoding does."""
    wrong = DraftModel(dataclasses.replace(TARGET, table=-TARGET.table), NODES)
    for start in (0, 1, 7, 12):
        stops = of_each(free, start, 4)
        assert_cut(run_of(PLAIN, stops), free, stops)
        run = run_of(wrong, stops)
        assert_cut(run, free, stops)
        accepted = np.asarray(run.state.statistics.accepted).sum(axis=1)
        # Nearly all rows wrote each of the four ids in a round of its own.
        assert (accepted == 0).sum() >= ROWS // 2


def test_the_sequence_that_is_complete_first_wins(free):
    # The first begins earlier, the second ends earlier; the third comes much later.
    stops = [[ids[4:8], ids[5:7], ids[15:16] + ids[16:17]] for ids in free]
    run = run_of(ITSELF, stops)
    assert_cut(run, free, stops)
    assert any(len(ids) == 7 for ids in run.ids)
    backwards = [own[::-1] for own in stops]
    assert run_of(ITSELF, backwards).ids == run.ids
    # Of two that end together it does not matter which.
    both = [[ids[4:8], ids[6:8]] for ids in free]
    assert_cut(run_of(ITSELF, both), free, both)


def test_a_sequence_does_not_begin_in_the_prompt(free):
    stops = [
        [[*prompt[-2:], *ids[:2]]] for prompt, ids in zip(PROMPTS, free, strict=True)
    ]
    inside = [[prompt[-3:]] for prompt in PROMPTS]
    for each in (stops, inside):
        run = run_of(ITSELF, each)
        assert_cut(run, free, each)
        assert max(map(len, run.ids)) == NEW
    # As it does where the same ids are all output.
    ended = [
        [[*prompt[-1:], *ids[:1]][1:]]
        for prompt, ids in zip(PROMPTS, free, strict=True)
    ]
    assert all(len(ids) == 1 for ids in run_of(ITSELF, ended).ids)


def test_rows_have_their_own_sequences_or_none(free):
    stops = [[ids[5:7]] if row % 2 else [] for row, ids in enumerate(free)]
    run = run_of(ITSELF, stops)
    assert_cut(run, free, stops)
    assert (
        {len(ids) for ids in run.ids[::2]} == {NEW} != {len(i) for i in run.ids[1::2]}
    )


def test_eos_before_a_stop_and_a_stop_before_eos(free):
    met = []
    for eos in range(VOCAB):
        for start in (2, 9):
            stops = of_each(free, start, 2)
            stops[::4] = [[]] * 4
            run = run_of(ITSELF, stops, eos=[eos])
            assert_cut(run, free, stops, {eos})
            met += np.asarray(run.state.finish).tolist()
    assert min(met.count(reason) for reason in (EOS, STOP, LENGTH)) >= 20


def test_before_min_new_tokens_no_sequence_ends_the_text(free):
    """An id that ends a row by itself is even impossible; a longer one is passed by."""
    stops = of_each(free, 3, 2)
    for least in (5, 6, 20, NEW):
        run = run_of(ITSELF, stops, least=least)
        assert_cut(run, free, stops, least=least)
        assert min(map(len, run.ids)) >= least
    single = of_each(free, 3, 1)
    plain = run_of(PLAIN, single, least=9)
    run = run_of(ITSELF, single, least=9)
    assert run.ids == plain.ids and min(map(len, run.ids)) >= 9
    for ids, [[stop]] in zip(run.ids, single, strict=True):
        assert stop not in ids[:9]
        # From the token after on it may come, and ends the row.
        assert stop not in ids[9:-1]
    eos = {free[0][3], free[1][2]}
    plain = run_of(PLAIN, least=[0, 4] * 8, eos=eos)
    assert run_of(ITSELF, least=[0, 4] * 8, eos=eos).ids == plain.ids
    assert not any(eos & set(ids[:4]) for ids in plain.ids[1::2])


@pytest.mark.parametrize("drafter", [ITSELF, DraftModel(TARGET.near(1, 1.0), NODES)])
def test_a_cut_round_counts_as_one_cut_by_the_limit(free, drafter):
    """DESIGN 2: whatever the boundary, accepted and drafted end with the row."""
    cuts = 0
    for start in range(0, NEW - 2, 5):
        stops = of_each(free, start, 2)
        stopped = run_of(drafter, stops)
        lengths = [len(ids) for ids in stopped.ids]
        limited = run_of(drafter, batch=BATCH._replace(new=lengths))
        assert limited.ids == stopped.ids
        for one, other in zip(
            jax.tree.leaves((stopped.state.statistics, stopped.state.cache.length)),
            jax.tree.leaves((limited.state.statistics, limited.state.cache.length)),
            strict=True,
        ):
            np.testing.assert_array_equal(one, other)
        written = np.arange(CAPACITY) < np.asarray(stopped.state.length)[:, None]
        np.testing.assert_array_equal(
            np.asarray(stopped.state.from_draft)[written],
            np.asarray(limited.state.from_draft)[written],
        )
        statistics = stopped.state.statistics
        cuts += int((statistics.drafted.sum(1) < NODES * statistics.rounds).sum())
        # The token of prefill is no round's.
        np.testing.assert_array_equal(statistics.emitted, np.array(lengths) - 1)
    assert cuts >= ROWS


# Of one row: what a round emits, how much of it, and what ends the row where.
A, B, C, E = 1, 2, 3, 9
CASES = {
    "nothing": ([A, B, C], {}, 3, RUNNING),
    "eos": ([A, E, C], {}, 2, EOS),
    "stop": ([A, B, C], {"stops": [[B]]}, 2, STOP),
    "eos, then stop": ([E, B, C], {"stops": [[B]]}, 1, EOS),
    "stop, then eos": ([B, E, C], {"stops": [[B]]}, 1, STOP),
    "eos that is a stop": ([A, E, C], {"stops": [[E], [A, E]]}, 2, EOS),
    "length": ([A, B, C], {"room": 2}, 2, LENGTH),
    "length and eos": ([A, E, C], {"room": 2}, 2, EOS),
    "length and stop": ([A, B, C], {"room": 2, "stops": [[A, B]]}, 2, STOP),
    "length before stop": ([A, B, C], {"room": 2, "stops": [[C]]}, 2, LENGTH),
    "error": ([A, B, C], {"failed": True}, 2, ERROR),
    "error at once": ([A], {"failed": True}, 0, ERROR),
    "error and eos": ([A, E, C], {"failed": True}, 2, EOS),
    "error and stop": ([A, B, C], {"failed": True, "stops": [[B]]}, 2, STOP),
    "error and length": ([A, B, C], {"failed": True, "room": 2}, 2, LENGTH),
    "length before error": ([A, B, C], {"failed": True, "room": 1}, 1, LENGTH),
    "stop before error": ([A, B, C], {"failed": True, "stops": [[A]]}, 1, STOP),
    "eos drawn from nothing": ([A, E], {"failed": True}, 1, ERROR),
    "stop drawn from nothing": ([A, B], {"failed": True, "stops": [[B]]}, 1, ERROR),
    "first of two stops": ([A, B, C], {"stops": [[C], [B]]}, 2, STOP),
    "begun in the last round": ([A, B], {"output": [C], "stops": [[C, A]]}, 1, STOP),
    "begun long ago": ([A], {"output": [B, B, C], "stops": [[B, C, A]]}, 1, STOP),
    "begun in the prompt": ([A, B], {"prompt": [C], "stops": [[C, A]]}, 2, RUNNING),
    "too early": ([A, B, C], {"stops": [[A], [B]], "least": 2}, 2, STOP),
    "too early by output": (
        [A],
        {"output": [B], "stops": [[A]], "least": 3},
        1,
        RUNNING,
    ),
    "inactive": ([A, E], {"finish": STOP}, 0, STOP),
    "inactive and failed": ([A, E], {"finish": EOS, "failed": True}, 0, EOS),
}


emit_jitted = jax.jit(emit)


def emit_one(
    emitted,
    output=(),
    prompt=(),
    room=99,
    failed=False,
    finish=RUNNING,
    stops=(),
    least=0,
):
    """One row through the boundary; all cases share one program."""
    text = [*prompt, 7, *output]
    one = lambda value: np.array([value], np.int32)  # noqa: E731
    # Past the end of the text stands what would end the row.
    tokens = np.full((1, 12), E, np.int32)
    tokens[0, : len(text)] = text
    state = DecodingState(
        tokens=tokens,
        from_draft=np.zeros((1, 12), bool),
        length=one(len(text)),
        prompt_length=one(len(text) - len(output)),
        limit=one(len(text) + room),
        finish=one(finish),
        **dict.fromkeys(
            ["keys", "hidden", "cache", "drafter", "statistics", "counts", "log_probs"]
        ),
    )
    options = Options(
        Sampling(np.zeros(1, np.float32), min_new_tokens=one(least)),
        np.array([[-1, E]]),
        pack_sequences([[*stops, *NEVER]], 1),
    )
    # Past the count the next token stands again.
    padded = np.array([[*emitted, *[emitted[-1]] * (4 - len(emitted))]])
    verdict = Verdict(np.arange(4)[None], one(len(emitted)), np.zeros((1, 10), "f4"))
    return emit_jitted(state, verdict, padded, np.array([failed]), None, options)


@pytest.mark.parametrize("case", CASES)
def test_of_several_events_the_first_is_named(case):
    emitted, given, count, finish = CASES[case]
    state, verdict = emit_one(emitted, **given)
    before = len(given.get("output", ())) + len(given.get("prompt", ())) + 1
    assert (int(verdict.count[0]), int(state.finish[0])) == (count, finish)
    assert int(state.length[0]) == before + count
    written = state.tokens[0, before : before + count]
    assert written.tolist() == emitted[:count]
    # Nothing is written past the cut.
    assert (np.asarray(state.tokens)[0, before + count :] == E).all()
    from_draft = np.asarray(state.from_draft)[0, before:]
    assert from_draft.sum() == min(count, len(emitted) - 1)


def test_what_ends_a_row_by_itself_is_eos_or_a_stop_of_one_id():
    stops = pack_sequences([[[5], [6, 7]], []], 2)
    sampling = Sampling(jnp.zeros(2))
    ends = Options(sampling, jnp.array([[9, -1]] * 2), stops).ends
    assert [sorted(set(row)) for row in np.asarray(ends).tolist()] == [
        [-1, 5, 9],
        [-1, 9],
    ]
    ends = Options(sampling, jnp.array([[9, -1]] * 2)).ends
    assert np.asarray(ends).tolist() == [[9, -1]] * 2
