"""BL-18: a row's ids depend on its own seed, under every rule."""

import numpy as np
import pytest

from jaxspec.core.accept import RULES
from jaxspec.drafters.draft_model import DraftModel
from tests import fakes, runs

VOCAB, NODES, NEW, SEED = 12, 3, 40, 7
TARGET = fakes.TableModel.random(VOCAB, seed=0, scale=1.5, windows=(None,))
DRAFTER = DraftModel(TARGET.near(1, 0.8), NODES)
PROMPTS = [[1], [2, 3, 4], [5, 6], [7, 8, 9, 10]]
FEW = ("block",)
OWN, OTHERS = [3, 5, 4, 3], [[1, 1], [2], [6, 7, 8, 9, 10, 11]]


def ids_of(prompts, seeds, new, rule):
    batch = runs.Batch(
        prompts,
        new=new,
        temperature=1.0,
        seeds=seeds,
        rule=rule,
        capacity=64,
        chunk=8,
    )
    return runs.generate(TARGET, DRAFTER, batch).ids


@pytest.mark.parametrize(
    "rule",
    # The others are for CI; tests/test_generator.py has `rejection` too.
    [pytest.param(r, marks=[] if r in FEW else pytest.mark.full) for r in RULES],
)
def test_a_seed_gives_the_same_ids_in_any_company_and_place(rule):
    def beside(index, new, seed=SEED, others=(1, 2, 3)):
        prompts, seeds = list(OTHERS), list(others)
        prompts.insert(index, OWN)
        seeds.insert(index, seed)
        new = np.insert(new, index, NEW)
        return ids_of(prompts, seeds, new, rule)[index]

    # Rows of which nothing is asked leave it alone.
    alone = beside(0, [0, 0, 0])
    assert len(alone) == NEW and len(set(alone)) >= 6
    assert alone == beside(0, [0, 0, 0])
    for index in range(4):
        assert beside(index, [5, NEW, 20]) == alone
        assert beside(index, [NEW] * 3, others=(SEED, SEED, 99)) == alone
        assert beside(index, [5, NEW, 20], seed=SEED + 1) != alone


def test_rows_of_one_prompt_and_one_seed_are_one_text():
    rows = ids_of([OWN] * 4, [SEED, SEED, SEED + 1, SEED], NEW, "rejection")
    assert rows[0] == rows[1] == rows[3] != rows[2]


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES)
def test_a_row_in_a_batch_of_one_is_itself(rule):
    """Other shapes: the table's logits are the same to the bit in all of them."""
    alone = ids_of([OWN], [SEED], NEW, rule)
    assert ids_of([OWN, *OTHERS], [SEED, 1, 2, 3], NEW, rule)[:1] == alone
