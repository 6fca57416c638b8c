"""Training of Medusa heads: each guesses one of the tokens after the next.

Cai et al. 2024 (Medusa): Medusa-1, the target stays as it is.
"""

import dataclasses
import functools

import jax
from jaxtyping import Array, Float, Int

from jaxspec.drafters.medusa import Heads
from jaxspec.models.decoder import Decoder
from jaxspec.train.losses import mean_over
from jaxspec.train.measures import Measures, measure
from jaxspec.train.objective import Batch, Lesson, float_states, weighted


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["known"],
    meta_fields=["decay", "loss"],
)
@dataclasses.dataclass(frozen=True)
class MedusaObjective:
    """What Medusa heads learn that share the target's vocabulary head.

    Attributes:
        known: the ids that they draft; None: all.
        decay: what a head counts against the one before it.
        loss: one of `LOSSES`.
    """

    known: Int[Array, " v"] | None
    decay: float = 0.8
    loss: str = "forward-kl"

    def __call__(
        self, heads: Heads, model: Decoder, batch: Batch
    ) -> tuple[Float[Array, ""], Measures]:
        """The loss of a batch, and what the guesses are worth."""
        batch = float_states(model, batch)
        normed = model.norm(batch.hidden)
        # The target's own head says the next token: the first guess is about another.
        first = Lesson.of(model, batch, self.known, self.loss).after(1)
        losses, made = [], []
        for head in range(heads.weights.shape[0]):
            lesson = first.after(head)
            logits = model.unembed(heads.features(normed, head), self.known)
            error, guesses = lesson.grade(logits)
            losses.append(mean_over(error, lesson.supervised))
            made.append(guesses)
        return weighted(losses, self.decay), measure(made, first.supervised)
