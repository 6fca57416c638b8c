"""One warning for a drafter whose first tokens are hardly ever right."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxspec
from jaxspec.acceptance_watch import FIRST_ROUNDS, AcceptanceWatch
from jaxspec.decoding.state import Statistics
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.prompt_lookup import PromptLookup
from tests import fakes

PROMPTS = [[5, 6, 7], [1], [9] * 12, [30, 31]]
NEW = 64


@pytest.fixture(scope="module")
def target():
    return jaxspec.LanguageModel("tiny", fakes.tiny(1))


@pytest.fixture(scope="module")
def wrong(target):
    """The target with its head negated: it proposes what is least likely."""
    graph, params = nnx.split(target.decoder)
    decoder = nnx.merge(graph, jax.tree.map(jnp.array, params))
    decoder.lm_head.weight = nnx.Param(-decoder.lm_head.weight[...])
    return jaxspec.LanguageModel("negated", decoder)


OPTIONS = [
    {"draft_tokens": 2},
    pytest.param({"tree": (2, 1)}, marks=pytest.mark.full),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_drafter_that_is_never_right_is_told_once(target, wrong, options):
    generator = jaxspec.Generator(target, wrong, **options)
    few = FIRST_ROUNDS // len(PROMPTS) - 4
    generator.generate(PROMPTS, max_new_tokens=few)
    with pytest.warns(UserWarning, match="accepted in 0 of 4.. rounds: its check"):
        generator.generate(PROMPTS, max_new_tokens=NEW)
    generator.generate(PROMPTS, max_new_tokens=NEW)


def test_a_drafter_that_is_right_is_not_told(target):
    generator = jaxspec.Generator(target, target, draft_tokens=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = generator.generate(PROMPTS, max_new_tokens=3 * FIRST_ROUNDS // 4)
    assert sum(result.stats.rounds for result in results) >= FIRST_ROUNDS
    assert not caught


@pytest.mark.parametrize(("drafted", "told"), [(0, False), (199, False), (200, True)])
def test_only_rounds_with_a_valid_node_count(drafted, told):
    nothing = np.zeros(2, int)
    counts = np.array([[drafted, 0], [0, 0]])
    seen = Statistics(nothing + 1000, nothing, counts, 0 * counts)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        AcceptanceWatch(DraftModel(None, 2)).see(seen)
        AcceptanceWatch(PromptLookup(2)).see(seen)
    assert len(caught) == told
