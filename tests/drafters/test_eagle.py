"""EAGLE heads through the real loader and the real loop, against float64 NumPy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import causal, run_rows
from jaxspec.checkpoints.eagle import load_eagle
from jaxspec.core.topology import Topology
from jaxspec.drafters.autoregressive import Autoregressive
from jaxspec.drafters.eagle import Eagle
from tests import fakes, runs
from tests.conformance.test_drafters import propose
from tests.drafters import eagle_files, eagle_oracle

TOLERANCE = 3e-5  # float32 log-probabilities of a head two matrix products deep
TREE = Topology.branching((2, 2, 1))
# The slots on the way to each node of the level before the last.
WAYS = [
    [slot for slot in TREE.ancestors[leaf] if slot]
    for leaf in np.flatnonzero(np.array(TREE.depths) == TREE.depth - 1)
]
DRAFT_IDS = np.random.default_rng(7).permutation(64)[:24]
HEADS = {
    "EAGLE-1": (False, eagle_files.eagle()),
    "EAGLE-1, no bias, the target's embedding": (
        False,
        eagle_files.eagle(bias=False, embedding=False),
    ),
    "EAGLE-1, two layers": (False, eagle_files.eagle(num_hidden_layers=2)),
    "EAGLE-1 of speculators": (False, eagle_files.eagle(speculators=True)),
    "EAGLE-3": (True, eagle_files.eagle3(draft_ids=DRAFT_IDS)),
    "EAGLE-3, the target's head": (True, eagle_files.eagle3(head=False)),
    "EAGLE-3, all switches": (
        True,
        eagle_files.eagle3(
            draft_ids=np.sort(DRAFT_IDS),
            embedding=True,
            switches=("norm_before_residual", "norm_before_fc", "norm_output"),
        ),
    ),
    "EAGLE-3, another width and heads": (
        True,
        eagle_files.eagle3(
            draft_ids=DRAFT_IDS, embedding=True, hidden_size=48, head_dim=16
        ),
    ),
    "EAGLE-3 of speculators": (
        True,
        eagle_files.eagle3(draft_ids=DRAFT_IDS, speculators=True),
    ),
    "EAGLE-3 of speculators, two layers": (
        True,
        eagle_files.eagle3(
            draft_ids=DRAFT_IDS,
            speculators=True,
            num_hidden_layers=2,
            switches=("fc_norm", "norm_output"),
        ),
    ),
}
BY_DEFAULT = ("EAGLE-1", "EAGLE-3, all switches")


@pytest.fixture(scope="module")
def target():
    return fakes.tiny(1)


@functools.partial(jax.jit, static_argnums=2)
def whole(model, tokens, taps):
    """The target's hidden states and taps over whole texts, from nothing."""
    rows, length = tokens.shape
    slots = jnp.arange(length)
    output, _ = run_rows(
        model,
        model.init_cache(rows, length, 1),
        model.init_scratch(rows, length),
        tokens,
        jnp.broadcast_to(slots, tokens.shape),
        slots,
        causal(rows, length),
        taps,
    )
    return output


def parts(model):
    return {
        "embed": np.asarray(model.embed_tokens.weight[...], float),
        "head": np.asarray(model.lm_head.weight[...], float),
        "norm": np.asarray(model.final_norm.weight[...], float),
        "eps": model.config.norm_eps,
    }


def log_softmax(logits):
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def assert_oracles_proposals(target, head, taps, state, draft):
    """Every distribution of the draft is the oracle's after the tokens on its way."""
    output = whole(target, state.tokens, taps)
    hidden, tapped = (np.asarray(each, float) for each in output)
    for row in np.flatnonzero(np.asarray(state.active)):
        length = int(state.length[row])
        text, fed = np.asarray(state.tokens[row, :length]), slice(length - 1)
        for way in WAYS:
            path = [int(draft.tokens[row, slot - 1]) for slot in way]
            expected = head.draft_logits(text, hidden[row, fed], tapped[row, fed], path)
            found = np.asarray(draft.log_probs[row])[[0, *way]]
            np.testing.assert_allclose(
                np.exp(found), np.exp(log_softmax(expected)), atol=TOLERANCE
            )
            np.testing.assert_array_equal(np.isneginf(found), np.isneginf(expected))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.full)
        for name in HEADS
    ],
)
def test_proposals_are_the_oracles_after_prefill_and_after_rounds(
    target, tmp_path, name
):
    eagle3, (config, tensors) = HEADS[name]
    folder = eagle_files.write(tmp_path / "head", config, tensors)
    head, places = load_eagle(folder, target.config)
    assert head.taps == ((0, 1, 1) if eagle3 else ())
    oracle = eagle_oracle.Head(tensors, config, parts(target), eagle3)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 64, n).tolist() for n in (1, 2, 9, 17)]
    batch = runs.Batch(prompts, new=24, temperature=1.0, capacity=48, chunk=8)
    text = plain_text(target, batch._replace(temperature=0.0))
    drafter = fakes.Oracle(Eagle(head, TREE, places), text)
    _, options = batch.device()
    greedy, state = batch._replace(temperature=0.0), None
    states = runs.rounds(target, drafter, greedy)
    for done, state in enumerate(itertools.islice(states, 5)):
        if done != 2:
            draft = propose(target, drafter.inner, state, options)
            assert_oracles_proposals(target, oracle, head.taps, state, draft)
    assert np.asarray(state.statistics.accepted).sum() > 8


def plain_text(target, batch):
    return runs.generate(target, Autoregressive(), batch).state.tokens
