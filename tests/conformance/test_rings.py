"""What every drafter must do where the layers of target and draft have windows."""

from types import SimpleNamespace

import pytest

from jaxspec import cache as cache_module
from jaxspec.drafters.autoregressive import Autoregressive
from tests import fakes, runs
from tests.conformance.test_drafters import (  # noqa: F401
    make_case,
    test_every_accepted_count_occurs_and_the_ids_stay,
    test_greedy_ids_are_those_of_the_target_alone,
    test_proposals_after_any_round_are_those_of_a_fresh_prefill,
)

# Each drafter once: what a ring could break does not depend on the topology.
ONCE = (
    *("draft_model", "draft_model, dynamic tree", "eagle, dynamic tree"),
    *("eagle3, tree", "early_exit, tree", "medusa, tree", "prompt_lookup"),
)


@pytest.fixture(scope="module")
def windowed(tiny):
    """As `tiny`, over rings that turn several times; one window is shorter than k + 1.

    The plain run keeps all that is committed.
    """
    target = fakes.tiny(1, windows=(8, None))
    draft = fakes.tiny(2, layers=1, windows=(3,))
    batch = tiny.batch._replace(chunk=12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "BLOCK", 4)
        with pytest.MonkeyPatch.context() as full:
            full.setattr(cache_module.KVCache, "init", fakes.full_layout)
            made = runs.programs()
            plain = runs.plain(target, Autoregressive(), batch, (5,), made)
        yield SimpleNamespace(target=target, draft=draft, batch=batch, plain=plain)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.full) for name in ONCE],
)
def case(request, windowed):
    return make_case(request.param, windowed)


def test_the_rings_turn(case):
    state = runs.start(case.target, case.alone, case.batch)[0]
    window = state.cache.groups[0][0].shape[4]
    assert window == 8 + case.batch.chunk
    assert min(len(ids) for ids in case.plain.run.ids) > 3 * window
