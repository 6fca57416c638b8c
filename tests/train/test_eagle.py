"""EAGLE's training forward is its drafting forward; what is masked teaches nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import causal, run_rows
from jaxspec.core.distributions import log_softmax
from jaxspec.core.topology import Topology
from jaxspec.drafters.autoregressive import Autoregressive
from jaxspec.drafters.eagle import Eagle
from jaxspec.train.eagle import EagleObjective, unroll
from jaxspec.train.objective import Batch
from jaxspec.types import Context, Target
from tests import fakes, runs

DEPTH = 4
TAPS = (0, 1, 1)
MAKE = {"eagle": fakes.eagle, "eagle3": fakes.eagle3}


@pytest.fixture(scope="module")
def text():
    """A target and a text that it wrote after the first token."""
    target = fakes.tiny(1)
    batch = runs.Batch([[5, 9, 2]], new=29, capacity=32, chunk=8)
    run = runs.generate(target, Autoregressive(), batch)
    return target, np.asarray(run.state.tokens)


def read(target, tokens):
    """The target's output over whole texts, nothing committed before them."""
    rows, length = tokens.shape
    lanes = jnp.arange(length)
    return run_rows(
        target,
        target.init_cache(rows, 0, 0),
        target.init_scratch(rows, length),
        jnp.asarray(tokens),
        jnp.broadcast_to(lanes, tokens.shape),
        lanes,
        causal(rows, length),
        TAPS,
    )[0]


def drafted(target, head, tokens, lengths):
    """What each slot's children are drawn from, of chains along the text."""
    drafter = Eagle(head, Topology.chain(DEPTH))
    prompts = [tokens[0, :length].tolist() for length in lengths]
    state, _ = runs.start(
        target, drafter, runs.Batch(prompts, new=8, capacity=64, chunk=8)
    )
    length = np.asarray(state.length)
    np.testing.assert_array_equal(
        np.asarray(state.tokens)[range(len(lengths)), length - 1],
        tokens[0, length - 1],
    )

    def along_the_text(slots, positions):
        return fakes.CERTAIN * jax.nn.one_hot(jnp.asarray(tokens)[0][positions], 64)

    def warp(logits, *path):
        return log_softmax(logits)

    context = Context(state.tokens, state.length, state.active, warp)
    draft, _ = drafter.propose(
        Target(target, state.cache), state.drafter, context, along_the_text
    )
    return np.asarray(draft.log_probs)


@pytest.mark.parametrize(
    "kind", [pytest.param("eagle", marks=pytest.mark.full), "eagle3"]
)
def test_the_unrolled_head_guesses_what_it_drafts(text, kind):
    target, tokens = text
    head, lengths = MAKE[kind](target), [4, 9, 17, 23]
    output = read(target, tokens)
    features = head.features(target, output)
    guesses = unroll(head, target, features, jnp.asarray(tokens), DEPTH)
    found = [np.asarray(log_softmax(head.logits(target, guess))) for guess in guesses]
    expected = drafted(target, head, tokens, lengths)
    for row, length in enumerate(lengths):
        for step in range(DEPTH):
            got = found[step][0, length + step - 1]
            np.testing.assert_allclose(got, expected[row, step], atol=2e-5)


def batch_of(target, tokens, start, size, padding=0):
    """A text with what the target knew, padded with tokens that mean nothing."""
    padded = np.pad(tokens, ((0, 0), (0, padding)), constant_values=63)
    output = read(target, padded)
    logits = target.unembed(target.norm(output.hidden))
    lanes = np.arange(padded.shape[1])
    return Batch(
        padded,
        ((lanes >= start) & (lanes < size))[None],
        output.hidden,
        output.taps,
        jax.nn.logsumexp(logits, axis=-1),
        jnp.argmax(logits, axis=-1),
    )


@pytest.fixture(scope="module")
def graded(text):
    """Loss, measures and slope of a batch."""
    target, _ = text
    head = fakes.eagle3(target, draft_vocabulary=24)
    objective = EagleObjective(jnp.arange(3, 51, 2), DEPTH)
    grade = jax.jit(jax.value_and_grad(objective, has_aux=True))
    return lambda batch: grade(head, target, batch)


def test_padding_changes_neither_loss_nor_slope(text, graded):
    target, tokens = text
    (loss, measures), slope = graded(batch_of(target, tokens, 3, 30))
    (padded, others), same = graded(batch_of(target, tokens, 3, 30, padding=16))
    np.testing.assert_allclose(loss, padded, rtol=1e-6)
    for one, other in zip(measures, others, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(slope), jax.tree.leaves(same), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert max(jnp.abs(leaf).max() for leaf in jax.tree.leaves(slope)) > 1e-3


@pytest.mark.parametrize("start", [3, 12, 20])
def test_bl_54_the_mask_is_shifted_with_the_labels(text, start):
    """Only guesses about tokens that the target wrote have a slope."""
    target, tokens = text
    size = 30
    head = fakes.eagle3(target)
    batch = batch_of(target, tokens, start, size)
    objective = EagleObjective(None, 1)

    def loss_of(moved):
        """The loss with the true features moved a little, position by position."""
        features = head.features(target, read(target, tokens)) + moved
        fixed = dataclasses.replace(Fixed(head), made=features)
        return objective(fixed, target, batch)[0]

    slope = jax.grad(loss_of)(jnp.zeros((*tokens.shape, 32)))
    felt = np.abs(np.asarray(slope)).max(axis=(0, 2)) > 0
    # A pair at t is about the token t + 2; earlier pairs are read by later ones.
    assert felt[start - 2] and felt[size - 3]
    assert not felt[size - 2 :].any()
    supervised = np.asarray(batch.written)[0].sum()
    assert supervised == size - start


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A head whose true features are given."""

    head: object
    made: object = None

    def features(self, model, output):
        return self.made

    def __getattr__(self, name):
        return getattr(self.head, name)


def test_eagle_1_learns_the_features_too(text):
    """A tenth of the cross-entropy, and the distance to the next true feature."""
    target, tokens = text
    head, batch = fakes.eagle(target), batch_of(target, tokens, 3, 30)
    objective = EagleObjective(None, 1, feature_weight=2.0)
    loss, _ = objective(head, target, batch)
    features = target.norm(batch.hidden)
    (guess,) = unroll(head, target, features, jnp.asarray(tokens), 1)
    wanted = jax.nn.log_softmax(target.unembed(features))[0]
    drafted = jax.nn.log_softmax(target.unembed(guess))[0]
    errors = []
    for at in range(1, 28):
        apart = np.abs(features[0, at + 1] - guess[0, at])
        distance = np.where(apart < 1, apart**2 / 2, apart - 0.5).mean()
        crossed = -(np.exp(wanted[at + 1]) * drafted[at]).sum()
        errors.append(0.1 * crossed + 2 * distance)
    np.testing.assert_allclose(loss, np.mean(errors), rtol=1e-5)
