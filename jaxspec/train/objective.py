"""What drafters learn from: the target's distributions over the ids that they know."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.distributions import log_softmax
from jaxspec.models.decoder import Decoder
from jaxspec.train.losses import LOSSES, shift
from jaxspec.train.measures import Guesses


class Batch(NamedTuple):
    """Texts of like length, padded at the end, and what the target knew.

    Attributes:
        tokens: of each text.
        written: which of them the target wrote: those that a drafter learns to guess.
        hidden: of the target's last block, un-normed.
        taps: un-normed outputs of the tapped blocks.
        log_total: the logarithm of the sum of the exponentials of its logits.
        likeliest: the id of the largest.
    """

    tokens: Int[Array, "B T"]
    written: Bool[Array, "B T"]
    hidden: Float[Array, "B T E"]
    taps: Float[Array, "B T taps E"]
    log_total: Float[Array, "B T"]
    likeliest: Int[Array, "B T"]


class Lesson(NamedTuple):
    """What a drafter is to guess after the tokens of each position.

    Attributes:
        log_probs: the target's, of the `known` ids.
        likeliest: the target's.
        supervised: whether the target wrote the token that follows.
        known: ids; None: all.
        loss: one of `LOSSES`.
    """

    log_probs: Float[Array, "B T v"]
    likeliest: Int[Array, "B T"]
    supervised: Bool[Array, "B T"]
    known: Int[Array, " v"] | None
    loss: str

    @classmethod
    def of(cls, model: Decoder, batch: Batch, known: Any, loss: str) -> "Lesson":
        """What the target knew after each position, about the next."""
        normed = model.norm(batch.hidden.astype(model.dtype))
        logits = model.unembed(normed, known)
        log_probs = logits - batch.log_total[..., None]
        return cls(log_probs, batch.likeliest, shift(batch.written, 1), known, loss)

    def after(self, further: int) -> "Lesson":
        """About what comes `further` positions later: all of it is shifted alike."""
        return Lesson(
            shift(self.log_probs, further),
            shift(self.likeliest, further),
            shift(self.supervised, further),
            self.known,
            self.loss,
        )

    def grade(self, logits: Float[Array, "B T v"]) -> tuple[Array, Guesses]:
        """The loss of guesses at each position, and what they are worth."""
        draft = log_softmax(logits)
        guesses = Guesses.of(self.log_probs, draft, self.likeliest, self.known)
        return LOSSES[self.loss](self.log_probs, draft), guesses


def float_states(model: Decoder, batch: Batch) -> Batch:
    """The batch with its states as the model computes them."""
    hidden, taps = (each.astype(model.dtype) for each in (batch.hidden, batch.taps))
    return batch._replace(hidden=hidden, taps=taps)


def weighted(losses: list[Float[Array, ""]], decay: float) -> Float[Array, ""]:
    """Each depth counts `decay` times the one before it."""
    return jnp.sum(jnp.stack([decay**d * loss for d, loss in enumerate(losses)]))
