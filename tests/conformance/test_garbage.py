"""Large numbers where nothing is committed change no bit of any drafter's output."""

import pytest

from tests import fakes, runs
from tests.conformance.test_drafters import make_case

# Each drafter that keeps or hands on keys and values.
NAMES = ("draft_model, dynamic tree", "eagle, tree", "eagle3, tree", "early_exit, tree")


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_garbage_where_nothing_is_committed_changes_no_bit(tiny, monkeypatch, name):
    case = make_case(name, tiny)
    batch = case.batch._replace(new=24, temperature=[0.0, 1.0] * 8)
    made = runs.programs(), runs.programs()
    clean = runs.generate(case.target, case.alone, batch, made[0]).state
    fakes.soil(monkeypatch)
    soiled = runs.generate(case.target, case.alone, batch, made[1]).state
    runs.assert_same_texts_and_caches(clean, soiled)
