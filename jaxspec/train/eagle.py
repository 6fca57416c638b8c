"""Training of EAGLE heads: unrolled on their own guesses, as they draft.

The training-time test of Li et al. 2025 (EAGLE-3). It is the head's forward pass of
drafting with another mask, so that training and drafting cannot part.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.drafters.eagle_head import Eagle3Head, EagleHead
from jaxspec.models.decoder import Decoder
from jaxspec.train.losses import mean_over, shift, smooth_l1
from jaxspec.train.measures import Measures, measure
from jaxspec.train.objective import Batch, Lesson, float_states, weighted
from jaxspec.types import Output

Head = EagleHead | Eagle3Head
# Of the cross-entropy beside a distance of features: Li et al. 2024 (EAGLE).
CLASS_WEIGHT = 0.1


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["known"],
    meta_fields=["depth", "decay", "feature_weight", "loss"],
)
@dataclasses.dataclass(frozen=True)
class EagleObjective:
    """What an EAGLE head learns.

    Attributes:
        known: the ids of its reduced vocabulary; None: it knows all.
        depth: how many tokens it guesses in a row.
        decay: what a guess counts against the one before it.
        feature_weight: of the distance between guessed and true features, which makes
            sense for EAGLE-1 only: those of EAGLE-3 are free.
        loss: one of `LOSSES`.
    """

    known: Int[Array, " v"] | None
    depth: int = 5
    decay: float = 0.8
    feature_weight: float = 0.0
    loss: str = "forward-kl"

    def __call__(
        self, head: Head, model: Decoder, batch: Batch
    ) -> tuple[Float[Array, ""], Measures]:
        """The loss of a batch, and what the guesses are worth."""
        batch = float_states(model, batch)
        features = head.features(model, Output(batch.hidden, batch.taps))
        # A pair has the next token already: its guess is about the one after.
        lesson = Lesson.of(model, batch, self.known, self.loss).after(1)
        lanes = jnp.arange(batch.tokens.shape[1])
        losses, made = [], []
        for step, guess in enumerate(
            unroll(head, model, features, batch.tokens, self.depth)
        ):
            error, guesses = lesson.grade(head.logits(model, guess))
            if self.feature_weight:
                distance = smooth_l1(shift(features, 1), guess)
                error = CLASS_WEIGHT * error + self.feature_weight * distance
            # A guess is fed on from `step` places before: the first ones are not.
            losses.append(mean_over(error, lesson.supervised & (lanes >= step)))
            made.append(guesses.begun(step))
        return weighted(losses, self.decay), measure(made, lesson.supervised)


def unroll(
    head: Head,
    model: Decoder,
    features: Float[Array, "B T E"],
    tokens: Int[Array, "B T"],
    depth: int,
) -> list[Float[Array, "B T E"]]:
    """What the head guesses, 1 to `depth` times in a row, from each position.

    A pair stands at its feature's position t, as in drafting, and has token t + 1. The
    guess after `step` others at t is about the token t + 2; the true features that it
    goes back to end at t - step.
    """
    rows, length = tokens.shape
    lanes = jnp.arange(length)
    positions = jnp.broadcast_to(lanes, tokens.shape)
    embedded = head.embed(model, shift(tokens, 1))
    cache = head.init_cache(rows, 0, 0)
    scratch = head.init_scratch(rows, depth * length)
    guesses = []
    for step in range(depth):
        visible = visible_pairs(length, depth, step)
        hidden, scratch = head.run_rows(
            cache,
            scratch,
            head.join(embedded, features),
            positions,
            step * length + lanes,
            jnp.broadcast_to(visible, (rows, *visible.shape)),
        )
        guesses.append(head.guess(hidden))
        features = jnp.pad(guesses[-1], ((0, 0), (1, 0), (0, 0)))[:, :-1]
    return guesses


def visible_pairs(length: int, depth: int, step: int) -> Bool[Array, "T P"]:
    """Which pairs a pass sees: true ones, then one of its own each step.

    The pairs that the pass of step i has read lie in slots `i * length` on.
    """
    query, key = jnp.arange(length)[:, None], jnp.arange(length)
    back = query - key
    blocks = [
        back >= step if block == 0 else (back == step - block) & (block <= step)
        for block in range(depth)
    ]
    return jnp.concatenate(blocks, axis=1)
