"""From texts to a trained head: what each kind learns by, and where it is written."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxspec.checkpoints.atomic import replace
from jaxspec.checkpoints.exit_adapter import write_adapter
from jaxspec.checkpoints.known import KNOWN
from jaxspec.checkpoints.write_eagle import write_eagle3
from jaxspec.checkpoints.write_medusa import write_medusa
from jaxspec.errors import UserError
from jaxspec.loading import LanguageModel
from jaxspec.models.decoder import Decoder
from jaxspec.train.batches import Batches
from jaxspec.train.corpus import Corpus, Taps
from jaxspec.train.eagle import EagleObjective
from jaxspec.train.early_exit import ExitObjective
from jaxspec.train.medusa import MedusaObjective
from jaxspec.train.new_heads import (
    commonest_ids,
    new_adapter,
    new_eagle3,
    new_medusa,
    usual_taps,
)
from jaxspec.train.pins import pin
from jaxspec.train.trainer import Progress, Settings, Trainer


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


class Pupil(NamedTuple):
    """A head that learns: its parameters, by what, and how it is written."""

    parameters: Any
    objective: Any
    write: Callable[[Path, Any], None]


Known = Int[np.ndarray, " v"]


def _eagle(target: Decoder, recipe: HeadRecipe, known: Known) -> Pupil:
    inner = recipe.inner or target.config.intermediate_size
    head = new_eagle3(target, recipe.taps(target), known, inner, recipe.seed)
    objective = EagleObjective(jnp.asarray(known), recipe.depth, loss=recipe.loss)
    return Pupil(
        head, objective, lambda folder, head: write_eagle3(folder, head, known)
    )


def _medusa(target: Decoder, recipe: HeadRecipe, known: Known) -> Pupil:
    heads = new_medusa(target, recipe.depth)
    objective = MedusaObjective(jnp.asarray(known), loss=recipe.loss)
    return Pupil(heads, objective, lambda folder, h: write_medusa(folder, h, known))


def _early_exit(target: Decoder, recipe: HeadRecipe, known: Known) -> Pupil:
    layers = recipe.layers
    if layers is None:
        raise UserError("an early exit needs its `layers`, those before it")
    tap = recipe.taps(target).index(layers - 1)
    objective = ExitObjective(jnp.asarray(known), tap, recipe.depth, recipe.loss)

    def write(folder: Path, adapter: Any) -> None:
        write_adapter(folder, adapter, layers, known)

    return Pupil(new_adapter(target), objective, write)


KINDS = {"eagle": _eagle, "medusa": _medusa, "early-exit": _early_exit}


def train_head(
    target: LanguageModel,
    corpus: Corpus,
    recipe: HeadRecipe,
    settings: Settings,
    folder: Path,
) -> Iterator[Progress]:
    """Trains a head on texts that were read, and writes it to `folder` at the end.

    Yields:
        The progress of each step.

    Raises:
        UserError: the folder is of another training, or the recipe does not fit.
    """
    decoder = target.decoder
    count = min(recipe.draft_vocabulary, decoder.vocab_size)
    known = commonest_ids(corpus, decoder.vocab_size, count)
    pupil = KINDS[recipe.kind](decoder, recipe, known)
    made_by: dict[str, Any] = {
        "target": target.reference,
        "texts": corpus.recipe,
        "parts": len(corpus),
        **dataclasses.asdict(recipe),
        **dataclasses.asdict(settings),
    }
    pin(folder / "training.json", made_by)
    taps = recipe.taps(decoder)
    batches = Batches(corpus, taps, recipe.rows, recipe.longest, recipe.seed)
    trainer = Trainer(pupil.objective, decoder, batches, settings, folder)
    state = yield from trainer.run(pupil.parameters)
    pupil.write(folder, state.parameters)
    held_out = trainer.judge(state.parameters).to_json()
    write_card(folder, made_by, target.reference, held_out)


def write_card(folder: Path, made_by: dict, target: str, held_out: dict) -> None:
    """Says in `drafter.json` what a drafter is, how it was made and how good it is."""
    known = KNOWN.get(target)
    card = {
        "kind": made_by["kind"],
        "target": target,
        "target_sha256": made_by["texts"].get("sha256"),
        # The texts are the target's own, and so are the first weights.
        "licence": None if known is None else known.licence,
        "held_out": held_out,
        "made_by": made_by,
        "versions": {name: version(name) for name in ("jax", "flax", "optax")},
    }
    replace(folder / "drafter.json", (json.dumps(card, indent=2) + "\n").encode())
