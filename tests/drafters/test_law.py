"""Real models and drafters: sampled texts have the law of the target alone."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.cut_draft import CutDraft, cut_parameters
from jaxspec.core.dynamic_tree import DynamicTree
from jaxspec.core.topology import Topology
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.eagle import Eagle
from jaxspec.drafters.early_exit import EarlyExit
from jaxspec.drafters.medusa import Medusa
from tests import fakes, runs
from tests.exactness.chi_square import ACCEPTABLE, DAMNING, p_value

VOCAB, NEW, REPEATS, ROWS = 6, 3, 6, 1920


TREE = Topology.branching((2, 2, 1))
SMALL = fakes.tiny(3, layers=3, vocab=VOCAB)
CUT, SOME = (0, 2), np.array([4, 1, 0, 5])
DRAFTERS = {
    "cut draft of some ids, chain": DraftModel(
        CutDraft(CUT, cut_parameters(SMALL, CUT), SOME).model(SMALL), 3
    ),
    "early exit, chain": EarlyExit(1, Topology.chain(3)),
    "early exit, tree": EarlyExit(1, TREE),
    "medusa, tree": Medusa(fakes.heads(SMALL, 3), TREE),
    "eagle, tree": Eagle(fakes.eagle(SMALL), TREE),
    "eagle3, chain": Eagle(fakes.eagle3(SMALL), Topology.chain(3)),
    "eagle3, dynamic tree": Eagle(fakes.eagle3(SMALL), DynamicTree(3, 2, 6)),
}


@pytest.mark.full
@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_texts_have_the_targets_law(name):
    """All texts of three tokens, against the target's own probabilities."""
    prompt = [2, 4, 1]
    texts = np.array(list(itertools.product(range(VOCAB), repeat=NEW)), np.int32)
    whole = np.concatenate([np.tile(prompt, (len(texts), 1)), texts], axis=1)
    logits = np.asarray(runs.replay(SMALL, jnp.asarray(whole, jnp.int32), 1), float)
    rows = logits[:, len(prompt) - 1 : -1]
    probs = np.exp(rows - rows.max(axis=-1, keepdims=True))
    probs /= probs.sum(axis=-1, keepdims=True)
    law = np.take_along_axis(probs, texts[..., None], axis=-1)[..., 0].prod(axis=-1)
    assert law.sum() == pytest.approx(1)
    counts, accepted = np.zeros(len(texts)), 0
    batch = runs.Batch([prompt] * ROWS, new=NEW, temperature=1.0, capacity=16, chunk=4)
    for repeat in range(REPEATS):
        seeds = range(repeat * ROWS, (repeat + 1) * ROWS)
        run = runs.generate(SMALL, DRAFTERS[name], batch._replace(seeds=seeds))
        codes = np.array(run.ids) @ VOCAB ** np.arange(NEW)[::-1]
        counts += np.bincount(codes, minlength=len(texts))
        accepted += int(np.asarray(run.state.statistics.accepted).sum())
    assert accepted >= 1000
    found = p_value(counts, law)
    uniform = p_value(counts, np.full(len(texts), 1 / len(texts)))
    print(f"p = {found:.1e}; against the uniform law {uniform:.1e}")
    assert found > ACCEPTABLE
    assert uniform < DAMNING
