"""Medusa heads and exit adapters: what they learn is what they draft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxspec
from jaxspec.checkpoints.cut_draft import cut_decoder, cut_parameters
from jaxspec.core.distributions import log_softmax
from jaxspec.drafters.early_exit import ExitAdapter
from jaxspec.train.capture import read_whole
from jaxspec.train.distill import DraftObjective
from jaxspec.train.early_exit import ExitObjective
from jaxspec.train.losses import LOSSES
from jaxspec.train.medusa import MedusaObjective
from jaxspec.train.optimizers import hidden_matrices
from tests import fakes
from tests.train import made
from tests.train.test_eagle import batch_of

KNOWN = jnp.arange(3, 51, 2)


@pytest.fixture(scope="module")
def text():
    target = fakes.tiny(1)
    tokens = np.random.default_rng(0).integers(0, 64, (1, 32))
    return target, batch_of(target, tokens, 3, 30)


def expected_loss(target_logits, draft_logits, written, ahead):
    """Cross-entropy in float64: of the token `ahead` of each position."""
    target = np.exp(np.asarray(jax.nn.log_softmax(target_logits), np.float64))
    draft = np.asarray(log_softmax(draft_logits), np.float64)
    errors = [
        -(target[at + ahead - 1][np.asarray(KNOWN)] * draft[at]).sum()
        for at in range(len(draft) - ahead)
        if written[at + ahead]
    ]
    return np.mean(errors)


def test_medusa_heads_learn_the_tokens_after_the_next(text):
    target, batch = text
    heads = fakes.heads(target, 3)
    normed = target.norm(batch.hidden)
    logits = np.asarray(target.unembed(normed))[0]
    loss, measures = MedusaObjective(KNOWN, decay=0.5)(heads, target, batch)
    by_head = [
        expected_loss(
            logits,
            target.unembed(heads.features(normed, head), KNOWN)[0],
            np.asarray(batch.written)[0],
            head + 2,
        )
        for head in range(3)
    ]
    np.testing.assert_allclose(loss, np.dot(by_head, [1, 0.5, 0.25]), rtol=1e-5)
    assert measures.accuracy.shape == (3,)


def test_an_exit_learns_the_next_token(text):
    target, batch = text
    adapter = ExitAdapter(32, 1e-5, jnp.float32, nnx.Rngs(0))
    adapter.linear.weight[...] = jnp.asarray(
        np.random.default_rng(1).normal(0, 0.1, (32, 32)), jnp.float32
    )
    loss, measures = ExitObjective(KNOWN, tap=1, depth=2)(adapter, target, batch)
    logits = np.asarray(target.unembed(target.norm(batch.hidden)))[0]
    adapted = target.norm(adapter(batch.taps[:, :, 1]))
    drafted = target.unembed(adapted, KNOWN)[0]
    written = np.asarray(batch.written)[0]
    np.testing.assert_allclose(
        loss, expected_loss(logits, drafted, written, 1), rtol=1e-5
    )
    # A round of two: right at one position, and then at the next as well.
    best = np.asarray(KNOWN)[np.argmax(drafted, axis=-1)]
    right = (best == logits.argmax(-1))[:-1] & written[1:]
    begins = np.flatnonzero(written[1:-1] & written[2:])
    rounds = [1 + right[t] + (right[t] & right[t + 1]) for t in begins]
    np.testing.assert_allclose(
        measures.greedy_tokens_per_round, np.mean(rounds), rtol=1e-6
    )


def test_a_cut_draft_learns_the_next_token(text):
    """From its own reading of the text; its ends are the target's."""
    target, batch = text
    own = cut_parameters(target, (1,))
    loss, _ = DraftObjective(KNOWN, (1,), depth=2)(own, target, batch)
    draft = cut_decoder(target, (1,), own)
    drafted = draft.unembed(draft.norm(read_whole(draft, batch.tokens).hidden), KNOWN)[
        0
    ]
    logits = np.asarray(target.unembed(target.norm(batch.hidden)))[0]
    written = np.asarray(batch.written)[0]
    np.testing.assert_allclose(
        loss, expected_loss(logits, drafted, written, 1), rtol=1e-5
    )


def test_a_draft_of_all_layers_says_what_the_target_says(text):
    target, batch = text
    layers = tuple(range(target.config.num_layers))
    draft = cut_decoder(target, layers, cut_parameters(target, layers))
    np.testing.assert_allclose(
        read_whole(draft, batch.tokens).hidden, batch.hidden, atol=1e-5
    )


def test_each_loss_is_the_one_that_is_asked_for(text):
    target, batch = text
    adapter = ExitAdapter(32, 1e-5, jnp.float32, nnx.Rngs(0))
    normed = target.norm(batch.hidden)
    log_probs = target.unembed(normed, KNOWN) - batch.log_total[..., None]
    adapted = target.norm(adapter(batch.taps[:, :, 0]))
    draft = log_softmax(target.unembed(adapted, KNOWN))
    for name, loss in LOSSES.items():
        errors = np.asarray(loss(log_probs, draft))[0, :-1]
        expected = errors[np.asarray(batch.written)[0, 1:]].mean()
        found = ExitObjective(KNOWN, tap=0, loss=name)(adapter, target, batch)[0]
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=name)


def test_what_is_not_supervised_teaches_nothing(text):
    target, batch = text
    nothing = batch._replace(written=jnp.zeros_like(batch.written))
    heads = fakes.heads(target, 2)
    loss, slope = jax.value_and_grad(
        lambda h, b: MedusaObjective(KNOWN)(h, target, b)[0]
    )(heads, nothing)
    assert loss == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(slope))


@pytest.mark.parametrize(
    ("kind", "special"),
    [("medusa", {}), ("early-exit", {"layers": 3}), ("draft", {"cut": (0, 4)})],
)
def test_a_trained_drafter_drafts_and_stays_exact(
    model, corpus, tmp_path, kind, special
):
    steps = list(made.training(model, corpus, tmp_path, kind, **special))
    losses = [each.loss for each in steps]
    assert np.mean(losses[-3:]) < losses[0]
    drafted = jaxspec.Generator(model, f"{kind}:{tmp_path}", draft_tokens=2)
    plain = jaxspec.Generator(model)
    prompts = made.prompts(4)
    options = {"max_new_tokens": 20}
    for got, want in zip(
        drafted.generate(prompts, **options),
        plain.generate(prompts, **options),
        strict=True,
    ):
        assert got.token_ids == want.token_ids
        assert got.stats.drafted > 0


def test_muon_takes_stacked_matrices_one_by_one():
    heads = fakes.heads(fakes.tiny(1), 3)
    axes = hidden_matrices(heads)
    assert (axes.weights.reduction_axis, axes.weights.output_axis) == (3, 2)
    assert axes.biases is None
