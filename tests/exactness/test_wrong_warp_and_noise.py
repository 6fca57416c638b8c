"""Options on one side only, and noise by wrong keys: chi-square must find them all."""

import functools

import jax.numpy as jnp
import pytest

from jaxspec.core import noise
from jaxspec.core.accept import Rule, block, rejection
from jaxspec.core.distributions import log_softmax
from jaxspec.decoding import loop, round
from jaxspec.decoding.randomness import Randomness
from jaxspec.decoding.round import bind_noise, target_distribution
from jaxspec.drafters.draft_model import DraftModel
from tests import runs
from tests.exactness import tables
from tests.exactness.controls import (
    COLD,
    WARM,
    Control,
    check,
    in_turn,
    smallest_p_values,
)
from tests.exactness.tables import DRAFTERS, NODES

# Options on one side only


def path_ignored(state, options, logits, path_tokens, path_count):
    """Penalties count the committed history only."""
    return target_distribution(
        state, options, logits, path_tokens[..., :0], jnp.zeros_like(path_count)
    )


def only_in_the_last_row(option):
    def distribution(state, options, logits, *path):
        without = options.sampling._replace(**{option: None})
        rest = options._replace(sampling=without)
        last = jnp.arange(logits.shape[1]) == logits.shape[1] - 1
        own, others = (
            target_distribution(state, each, logits, *path)[0]
            for each in (options, rest)
        )
        return jnp.where(last[:, None], own, others), jnp.zeros(logits.shape[:2], bool)

    return distribution


def unwarped(state, options, logits, *path):
    return log_softmax(logits), jnp.zeros(logits.shape[:2], bool)


VERIFY_CONTROLS = {
    "right": Control(
        target_distribution,
        WARM | {"frequency_penalty": 0.8, "min_p": 0.05, "logit_bias": {3: -1.0}},
        right=True,
    ),
    "path ignored": Control(path_ignored, WARM | {"frequency_penalty": 1.5}),
    "min-p in the last row only": Control(
        only_in_the_last_row("min_p"), WARM | {"min_p": 0.3}
    ),
    "bias in the last row only": Control(
        only_in_the_last_row("logit_bias"), WARM | {"logit_bias": {3: -2.0}}
    ),
    "target raw, draft warped": Control(unwarped, COLD),
}


@functools.cache
def by_verify():
    parts = [control.part for control in VERIFY_CONTROLS.values()]
    return smallest_p_values(
        VERIFY_CONTROLS,
        DRAFTERS["draft model"],
        patch=(round, "target_distribution", in_turn(*parts)),
    )


@pytest.mark.parametrize("name", VERIFY_CONTROLS)
def test_an_option_on_one_side_only_is_found(name):
    """BL-12, 27 and 29."""
    check(VERIFY_CONTROLS, by_verify(), name)


# Noise by other keys


class ByPosition(Randomness):
    """Noise of (row seed, position of the token, purpose): not of the round."""

    def draft(self, slots, positions):
        return self._by_place(positions, noise.DRAFT_TOKEN)

    def accept(self, nodes, depth):
        place = self.length[:, None] + jnp.arange(nodes)
        return noise.uniforms(self.keys, 0 * self.length, place, noise.ACCEPT)

    def next_token(self, accepted, accepting):
        place = (self.length + accepted)[:, None]
        return self._by_place(place, noise.NEXT_TOKEN)[:, 0]

    def _by_place(self, place, purpose):
        size = self.vocabulary
        return noise.gumbels(self.keys, 0 * self.length, place, purpose, size)


def every_round_alike(state, options, vocabulary):
    """The key does not know how long the text is."""
    return bind_noise(state._replace(length=state.prompt_length), options, vocabulary)


def by_position(state, options, vocabulary):
    return ByPosition(*bind_noise(state, options, vocabulary))


class NoiseInTurn:
    """Takes each row's noise from its own kind."""

    def __init__(self, kinds, *args):
        kinds = [kind(*args) for kind in kinds]
        for verb in ("draft", "accept", "next_token"):
            setattr(self, verb, in_turn(*(getattr(kind, verb) for kind in kinds)))


KEY_CONTROLS = {
    "right": Control((rejection, bind_noise), right=True),
    "the same in every round": Control((rejection, every_round_alike)),
    # A rule that never looks past the first refusal uses no noise twice.
    "rejection by position": Control((rejection, by_position), right=True),
    "block": Control((block, bind_noise), right=True),
    "block by position": Control((block, by_position)),
}


@functools.cache
def by_keys():
    parts = [control.part for control in KEY_CONTROLS.values()]
    rules, kinds = zip(*parts, strict=True)
    # Where the bias of a block is largest: two ids, one of which the draft likes.
    target, draft = (
        tables.with_table([liking, 0, -30, -30, -30, -30]) for liking in (0, 1)
    )
    return smallest_p_values(
        KEY_CONTROLS,
        DraftModel(draft, NODES),
        target,
        patch=(loop, "bind_noise", functools.partial(NoiseInTurn, kinds)),
        rule=Rule("in turn", in_turn(*rules)),
    )


@pytest.mark.parametrize("name", KEY_CONTROLS)
def test_noise_by_wrong_keys_is_found(name):
    check(KEY_CONTROLS, by_keys(), name)


class ApartOnAcceptance(Randomness):
    """Draft and next token share the noise of a position, the test has its own."""

    def accept(self, nodes, depth):
        place = self.length[:, None] + jnp.arange(depth + 1)
        size = self.vocabulary
        return noise.gumbels(self.keys, 0 * self.length, place, noise.ACCEPT, size)

    def next_token(self, accepted, accepting):
        shared = super().accept(nodes=0, depth=accepting.shape[1] - 1)
        return super().next_token(accepted, shared)


COUPLED_CONTROLS = {
    "right": Control(bind_noise, right=True),
    "acceptance apart": Control(lambda *args: ApartOnAcceptance(*bind_noise(*args))),
}


@functools.cache
def by_coupling():
    kinds = [control.part for control in COUPLED_CONTROLS.values()]
    return smallest_p_values(
        COUPLED_CONTROLS,
        DRAFTERS["draft model"],
        patch=(loop, "bind_noise", functools.partial(NoiseInTurn, kinds)),
        # So few runs that they may be slow.
        compiler_options=runs.QUICK,
        rule="coupled",
    )


@pytest.mark.parametrize("name", COUPLED_CONTROLS)
def test_a_coupling_of_half_the_draws_is_found(name):
    check(COUPLED_CONTROLS, by_coupling(), name)
