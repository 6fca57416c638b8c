"""A row of a running pool writes what it writes alone; none waits for a long one."""

import dataclasses

import numpy as np
import pytest

from jaxspec.batch.inputs import Item
from jaxspec.batch.pool import ROUNDS, signature
from jaxspec.batch.runner import Runner
from jaxspec.requests import make_requests
from tests.batch import pools
from tests.batch.pools import CAPACITY, ROWS, items
from tests.executions import counting

SEED = 7
# Of five widths of the last piece, and one of two pieces.
LENGTHS = (1, 300, 12, 2, 40, 16, 520, 7, 33, 260, 3, 64, 15, 299, 9, 5, 50, 1, 280, 14)
# Some end in the first rounds, the others at many times.
MOST = [3 + 13 * index % 40 for index in range(len(LENGTHS))]
# The same widths, and no length twice.
OTHERS = (4, 290, 13, 36, 527, 62, 270, 6)
pytestmark = [
    pytest.mark.usefixtures("cheap"),
    pytest.mark.filterwarnings("ignore:the drafter's first tokens"),
]
cheap = pools.cheap


@pytest.fixture(scope="module")
def plain(cheap):
    return pools.make_generator(pools.target_model(), "none")


@pytest.fixture(
    scope="module",
    params=[
        "draft",
        "prompt-lookup",
        pytest.param("early-exit:1", marks=pytest.mark.full),
    ],
)
def generator(request, cheap):
    target = pools.target_model(layers=2 if "exit" in request.param else 1)
    return pools.make_generator(target, request.param)


class Uneven(Runner):
    """Of which each prompt writes a number of tokens of its own."""

    def __init__(self, *arguments, most, **options):
        super().__init__(*arguments, **options)
        self.most = most

    def _request(self, item):
        request = super()._request(item)
        return dataclasses.replace(request, max_new_tokens=self.most[item.index])


def run(generator, prompts, **options):
    """The records in the order in which they ended, and the runner."""
    runner = Uneven(generator, ROWS, SEED, most=MOST, **options)
    return list(runner.run(items(prompts))), runner


def by_index(records):
    assert len({record["index"] for record in records}) == len(records)
    return sorted(records, key=lambda record: record["index"])


def alone(generator, prompts, seed=SEED, **options):
    return [
        generator.generate(prompt, max_new_tokens=most, seed=seed + at, **options)
        for at, (prompt, most) in enumerate(zip(prompts, MOST, strict=False))
    ]


def differences(records, results):
    pairs = zip(by_index(records), results, strict=True)
    return [
        record["index"]
        for record, result in pairs
        if record["token_ids"] != result.token_ids
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_writes_what_it_writes_alone(generator, temperature):
    prompts = pools.make_prompts(LENGTHS, seed=3)
    records, runner = run(generator, prompts, temperature=temperature)
    results = alone(generator, prompts, temperature=temperature)
    assert differences(records, results) == []
    for record, result in zip(by_index(records), results, strict=True):
        assert record["prompt"] == result.prompt
        assert record["finish_reason"] == result.finish_reason == "length"
        assert record["stats"].items() <= dataclasses.asdict(result.stats).items()
    drafted = [result.stats.drafted for result in results]
    assert runner.drafted == sum(drafted) and len(set(drafted)) > 3
    assert runner.accepted == sum(result.stats.accepted for result in results)
    assert runner.tokens == sum(MOST)
    # Rows were replaced out of order, as they ended.
    assert [record["index"] for record in records] != [*range(len(prompts))]
    if temperature == 0:
        texts = [p + r.token_ids for p, r in zip(prompts, results, strict=True)]
        gap, delta = pools.tie_of(generator.target, texts, LENGTHS)
        print(f"smallest top-two gap met: {gap:.2e}; delta: {delta:.2e}")
        assert gap > 10 * delta
        return
    # The seed of another index is another text.
    moved = alone(generator, prompts[:5], SEED + 1, temperature=temperature)
    assert differences(by_index(records)[:5], moved) == [0, 1, 2, 3, 4]


def test_more_prompts_compile_nothing_more(generator):
    prompts = pools.make_prompts(LENGTHS, seed=3)
    _, runner = run(generator, prompts, temperature=1.0)
    first, later, rounds, replace = runner.pool.programs
    shapes = {
        signature(request) for request in make_requests(generator.target, prompts)
    }
    assert len(shapes) == 4 and max(shapes)[0] == 2
    # A prompt of two pieces begins as one of the widest piece does.
    assert (first.compilations, later.compilations) == (3, 1)
    assert (rounds.compilations, replace.compilations) == (1, 1)
    assert replace.dispatches == len(prompts)

    def dispatches():
        return sum(program.dispatches for program in runner.pool.programs)

    before = dispatches()
    with counting() as counts:
        more = list(runner.run(items(pools.make_prompts(OTHERS, seed=4))))
    assert len(more) == len(OTHERS)
    assert counts.compilations == 0
    # Nor is there an operation beside the programs.
    assert counts.executions == dispatches() - before > len(OTHERS)


def dispatches_in_batches(most):
    """What one batch after the other would take, each as long as its longest row."""
    batches = [most[at : at + ROWS] for at in range(0, len(most), ROWS)]
    return sum(-(-(max(batch) - 1) // ROUNDS) for batch in batches)


# One dispatch for each short one, 25 for a long one: prefill writes the first token.
LONG, SHORT = 25 * ROUNDS + 1, ROUNDS + 1
WORK = {
    "one long row among many short ones": ([LONG] + [SHORT] * 69, 1),
    # The last of them begins after six short ones on two rows and twice as many on one.
    "the long ones one in each batch": (([LONG] + [SHORT] * 3) * 4, 6),
}


@pytest.mark.parametrize("most, late", WORK.values(), ids=WORK)
def test_a_long_row_does_not_hold_the_others(plain, most, late):
    runner = Uneven(plain, ROWS, SEED, most=most)
    records = list(runner.run(items([[5, 6, 7]] * len(most))))
    assert [len(record["token_ids"]) for record in by_index(records)] == most
    longest, found = (LONG - 1) // ROUNDS, runner.pool.programs[2].dispatches
    print(f"{found} dispatches; {longest} of the longest row alone")
    assert longest <= found <= longest + late
    assert dispatches_in_batches(most) > 1.6 * found


def test_what_is_wrong_is_a_record_and_the_others_go_on(plain):
    long = [1] * CAPACITY
    given = [
        Item(0, [1, 2], None),
        Item(1, None, "in.jsonl line 2: not JSON"),
        Item(2, [1, 99], None),
        Item(3, long, None),
        Item(4, [], None),
        Item(5, "text", None),
        Item(6, [3], None),
    ]
    runner = Runner(plain, ROWS, SEED, max_new_tokens=4)
    records = by_index(list(runner.run(given)))
    assert [record["finish_reason"] for record in records] == [
        *("length", *["error"] * 5, "length")
    ]
    for record, part in zip(
        records[1:6],
        (
            "in.jsonl line 2: not JSON",
            "prompt 2: id 99 is outside the 64 known ids",
            f"prompt 3 has {CAPACITY} tokens, but a capacity of {CAPACITY} takes at",
            "prompt 4 is empty",
            "prompt 5: tiny has no tokenizer",
        ),
        strict=True,
    ):
        assert part in record["error"]
        assert record["token_ids"] == [] and record["stats"] is None
    assert [record["prompt"] for record in records[2:4]] == [[1, 99], long]
    expected = plain.generate([3], max_new_tokens=4, seed=SEED + 6)
    assert records[6]["token_ids"] == expected.token_ids


def test_nothing_to_do_runs_nothing(plain):
    before = [program.dispatches for program in plain.programs]
    runner = Runner(plain, ROWS, SEED)
    assert list(runner.run([])) == []
    (record,) = runner.run([Item(0, None, "bad")])
    assert record["error"] == "bad"
    assert [program.dispatches for program in plain.programs] == before
    assert [program.dispatches for program in runner.pool.programs[2:]] == [0, 0]
    assert not np.asarray(runner.pool._state.active).any()
