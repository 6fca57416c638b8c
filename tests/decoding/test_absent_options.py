"""An option that nobody uses is not in the compiled program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.batching import pack_sequences
from jaxspec.core.report import Reporting
from jaxspec.drafters.draft_model import DraftModel
from tests import fakes, runs

# Sizes that occur in no other shape.
ROWS, VOCAB, NODES, CAPACITY = 3, 13, 2, 34
TARGET = fakes.TableModel.random(VOCAB, seed=0, windows=(None,))
BATCH = runs.Batch([[1, 2]] * ROWS, new=4, capacity=CAPACITY, chunk=8, temperature=1.0)
ONES = np.ones(ROWS, np.float32)
OPTIONS = {
    "repetition_penalty": ONES,
    "presence_penalty": ONES,
    "frequency_penalty": ONES,
    "logit_bias": np.zeros((ROWS, VOCAB), np.float32),
    "banned": pack_sequences([[[1, 2]]] * ROWS, ROWS),
    "min_new_tokens": np.ones(ROWS, np.int32),
}
SEQUENCES = pack_sequences([[[1, 2]]] * ROWS, ROWS)


DRAFTER = DraftModel(TARGET, NODES)
# Traced, neither compiled nor run.
TRACED = runs.SHARED._replace(prefill=runs.SHARED.prefill.eval_shape)


def carried(**asked):
    """The shapes that the loop over rounds carries or reads, as HLO spells them."""
    state, options = runs.start(TARGET, DRAFTER, BATCH._replace(**asked), TRACED)
    lowered = TRACED.decode.lower(TARGET, DRAFTER, state, options, jnp.int32(9))
    lines = lowered.as_text(dialect="hlo").splitlines()
    loops = [line.split(" while(")[0] for line in lines if " while(" in line]
    outermost = max(loops, key=len)
    return {*re.findall(r"\w+\[[\d,]*\]", outermost)}


def wide(shapes):
    return {each for each in shapes if each.endswith(f"[{ROWS},{VOCAB}]")}


@pytest.fixture(scope="module")
def bare():
    shapes = carried()
    # The loop was found: these are the tokens.
    assert f"s32[{ROWS},{CAPACITY}]" in shapes
    return shapes


def test_without_options_nothing_of_rows_and_vocabulary_is_carried(bare):
    assert wide(bare) == set()


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_carries_what_it_needs_and_no_other(bare, name):
    counts, seen, bias = (f"{kind}[{ROWS},{VOCAB}]" for kind in ("s32", "pred", "f32"))
    needs = {
        "repetition_penalty": {counts, seen},
        "presence_penalty": {counts},
        "frequency_penalty": {counts},
        "logit_bias": {bias},
    }
    shapes = carried(options={name: OPTIONS[name]})
    assert wide(shapes) == needs.get(name, set())
    if name == "banned":
        assert f"s32[{ROWS},4,4]" in shapes - bare


def test_stops_and_reports_are_there_when_asked_for(bare):
    assert f"s32[{ROWS},4,4]" in carried(stops=SEQUENCES) - bare
    assert f"f32[{ROWS},{CAPACITY}]" in carried(reporting=Reporting()) - bare


def test_without_options_the_state_holds_no_array_of_the_vocabulary():
    state, _ = runs.start(TARGET, DRAFTER, BATCH, TRACED)
    assert state.counts is state.log_probs is None
    assert not [leaf for leaf in jax.tree.leaves(state) if VOCAB in leaf.shape]
