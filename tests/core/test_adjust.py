"""What changes the logits before the temperature: by hand and against float64 NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core.adjust import LARGEST_FLOAT, adjust
from tests import oracles
from tests.core.adjusting import (
    ALL,
    CHAIN,
    ENDS,
    INF,
    TREE,
    VOCAB,
    hand,
    history_of,
    pack,
    run,
    warped,
)


def test_a_bias_is_added():
    assert hand([1, 2, -INF, 4], logit_bias={0: 2.5, 2: 9, 3: -INF}) == [
        3.5,
        2,
        -INF,
        -INF,
    ]


def test_repetition_divides_positive_logits_and_multiplies_the_others():
    logits = [2, -2, 0, 8, -INF, -8]
    given = {"prompt": [0, 1], "output": [2], "path": [4, 0]}
    found = hand(logits, **given, repetition_penalty=2.0)
    # Once each, however often an id stands there; ids that stand nowhere are left.
    assert found == [1, -4, 0, 8, -INF, -8]
    assert hand(logits, **given, repetition_penalty=0.5) == [4, -1, 0, 8, -INF, -8]


def test_presence_and_frequency_count_the_output_alone():
    given = {"prompt": [0, 0, 1], "output": [1, 2, 2], "path": [2, 3]}
    logits = [1, 1, 1, -1, 1]
    found = hand(logits, **given, presence_penalty=0.5)
    assert found == [1, 0.5, 0.5, -1.5, 1]
    found = hand(logits, **given, frequency_penalty=0.5)
    assert found == [1, 0.5, -0.5, -1.5, 1]
    found = hand(logits, **given, frequency_penalty=-0.5, presence_penalty=1.0)
    assert found == [1, 0.5, 1.5, -1.5, 1]


BANS = {
    "one id, whatever the text": ([[2]], [], [], [], {2}),
    "one id after some text": ([[2]], [0], [1], [2], {2}),
    "two": ([[1, 2]], [0], [1], [], {2}),
    "two, not begun": ([[1, 2]], [1], [0], [], set()),
    "two within the prompt": ([[1, 2]], [0, 1], [], [], {2}),
    "two within the draft": ([[1, 2]], [0], [0], [1], {2}),
    "three": ([[0, 1, 2]], [3], [0, 1], [], {2}),
    "three over prompt and output": ([[0, 1, 2]], [3, 0], [1], [], {2}),
    "three over output and draft": ([[0, 1, 2]], [3], [3, 0], [1], {2}),
    "three over prompt and draft": ([[0, 1, 2]], [0], [], [1], {2}),
    "four over all": ([[3, 0, 1, 2]], [3], [0], [1], {2}),
    "five over all": ([[0, 3, 0, 1, 2]], [0, 3], [0], [1], {2}),
    "longer than the text": ([[1, 1, 2]], [1], [], [], set()),
    "as long as the text and one": ([[1, 1, 2]], [1], [1], [], {2}),
    "overlapping": ([[1, 1, 2], [1, 2]], [1], [1], [1], {2}),
    "several": ([[1, 2], [3], [0, 1, 0]], [0], [1], [], {0, 2, 3}),
    "itself": ([[1, 1]], [1], [], [1], {1}),
    "only its beginning": ([[1, 2, 3]], [0], [1], [], set()),
    "interrupted": ([[1, 2, 3]], [1], [0], [2], set()),
}


@pytest.mark.parametrize("case", BANS)
def test_a_banned_sequence_is_not_completed(case):
    banned, prompt, output, path, gone = BANS[case]
    found = hand([5, 5, 5, 5], prompt or [3], output, path, banned=banned)
    assert {token for token in range(4) if found[token] == -INF} == gone
    assert all(found[token] == 5 for token in set(range(4)) - gone)


def test_what_pads_a_text_or_a_sequence_is_no_token():
    # The text begins with the second id of the ban, and -1 is what comes before.
    assert hand([1, 1], [1], banned=[[0, 1, 0]]) == [1, 1]
    # Past the end of the text stands a 1, which `history_of` has put there.
    assert hand([1, 1], [0], banned=[[0, 1, 0]]) == [1, 1]
    rows = [{"banned": [[1, 2], [0]]}, {}, {"banned": [[2, 2, 2, 2, 2]]}]
    found = run(np.ones((3, 1, VOCAB)), rows, [[1]] * 3, [[]] * 3, [], np.zeros((3, 0)))
    gone = [np.flatnonzero(np.isneginf(found[row, 0])).tolist() for row in range(3)]
    assert gone == [[0, 2], [], []]


@pytest.mark.parametrize("written", range(5))
def test_before_min_new_tokens_no_id_may_end_the_row(written):
    logits, ends = [1, 2, 3, 4], (3, 1)
    for drafted in range(written + 1):
        output, path = [0] * (written - drafted), [2] * drafted
        found = hand(logits, [1, 3], output, path, ends=ends, min_new_tokens=3)
        assert found == ([1, -INF, 3, -INF] if written < 3 else logits)


def test_an_id_past_the_vocabulary_or_no_id_ends_nothing():
    found = hand([1, 2], [0], ends=(VOCAB, -1, 2**31 - 1), min_new_tokens=9)
    assert found == [1, 2]


def random_rows(rng, count):
    """Rows of every length whose texts repeat themselves, with options for each."""
    rows, prompts, outputs = [], [], []
    for _ in range(count):
        prompts.append(rng.integers(0, 5, rng.integers(1, 8)).tolist())
        outputs.append(rng.integers(0, 6, rng.integers(0, 9)).tolist())
        lengths = rng.integers(1, 6, rng.integers(0, 7))
        rows.append(
            {
                "logit_bias": {
                    int(token): float(rng.choice([-INF, -2, 1.5, 30]))
                    for token in rng.integers(0, VOCAB, 3)
                },
                "repetition_penalty": rng.choice([0.5, 1.0, 1.3, 2.0]),
                "presence_penalty": rng.choice([-1.0, 0.0, 0.7]),
                "frequency_penalty": rng.choice([-0.3, 0.0, 0.4]),
                "banned": [rng.integers(0, 4, n).tolist() for n in lengths],
                "min_new_tokens": int(rng.integers(0, 12)),
            }
        )
    return rows, prompts, outputs


def assert_equals_the_oracle(found, logits, rows, prompts, outputs, parents, drafted):
    for row, slot in np.ndindex(found.shape[:2]):
        path = [drafted[row][s - 1] for s in oracles.ancestors(parents, slot)[1:]]
        wanted = oracles.adjusted(
            logits[row, slot],
            prompts[row],
            outputs[row] + path,
            ends=ENDS,
            **rows[row],
        )
        np.testing.assert_allclose(found[row, slot], wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("parents", [CHAIN, TREE, []], ids=["chain", "tree", "root"])
def test_every_slot_is_adjusted_by_its_own_history(parents):
    rng = np.random.default_rng(len(parents) + parents[1:2].count(0))
    for _ in range(4):
        rows, prompts, outputs = random_rows(rng, 32)
        drafted = rng.integers(0, 6, (32, len(parents))).tolist()
        logits = rng.normal(0, 4, (32, len(parents) + 1, VOCAB)).astype(np.float32)
        logits[rng.random(logits.shape) < 0.1] = -INF
        drafted = np.reshape(drafted, (32, len(parents))).astype(int).tolist()
        found = run(logits, rows, prompts, outputs, parents, drafted)
        assert found.dtype == np.float32
        assert_equals_the_oracle(
            found, logits, rows, prompts, outputs, parents, drafted
        )


def test_a_siblings_tokens_do_not_count():
    # Under both children stands an id 4, in one branch twice.
    drafted = [[4, 5, 4, 6]]
    logits = np.ones((1, 5, VOCAB), np.float32)
    found = run(
        logits,
        [{"frequency_penalty": 1.0, "banned": [[4, 4, 0], [5, 6, 1]]}],
        [[2]],
        [[]],
        TREE,
        drafted,
    )[0]
    assert found[:, 4].tolist() == [1, 0, 1, -1, 1]
    assert found[:, 5].tolist() == [1, 1, 0, 1, 0]
    assert found[:, 6].tolist() == [1, 1, 1, 1, 0]
    assert np.argwhere(np.isneginf(found)).tolist() == [[3, 0], [4, 1]]


SUBSETS = [ALL[:n] for n in range(len(ALL))] + [ALL[n:] for n in range(1, len(ALL))]


@pytest.mark.parametrize("present", SUBSETS, ids="+".join)
def test_an_absent_option_is_one_that_changes_nothing(present):
    rng = np.random.default_rng(3)
    rows, prompts, outputs = random_rows(rng, 8)
    drafted = rng.integers(0, 6, (8, 2)).tolist()
    logits = rng.normal(0, 4, (8, 3, VOCAB)).astype(np.float32)
    fewer = [{name: row[name] for name in present} for row in rows]
    found = run(logits, fewer, prompts, outputs, [0, 1], drafted, present)
    assert_equals_the_oracle(found, logits, fewer, prompts, outputs, [0, 1], drafted)


def test_greedy_rows_are_adjusted_as_others():
    rng = np.random.default_rng(4)
    rows, prompts, outputs = random_rows(rng, 8)
    logits = rng.normal(0, 4, (8, 1, VOCAB)).astype(np.float32)
    hot = [{**row, "temperature": 1.3} for row in rows]
    given = prompts, outputs, [], np.zeros((8, 0))
    assert np.array_equal(run(logits, rows, *given), run(logits, hot, *given))


# Steps that may change places: subtractions; what rules out single ids and what leaves
# the impossible so; the temperature and what looks at single ids or at their order.
COMMUTE = [
    ("presence_penalty", "frequency_penalty"),
    ("presence_penalty", "banned"),
    ("presence_penalty", "min_new_tokens"),
    ("frequency_penalty", "banned"),
    ("frequency_penalty", "min_new_tokens"),
    ("banned", "min_new_tokens"),
    ("banned", "temperature"),
    ("min_new_tokens", "temperature"),
    ("temperature", "top_k"),
]


def test_the_order_is_the_documented_one():
    """Two steps in each other's place show, unless they commute by nature."""
    prompt, output = [0, 1, 0], [2, 0, 2, 4]
    options = {
        "logit_bias": {0: 1.5, 5: -1.0, 2: 0.5, 6: 0.4},
        "repetition_penalty": 1.7,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.25,
        "banned": [[2, 4, 8], [9]],
        "min_new_tokens": 9,
        "temperature": 0.8,
        "top_k": 4,
        "top_p": 0.85,
        "min_p": 0.13,
    }
    rng = np.random.default_rng(2)
    logits = rng.normal(0.5, 1.2, (16, VOCAB)).astype(np.float32)
    # Ids that a filter would count if they were still there.
    logits[..., [3, 7, 8, 9]] += 1.5
    found = np.exp(warped(logits, [options] * 16, [prompt] * 16, [output] * 16))
    steps = [*oracles.ADJUSTMENTS, *oracles.FILTERS]

    def of_order(order):
        given = {"order": order, "ends": ENDS, **options}
        rows = [oracles.adjusted(row, prompt, output, **given) for row in logits]
        # A wrong order may rule all ids out.
        return [oracles.softmax(row) if row.max() > -INF else row for row in rows]

    expected = of_order(steps)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    commute = []
    for one, other in itertools.combinations(steps, 2):
        swap = {one: other, other: one}
        swapped = of_order([swap.get(name, name) for name in steps])
        if np.allclose(swapped, expected, rtol=0, atol=1e-3):
            commute.append((one, other))
    assert commute == COMMUTE


def test_plus_infinity_is_a_certainty_before_and_after():
    everything = {
        "logit_bias": {0: 5.0, 1: -5.0},
        "repetition_penalty": 2.0,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
        "banned": [[2]],
        "min_new_tokens": 3,
    }
    found = hand([1, INF, INF, 2], [0], [1], ends=(3,), **everything)
    assert np.argmax(found) == 1 and np.isfinite(found[:2]).all()
    assert found[2] == found[3] == -INF
    assert hand([INF, 0], logit_bias={0: -INF}) == [-INF, 0]


def test_what_overflows_is_the_largest_number_or_impossible():
    huge = float(np.float32(3e38))
    found = hand([huge, -huge, huge], [0, 1], repetition_penalty=1e-30)
    assert found == [LARGEST_FLOAT, pytest.approx(-3e8), huge]
    found = hand([huge, -huge, 1], [0, 1], repetition_penalty=1e30)
    assert found == [pytest.approx(3e8), -INF, 1]
    # Nothing after it makes a NaN of it.
    rest = {
        "presence_penalty": 1e30,
        "frequency_penalty": 1e30,
        "logit_bias": {0: 1e30},
    }
    found = hand([huge, 1, 1], [0], [0, 1], repetition_penalty=1e-30, **rest)
    assert found[0] == LARGEST_FLOAT and not np.isnan(found).any()
    found = hand([huge, 1], [0], [0], repetition_penalty=1e-30, banned=[[0]])
    assert found == [-INF, 1]


@pytest.mark.parametrize("name", ALL)
def test_a_nan_stays_visible(name):
    values = {
        "logit_bias": {0: -INF},
        "repetition_penalty": 2.0,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
        "banned": [[0]],
        "min_new_tokens": 4,
    }
    options = {name: values[name]}
    for logits in ([np.nan, 1, 2], [1, np.nan, 2]):
        found = hand(logits, [0], [0, 1], ends=(0,), **options)
        assert np.isnan(found).any(), "a model's fault must not be hidden by an option"


def test_half_precision_logits_are_widened_before_any_arithmetic():
    rng = np.random.default_rng(8)
    rows, prompts, outputs = random_rows(rng, 8)
    half = jnp.asarray(rng.normal(0, 30, (8, 1, VOCAB)), jnp.bfloat16)
    given = rows, prompts, outputs, [], np.zeros((8, 0))
    found = run(half, *given)
    assert found.dtype == np.float32
    assert np.array_equal(found, run(np.float32(half), *given))


def test_without_options_nothing_is_computed():
    def operations(*present):
        row = {"banned": [[1]], "logit_bias": {1: 1.0}}
        sampling = pack([row], present)
        history = history_of([[1, 2]], [[3]], sampling)
        arguments = (
            np.ones((1, 2, VOCAB), "f4"),
            sampling,
            history,
            np.ones((1, 2), int),
        )
        path = np.ones((1, 2, 1), int), np.ones((1, 2), int)
        jaxpr = jax.make_jaxpr(adjust)(*arguments, *path)
        return [each.primitive.name for each in jaxpr.eqns]

    assert set(operations()) <= {"min", "convert_element_type"}
    for name in ALL:
        assert len(operations(name)) > len(operations())


def test_a_row_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(6)
    rows, prompts, outputs = random_rows(rng, 8)
    drafted = rng.integers(0, 6, (8, 4))
    logits = rng.normal(0, 4, (8, 5, VOCAB)).astype(np.float32)
    found = run(logits, rows, prompts, outputs, TREE, drafted)
    order = rng.permutation(8)
    take = lambda values: [values[row] for row in order]  # noqa: E731
    given = take(rows), take(prompts), take(outputs), TREE, drafted[order]
    assert np.array_equal(run(logits[order], *given), found[order])
