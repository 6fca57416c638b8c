"""Over a mesh all that belongs to a row goes where the row goes."""

import jax
import numpy as np
import pytest

from jaxspec.core.report import Reporting
from jaxspec.core.sampling import Sequences
from jaxspec.decoding.state import EOS, LENGTH, STOP
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.sharding import Partition
from tests import fakes, runs
from tests.sharding import on_devices

MESH, ROWS, VOCABULARY, DRAFTED = "4x2", 8, 64, 3
# No row stays in its part of the mesh, nor two neighbours together.
ORDER = (6, 3, 1, 4, 7, 2, 0, 5)
EXACT = ("ids", "length", "finish", "rounds", "emitted", "drafted", "accepted")
EXACT += ("from_draft", "top_ids")
# What a logarithm may change between a mesh and one device.
CLOSE = {"raw": 1e-4, "warped": 1e-4, "top_raw": 1e-4}
WIDTH = 2
# Each row has values of its own, in the order of the rows.
VALUES = {
    "temperature": (0.0, 1.0, 0.7, 0.0, 1.3, 1.0, 0.0, 0.9),
    "top_k": (0, 40, 0, 3, 12, 0, 30, 5),
    "top_p": (1.0, 0.9, 0.95, 1.0, 0.8, 1.0, 0.5, 0.99),
    "min_p": (0.0, 0.0, 0.05, 0.1, 0.01, 0.2, 0.0, 0.0),
    "repetition_penalty": (1.0, 1.3, 1.0, 1.6, 0.8, 1.0, 1.2, 1.1),
    "presence_penalty": (0.0, 0.0, 0.7, 0.3, 0.0, -0.4, 0.5, 0.0),
    "frequency_penalty": (0.0, 0.2, 0.0, 0.4, 0.1, 0.0, 0.3, -0.1),
    "min_new_tokens": (0, 4, 20, 3, 24, 6, 12, 2),
}
LENGTHS, NEW = (3, 20, 1, 7, 33, 12, 2, 16), (30, 24, 36, 27, 33, 40, 29, 26)


def sequences(rng, known):
    """Two sequences of 1 or 2 ids for each row, some of ids that the row writes."""
    tokens = np.full((ROWS, 2, WIDTH), -1, np.int32)
    length = np.array(
        [[1 + (row + each) % 2 for each in (0, 1)] for row in range(ROWS)]
    )
    for row in range(ROWS):
        for each in (0, 1):
            count = length[row, each]
            tokens[row, each, WIDTH - count :] = rng.choice(known[row], count)
    return Sequences(tokens, length.astype(np.int32))


def batch():
    """Options of all kinds; of the ids that a bias leaves a row a few are named."""
    rng = np.random.default_rng(3)
    likely = [rng.permutation(VOCABULARY)[:12] for _ in range(ROWS)]
    bias = rng.normal(size=(ROWS, VOCABULARY)).astype(np.float32)
    for row, ids in enumerate(likely):
        bias[row, ids] += 3
    values = {name: np.array(row_values) for name, row_values in VALUES.items()}
    floats = {
        n: v.astype("f4" if v.dtype == float else "i4") for n, v in values.items()
    }
    temperature = floats.pop("temperature")
    return runs.Batch(
        [rng.integers(0, VOCABULARY, length).tolist() for length in LENGTHS],
        new=np.array(NEW),
        temperature=temperature,
        seeds=range(20, 28),
        eos=(5, 40),
        options=floats | {"logit_bias": bias, "banned": sequences(rng, likely)},
        stops=sequences(rng, likely),
        reporting=Reporting(2),
    )


def told(run):
    """All of a row: its outcome and log-probabilities, the prompt's places left out."""
    shown, state = on_devices.outcome(run), run.state
    spans = list(zip(run.batch.lengths, np.asarray(state.length), strict=True))
    for name, values in state.log_probs._asdict().items():
        cut = [np.asarray(values)[row, a:b] for row, (a, b) in enumerate(spans)]
        shown[name] = [each.tolist() for each in cut]
    return shown


def permuted():
    """Rows as they are, in another order, and with one option's rows exchanged."""
    target, drafter = fakes.tiny(1), DraftModel(fakes.tiny(2, layers=1), DRAFTED)
    partition, asked = Partition(on_devices.mesh_of(MESH)), batch()
    made = on_devices.programs(partition)

    def over(batch):
        return told(on_devices.generate(partition, target, drafter, batch, made))

    report = {
        "one device": told(runs.generate(target, drafter, asked, runs.programs())),
        "in order": over(asked),
        "permuted": over(asked.rows(ORDER)),
        **{f"other {name}": over(each) for name, each in exchanged(asked).items()},
    }
    return report | {"compilations": [each.compilations for each in made]}


def exchanged(asked):
    """The batch with the rows of one argument moved on by one, for each argument."""
    roll = lambda tree: jax.tree.map(lambda each: np.roll(each, 1, axis=0), tree)  # noqa: E731
    moved = {
        name: asked._replace(options=asked.options | {name: roll(value)})
        for name, value in asked.options.items()
    }
    for name in ("new", "temperature", "stops"):
        moved[name] = asked._replace(**{name: roll(getattr(asked, name))})
    return moved | {"seeds": asked._replace(seeds=np.roll(asked.seeds, 1))}


ARGUMENTS = (*exchanged(batch()),)


@pytest.fixture(scope="module")
def report():
    return on_devices.call(permuted)


@pytest.mark.parametrize("name", [*EXACT, *CLOSE])
def test_permuted_rows_come_to_what_they_came_to_in_order(report, name):
    """Bit for bit: the program is the same."""
    in_order, there = report["in order"][name], report["permuted"][name]
    assert there == [in_order[row] for row in ORDER]
    assert there != in_order


@pytest.mark.parametrize("name", EXACT)
def test_with_every_option_a_mesh_changes_nothing(report, name):
    assert report["in order"][name] == report["one device"][name]


@pytest.mark.parametrize("name", CLOSE)
def test_log_probs_are_those_of_one_device(report, name):
    both = zip(report["in order"][name], report["one device"][name], strict=True)
    for here, there in both:
        np.testing.assert_allclose(here, there, atol=CLOSE[name], rtol=0)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_rows_with_each_others_values_come_to_something_else(report, name):
    """So each argument matters in this batch, and would be missed."""
    in_order, other = report["in order"], report[f"other {name}"]
    assert any(other[each] != in_order[each] for each in ("ids", "warped"))


def test_rows_end_in_every_way_and_one_program_serves_all(report):
    assert set(report["in order"]["finish"]) == {EOS, STOP, LENGTH}
    assert report["compilations"] == [1, 1]
    assert np.sum(report["in order"]["accepted"]) >= 10
