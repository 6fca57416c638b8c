"""From texts to a trained drafter: begun, trained, written, and described in a card."""

import dataclasses
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxspec.checkpoints.atomic import replace
from jaxspec.checkpoints.disk import sha256
from jaxspec.checkpoints.known import KNOWN
from jaxspec.errors import UserError
from jaxspec.loading import LanguageModel
from jaxspec.models.decoder import Decoder
from jaxspec.pins import pin
from jaxspec.train.batches import Batches
from jaxspec.train.checkpoints import named_leaves
from jaxspec.train.corpus import Corpus
from jaxspec.train.kinds import KINDS, Pupil
from jaxspec.train.new_heads import commonest_ids
from jaxspec.train.recipe import HeadRecipe
from jaxspec.train.trainer import Progress, Settings, Trainer


@dataclasses.dataclass(frozen=True)
class Training:
    """A drafter that is about to learn, or that goes on: `begin` checks all of it."""

    target: LanguageModel
    corpus: Corpus
    recipe: HeadRecipe
    settings: Settings
    folder: Path
    pupil: Pupil
    made_by: dict[str, Any]

    @classmethod
    def begin(
        cls,
        target: LanguageModel,
        corpus: Corpus,
        recipe: HeadRecipe,
        settings: Settings,
        folder: Path,
    ) -> "Training":
        """Prepares a training in a folder; texts need not be read yet.

        Raises:
            UserError: the folder is of another training, or the recipe does not fit
                the target or the drafter that it starts from.
        """
        pupil = new_pupil(target.decoder, corpus, recipe)
        made_by: dict[str, Any] = {
            "target": target.reference,
            "texts": corpus.recipe,
            "parts": len(corpus),
            **dataclasses.asdict(recipe),
            **dataclasses.asdict(settings),
        }
        if recipe.start is not None:
            made_by["start_sha256"] = _weights_sha256(Path(recipe.start))
        pin(folder / "training.json", made_by)
        return cls(target, corpus, recipe, settings, folder, pupil, made_by)

    def run(self) -> Iterator[Progress]:
        """Trains on texts that were read, and writes the best drafter to the folder.

        The best is that of the checkpoint whose guesses of held-out texts are worth
        most.

        Yields:
            The progress of each step.
        """
        decoder, recipe = self.target.decoder, self.recipe
        taps = recipe.taps(decoder)
        batches = Batches(self.corpus, taps, recipe.rows, recipe.longest, recipe.seed)
        objective = self.pupil.objective
        trainer = Trainer(objective, decoder, batches, self.settings, self.folder)
        best = yield from trainer.run(self.pupil.parameters)
        self.pupil.write(self.folder, best.parameters)
        held_out = trainer.judge(best.parameters).to_json() | {"step": int(best.step)}
        write_card(self.folder, self.made_by, held_out)


def new_pupil(decoder: Decoder, corpus: Corpus, recipe: HeadRecipe) -> Pupil:
    """A new drafter of the ids that the texts have most, or one trained before.

    The latter drafts the same ids as a new one would: it goes on with other texts, and
    what it knows of ids that are common in these too is kept.

    Raises:
        UserError: the one trained before is not as the recipe has it.
    """
    kind, size = KINDS[recipe.kind], decoder.vocab_size
    count = min(recipe.draft_vocabulary, size)
    if recipe.start is None:
        return kind.make(decoder, recipe, commonest_ids(corpus, size, count))
    trained, known = kind.read(Path(recipe.start), decoder, recipe)
    if known is None:
        raise UserError(
            f"{recipe.start} drafts all ids, but a draft vocabulary of {count} is "
            "asked for; start from a drafter that was trained with one"
        )
    ids = commonest_ids(corpus, size, count, favoured=known)
    new = kind.make(decoder, recipe, ids)
    parameters = kind.redraft(trained, known, new.parameters, ids)
    _refuse_other_shapes(recipe.start, parameters, new.parameters)
    return new._replace(parameters=parameters)


def _refuse_other_shapes(start: str, found: Any, wanted: Any) -> None:
    there, here = (
        {name: leaf.shape for name, leaf in named_leaves(tree).items()}
        for tree in (found, wanted)
    )
    names = [n for n in sorted({*there, *here}) if there.get(n) != here.get(n)]
    if names:
        name = names[0]
        raise UserError(
            f"{start} is not as it is asked for: {name} (there {there.get(name)}, "
            f"asked {here.get(name)})"
        )


def _weights_sha256(start: Path) -> str:
    """Of the one file of weights that every kind has."""
    file = start if start.is_file() else next(start.glob("*.safetensors"), None)
    if file is None:
        raise UserError(f"{start}: holds no weights in safetensors to start from")
    return sha256(file)


def write_card(folder: Path, made_by: dict, held_out: dict) -> None:
    """Says in `drafter.json` what a drafter is, how it was made and how good it is."""
    texts, known = made_by["texts"], KNOWN.get(made_by["target"])
    # The first weights are the target's, and so are the texts but those that are given.
    given = texts.get("texts") is not None
    card = {
        "kind": made_by["kind"],
        "target": made_by["target"],
        "target_sha256": texts.get("sha256"),
        "licence": None if known is None or given else known.licence,
        "held_out": held_out,
        "made_by": made_by,
        "versions": {name: version(name) for name in ("jax", "flax", "optax")},
    }
    replace(folder / "drafter.json", (json.dumps(card, indent=2) + "\n").encode())
