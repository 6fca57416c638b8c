"""Training of a draft model that is cut from the target: some of its own layers.

Knowledge distillation on what the target itself wrote: Zhou et al. 2024 (DistillSpec),
with the target's own samples as data. The embedding and the vocabulary head stay the
target's.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
from jaxtyping import Array, Float, Int

from jaxspec.checkpoints.cut_draft import cut_decoder
from jaxspec.models.decoder import Decoder
from jaxspec.train.capture import read_whole
from jaxspec.train.losses import mean_over
from jaxspec.train.measures import Measures, measure
from jaxspec.train.objective import Batch, Lesson


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["known"],
    meta_fields=["layers", "depth", "loss"],
)
@dataclasses.dataclass(frozen=True)
class DraftObjective:
    """What a cut draft model learns: the target's distribution of each next token.

    Attributes:
        known: the ids that are drafted; None: all.
        layers: of the target, that it began as.
        depth: of the rounds that are measured; the loss does not depend on it: drafts
            that were accepted are the text itself.
        loss: one of `LOSSES`.
    """

    known: Int[Array, " v"] | None
    layers: tuple[int, ...]
    depth: int = 4
    loss: str = "forward-kl"

    def __call__(
        self, own: Mapping[str, Array], model: Decoder, batch: Batch
    ) -> tuple[Float[Array, ""], Measures]:
        """The loss of a batch, and what the guesses are worth."""
        draft = cut_decoder(model, self.layers, own)
        hidden = read_whole(draft, batch.tokens).hidden
        logits = draft.unembed(draft.norm(hidden), self.known)
        lesson = Lesson.of(model, batch, self.known, self.loss)
        error, guesses = lesson.grade(logits)
        made = [guesses.begun(depth) for depth in range(self.depth)]
        loss = mean_over(error, lesson.supervised)
        return loss, measure(made, lesson.supervised)
