"""From texts to a trained head: reading them, training, and writing the result."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxspec.checkpoints.write_eagle import write_eagle3
from jaxspec.loading import LanguageModel
from jaxspec.train.batches import Batches
from jaxspec.train.corpus import Corpus
from jaxspec.train.eagle import EagleObjective
from jaxspec.train.new_heads import commonest_ids, new_eagle3, usual_taps
from jaxspec.train.pins import pin
from jaxspec.train.trainer import Progress, Settings, Trainer, TrainState


@dataclasses.dataclass(frozen=True)
class EagleRecipe:
    """What an EAGLE-3 head is made by, its texts and its target apart.

    Attributes:
        rows: texts of a batch.
        longest: what a text has past so many tokens is left out.
        depth: guesses in a row.
        draft_vocabulary: how many of the commonest ids it drafts.
        inner: width of its MLP.
        seed: of its first weights, and of the order of the texts.
    """

    rows: int = 8
    longest: int = 512
    depth: int = 5
    draft_vocabulary: int = 4096
    inner: int = 1536
    seed: int = 0


def train_eagle(
    target: LanguageModel,
    corpus: Corpus,
    recipe: EagleRecipe,
    settings: Settings,
    folder: Path,
) -> Iterator[Progress]:
    """Trains a head on a corpus whose states were read, and writes it to `folder`.

    Yields:
        the progress of each step.
    """
    decoder = target.decoder
    taps = usual_taps(decoder.config.num_layers)
    pin(
        folder / "training.json",
        {
            "target": target.reference,
            "texts": corpus.recipe,
            "parts": len(corpus),
            **dataclasses.asdict(recipe),
            **dataclasses.asdict(settings),
        },
    )
    count = min(recipe.draft_vocabulary, decoder.vocab_size)
    known, _ = commonest_ids(corpus, decoder.vocab_size, count)
    head = new_eagle3(decoder, taps, known, recipe.inner, recipe.seed)
    batches = Batches(corpus, recipe.rows, recipe.longest, recipe.seed)
    objective = EagleObjective(jnp.asarray(known), recipe.depth)
    trainer = Trainer(objective, decoder, batches, settings, folder)
    state: Any = None
    for made in trainer.run(head):
        if isinstance(made, TrainState):
            state = made
        else:
            yield made
    write_eagle3(folder, state.parameters, known)
