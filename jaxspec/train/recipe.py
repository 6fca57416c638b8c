"""What a drafter is trained as."""

import dataclasses

from jaxspec.errors import UserError
from jaxspec.models.decoder import Decoder
from jaxspec.train.corpus import Taps
from jaxspec.train.new_heads import usual_taps


@dataclasses.dataclass(frozen=True)
class HeadRecipe:
    """What a head is made by, its texts, its target and the length of training apart.

    Attributes:
        kind: one of `KINDS`.
        rows: texts of a batch.
        longest: what a text has past so many tokens is left out.
        depth: guesses in a row: heads of Medusa, unrolled passes of EAGLE.
        draft_vocabulary: how many of the commonest ids it drafts.
        inner: width of EAGLE's MLP; None: the target's.
        layers: of the target before an early exit.
        cut: the layers of the target that a draft model is made of.
        start: the folder of a drafter that was trained before, to go on from.
        loss: one of `LOSSES`.
        seed: of its first weights, and of the order of the texts.
    """

    kind: str
    rows: int = 8
    longest: int = 512
    depth: int = 4
    draft_vocabulary: int = 4096
    inner: int | None = None
    layers: int | None = None
    cut: tuple[int, ...] = ()
    start: str | None = None
    loss: str = "forward-kl"
    seed: int = 0

    def taps(self, target: Decoder) -> Taps:
        """The blocks whose outputs it needs.

        Those of EAGLE where they will do, so that one reading of the texts serves all.

        Raises:
            UserError: the target has too few for it.
        """
        count = target.config.num_layers
        usual = usual_taps(count)
        if self.layers is not None and not 0 < self.layers < count:
            raise UserError(
                f"the exit is after {self.layers} layers, expected 1 to {count - 1} "
                f"(the target has {count})"
            )
        if self.layers is None or self.layers - 1 in usual:
            return usual
        return (self.layers - 1,)
