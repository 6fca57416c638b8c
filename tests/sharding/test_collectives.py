"""What the rounds of a generation move between devices: never the logits."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxspec.core.report import Reporting
from jaxspec.decoding.state import DecodingState
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.sharding import Partition
from jaxspec.tpu.hlo import host_traffic
from tests import fakes, runs
from tests.conformance.test_drafters import TREE
from tests.sharding import on_devices
from tests.sharding.on_devices import HEAD_DIM

ROWS, VOCABULARY, DRAFTED, ALTERNATIVES = 8, 128 * 8, 3, 3
SHAPES = {"chain": DRAFTED, "tree": TREE}
# Hidden states of all slots, in the widest layer.
LARGEST_ACTIVATION = ROWS * (TREE.nodes + 1) * 64


def compiled(shape):
    """What the compiler makes of all rounds, from shapes alone, and of the control."""
    partition = Partition(on_devices.mesh_of("1x8"))
    target = partition.place(fakes.tiny(1, vocab=VOCABULARY), HEAD_DIM)
    draft = fakes.tiny(2, layers=1, vocab=VOCABULARY)
    drafter = partition.place(DraftModel(draft, SHAPES[shape]), HEAD_DIM, draft=True)
    batch = runs.Batch(
        [[1, 2, 3]] * ROWS,
        temperature=0.8,
        options={"top_k": jnp.full(ROWS, 50), "top_p": jnp.full(ROWS, 0.9)},
        reporting=Reporting(ALTERNATIVES),
    )
    prompts, options = batch.device()
    init = functools.partial(DecodingState.init, width=16)
    state = jax.eval_shape(init, target, drafter, prompts, options)
    made = on_devices.programs(partition).decode
    made.compile(target, drafter, state, options, jnp.int32(1))
    return {
        "largest": on_devices.largest_moved(made.text),
        "collectives": len(on_devices.collectives(made.text)),
        "host": host_traffic(made.text),
        "loops": made.text.count(" while("),
        "control": on_devices.largest_moved(gathering(target)),
    }


def gathering(target):
    """The program that takes the library's top-k of the logits of a split head."""

    def best(model, hidden):
        return lax.top_k(model.unembed(hidden), ALTERNATIVES)

    hidden = jnp.zeros((ROWS, DRAFTED + 1, target.config.hidden_size))
    return jax.jit(best).lower(target, hidden).compile().as_text()


@pytest.fixture(
    scope="module", params=["chain", pytest.param("tree", marks=pytest.mark.full)]
)
def report(request):
    return on_devices.call(compiled, request.param)


def test_no_collective_moves_the_logits(report):
    assert 0 < report["largest"] <= LARGEST_ACTIVATION < ROWS * VOCABULARY
    assert report["collectives"] > 20


def test_rounds_are_one_loop_that_never_talks_to_the_host(report):
    assert report["host"] == []
    assert report["loops"] >= 1


def test_a_library_top_k_is_seen_to_gather_them(report):
    """The control."""
    assert report["control"] >= ROWS * (DRAFTED + 1) * VOCABULARY


STRIDED = "%a = f32[8] all-reduce(%b), channel_id=1, replica_groups="


@pytest.mark.parametrize(
    ("groups", "wanted"),
    [
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("{{0,1},{2,3},{4,5},{6,7}}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ],
)
def test_who_meets_in_a_collective_is_read_in_each_notation(groups, wanted):
    line = f"{STRIDED}{groups}, to_apply=%sum"
    assert on_devices.groups_of(line) == wanted
    met = on_devices.meetings_of_rows(line, model=4)
    assert bool(met) == any(group[0] // 4 != group[-1] // 4 for group in wanted)


def test_the_largest_array_of_any_collective_is_found():
    text = """
  %a = f32[8,4]{1,0} all-reduce(%b), replica_groups=[1,8]<=[8]
  %c = (f32[2]{0}, bf16[5,9,2]{2,1,0}) all-gather-start(%d), dimensions={0}
  %e = f32[999]{0} add(%f, %all-reduce.3)
"""
    assert on_devices.largest_moved(text) == 90
    assert len(on_devices.collectives(text)) == 2
    assert on_devices.largest_moved("%e = f32[9] add(%f, %all-gather)") == 0
