"""BL-05: a rejected token leaves no trace in a ring, wherever it wraps."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import cache as cache_module
from jaxspec.cache import KVCache
from jaxspec.drafters.autoregressive import Autoregressive
from jaxspec.drafters.prompt_lookup import PromptLookup
from tests import fakes, runs
from tests.models.forwards import leaves
from tests.models.reference import forward

# Of the four draft tokens the third is wrong.
NODES, RIGHT = 4, 2
BATCH = runs.Batch(
    [np.random.default_rng(10).integers(0, 64, n).tolist() for n in (12, 7, 3)],
    new=40,
    chunk=12,
)


@pytest.fixture(autouse=True)
def tight(monkeypatch):
    """Blocks of one slot: a ring has R = W + C slots and none to spare."""
    monkeypatch.setattr(cache_module, "BLOCK", 1)


def greedy_text(model, prompt):
    """What the model must write, by the NumPy forward, which has no cache."""
    parameters, text = leaves(model), list(prompt)
    for _ in range(BATCH.new):
        logits = forward(model.config, parameters, np.array(text)).logits[-1]
        second, first = np.sort(logits)[-2:]
        assert first - second > 1e-4, "a near tie"
        text.append(int(logits.argmax()))
    return text


@pytest.mark.parametrize(
    "windows",
    (
        (8, 8),
        pytest.param((8, None), marks=pytest.mark.full),
        pytest.param((3, 3), marks=pytest.mark.full),
    ),
)
def test_bl05_rejections_across_the_wrap_change_nothing(windows):
    target = fakes.tiny(1, windows=windows)
    texts = [greedy_text(target, prompt) for prompt in BATCH.prompts]
    wanted = [text[-BATCH.new :] for text in texts]
    made = runs.programs()
    assert runs.generate(target, Autoregressive(), BATCH, made).ids == wanted

    text = BATCH._replace(prompts=texts).tokens
    drafter = fakes.Oracle(PromptLookup(NODES), jnp.asarray(text), always=RIGHT)
    size, starts = windows[0] + BATCH.chunk, set()
    for state in runs.rounds(target, drafter, BATCH, made):
        assert state.cache.groups[0][0].shape[4] == size
        starts |= set((np.asarray(state.cache.length) % size).tolist())
    assert runs.Run(BATCH, state).ids == wanted
    statistics = state.statistics
    emitted, rounds = np.asarray(statistics.emitted), np.asarray(statistics.rounds)
    np.testing.assert_array_equal(rounds, -(-emitted // (RIGHT + 1)))
    # The end of the ring is met within the accepted tokens, and within the rejected.
    left = {size - start for start in starts}
    assert left & set(range(1, RIGHT + 1)) and left & set(range(RIGHT + 1, NODES + 1))


@pytest.mark.full
@pytest.mark.parametrize("windows", ((8, 8), (8, None), (3, 3)))
def test_a_full_cache_that_is_masked_gives_the_same_ids(windows, monkeypatch):
    target = fakes.tiny(1, windows=windows)
    rings = runs.generate(target, PromptLookup(NODES), BATCH, runs.programs())
    monkeypatch.setattr(KVCache, "init", fakes.full_layout)
    full = runs.generate(target, PromptLookup(NODES), BATCH, runs.programs())
    sizes = [run.state.cache.groups[0][0].shape[4] for run in (rings, full)]
    assert sizes == [windows[0] + BATCH.chunk, BATCH.capacity + BATCH.chunk]
    assert rings.ids == full.ids
