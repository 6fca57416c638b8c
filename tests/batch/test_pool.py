"""A row of a pool knows nothing of its neighbours, nor of the row before it."""

import functools

import numpy as np
import pytest

from jaxspec.batch.pool import Pool
from jaxspec.decoding.loop import decode
from jaxspec.decoding.replace import replace_row
from jaxspec.decoding.state import ERROR, LENGTH
from jaxspec.programs import Program
from tests.batch import pools
from tests.batch.pools import ROWS, drain, make_entries

NAN = float("nan")
pytestmark = [
    pytest.mark.usefixtures("cheap"),
    pytest.mark.filterwarnings("ignore:the drafter's first tokens"),
]
cheap = pools.cheap


@pytest.fixture(scope="module")
def target():
    # What a second layer keeps depends on all that the first one reads.
    return pools.target_model(layers=2)


def make_pool(target, kind, temperature=1.0):
    (sample,) = make_entries(target, [[0]], temperature=temperature)
    return Pool(pools.make_generator(target, kind), ROWS, sample.request)


@pytest.fixture(scope="module")
def drafting(cheap, target):
    return make_pool(target, "draft")


@pytest.fixture(scope="module")
def entries(target):
    """Four of more tokens than one dispatch may write, and one that is longer."""
    return make_entries(
        target,
        pools.make_prompts((9, 14, 3, 11, 16), seed=1),
        seed=[5, 6, 7, 8, 9],
        max_new_tokens=[60, 60, 60, 60, 200],
        temperature=1.0,
    )


@pytest.fixture(scope="module")
def clean(drafting, entries):
    """What the four leave in rows that had none before them."""
    return drain(drafting, entries[:4])


def test_a_row_is_the_same_whoever_runs_beside_it(drafting, entries, clean):
    assert [clean[index].row for index in range(4)] == [0, 1, 2, 3]
    assert len({tuple(left.ids) for left in clean.values()}) == 4
    # One after the other, so that each is alone, and in row 0.
    for index in range(4):
        left = drain(drafting, [entries[index]])[index]
        assert left.row == 0
        left.assert_same(clean[index])
    # In another order, and with a long one that was there before.
    drafting.put([entries[4]])
    assert list(drafting.run()) == []
    mixed = drain(drafting, [entries[index] for index in (3, 2, 1, 0)])
    assert [mixed[index].row for index in (3, 2, 1)] == [1, 2, 3]
    for index in range(4):
        mixed[index].assert_same(clean[index])


def test_a_text_that_differs_is_seen(drafting, entries, clean):
    """What the tests here compare does depend on the request."""
    other = entries[0]._replace(index=1)
    with pytest.raises(AssertionError):
        drain(drafting, [other])[1].assert_same(clean[1])


@pytest.mark.parametrize("row", [0, 3])
def test_nothing_of_a_poisoned_row_is_left(drafting, entries, clean, row):
    drafting.put([entries[4]])
    for index in range(1, 4):
        drafting.put([entries[index]])
    assert next(drafting.run(), None) is None
    pools.spoil(drafting, row, NAN)
    poisoned = 4 if row == 0 else 3
    assert [entry.index for entry, *_ in drafting.run()] == [poisoned]
    assert pools.left_in(drafting._state, row).finish == ERROR
    # What no distribution is made of may not be left either, such as counts.
    pools.spoil(drafting, row, NAN, whole=1)
    drafting.put([entries[0]])
    assert drafting.entries[row] is entries[0]
    left = drain(drafting)
    for index in {0, 1, 2, 3} - {poisoned}:
        assert left[index].finish == LENGTH
        left[index].assert_same(clean[index])


KEPT = ("cache", "drafter", "statistics", "keys", "from_draft")


@pytest.mark.parametrize("name", KEPT)
def test_a_part_that_stays_is_seen(drafting, entries, clean, name, monkeypatch):
    """Negative control: the test above fails if one part of the old row stays."""

    def forgetful(model, drafter, state, fresh, row, wanted):
        whole = replace_row(model, drafter, state, fresh, row, wanted)
        return whole._replace(**{name: getattr(state, name)})

    drain(drafting, [entries[1]])
    pools.spoil(drafting, 0, NAN, whole=1)
    monkeypatch.setattr(drafting, "_replace", Program(forgetful, donate=(2,)))
    left = drain(drafting, [entries[0]])
    with pytest.raises(AssertionError):
        left[0].assert_same(clean[0])


@pytest.fixture(scope="module")
def looking(cheap, target):
    return make_pool(target, "prompt-lookup")


def silent_and_drafting(target):
    """A text in which nothing recurs, and three in which much is to be found."""
    long = pools.make_prompts((500, 1, 450, 1, 400), seed=2)[::2]
    return make_entries(
        target,
        [[*range(16)], *long],
        seed=[1, 2, 3, 4],
        max_new_tokens=[20, 60, 60, 60],
        temperature=1.0,
    )


def alone_and_beside(pool, entries):
    alone = drain(pool, entries[:1])[0]
    beside = drain(pool, entries)
    # Counts are rounds, emitted, drafted by depth, accepted by depth.
    assert not any(alone.counts[2])
    assert all(any(beside[index].counts[2]) for index in (1, 2, 3))
    return alone, beside[0]


def test_a_neighbours_draft_changes_no_bit(looking, target):
    alone, beside = alone_and_beside(looking, silent_and_drafting(target))
    beside.assert_same(alone)


def test_with_one_token_rounds_it_would(looking, target, monkeypatch):
    """Negative control: then neighbours decide by which shape a row is computed."""
    rounds = Program(functools.partial(decode, one_token_rounds=True), donate=(2,))
    monkeypatch.setattr(looking, "_rounds", rounds)
    alone, beside = alone_and_beside(looking, silent_and_drafting(target))
    assert not all(map(np.array_equal, alone.committed, beside.committed))


def test_a_full_pool_takes_no_more(drafting, entries):
    assert drafting.parts == 1
    with pytest.raises(ValueError, match="2 requests for 1 free parts"):
        drafting.put(entries[:2])
    for entry in entries[:4]:
        assert drafting.free_parts() == [0]
        drafting.put([entry])
    assert drafting.free_parts() == [] and drafting.running == ROWS
    with pytest.raises(ValueError, match="1 requests for 0 free parts"):
        drafting.put(entries[4:])
    assert len(drain(drafting)) == 4
