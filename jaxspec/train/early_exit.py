"""Training of exit adapters: the first layers' output is made to look like the last.

The layers are the target's own and stay as they are. Compare Kangaroo, whose adapter
has a layer of attention (Liu et al. 2024).
"""

import dataclasses
import functools

import jax
from jaxtyping import Array, Float, Int

from jaxspec.drafters.early_exit import ExitAdapter
from jaxspec.models.decoder import Decoder
from jaxspec.train.losses import mean_over
from jaxspec.train.measures import Measures, measure
from jaxspec.train.objective import Batch, Lesson, float_states


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["known"],
    meta_fields=["tap", "depth", "loss"],
)
@dataclasses.dataclass(frozen=True)
class ExitObjective:
    """What an exit adapter learns.

    Attributes:
        known: the ids that are drafted; None: all.
        tap: the place of the exit's block among the taps.
        depth: of the rounds that are measured; the loss does not depend on it: drafts
            that were accepted are the text itself.
        loss: one of `LOSSES`.
    """

    known: Int[Array, " v"] | None
    tap: int
    depth: int = 4
    loss: str = "forward-kl"

    def __call__(
        self, adapter: ExitAdapter, model: Decoder, batch: Batch
    ) -> tuple[Float[Array, ""], Measures]:
        """The loss of a batch, and what the guesses are worth."""
        batch = float_states(model, batch)
        adapted = adapter(batch.taps[:, :, self.tap])
        lesson = Lesson.of(model, batch, self.known, self.loss)
        logits = model.unembed(model.norm(adapted), self.known)
        error, guesses = lesson.grade(logits)
        made = [guesses.begun(depth) for depth in range(self.depth)]
        loss = mean_over(error, lesson.supervised)
        return loss, measure(made, lesson.supervised)
