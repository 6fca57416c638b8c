"""A small target, a corpus that it wrote, and a training; also run as a program."""

import dataclasses
import pathlib
import sys

import numpy as np

from jaxspec.generator import Generator
from jaxspec.loading import LanguageModel
from jaxspec.train.capture import read_states
from jaxspec.train.corpus import Corpus
from jaxspec.train.heads import Training
from jaxspec.train.recipe import HeadRecipe
from jaxspec.train.texts import Recipe, answer_prompts
from jaxspec.train.trainer import Settings
from tests import fakes

# Block 2 of 5 is the last that `usual_taps` names.
LAYERS, TAPS = 6, (1, 2, 2)
RECIPE = Recipe("tiny", "0" * 64, rows=16, answer_tokens=24, seed=3, prompts="made")
TRAINING = {"rows": 4, "longest": 64, "depth": 2, "draft_vocabulary": 16}
SETTINGS = Settings(steps=10, warm_up=2, check_every=3, learning_rate=3e-3)


def target() -> LanguageModel:
    return LanguageModel("tiny", fakes.tiny(1, layers=LAYERS))


def prompts(count=40) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 64, rng.integers(2, 7)).tolist() for _ in range(count)]


def corpus(model: LanguageModel, folder: pathlib.Path) -> Corpus:
    made = Corpus.create(folder, RECIPE.to_json())
    generator = Generator(model, capacity=64)
    assert list(answer_prompts(generator, made, RECIPE, prompts())) == [0, 16, 32, 40]
    for _ in read_states(model.decoder, made, TAPS):
        pass
    return made


def training(model, texts, folder, kind="eagle", changes=None, **special):
    """One of a kind; `changes` are to the settings, `special` is its recipe's own."""
    settings = dataclasses.replace(SETTINGS, **(changes or {}))
    recipe = HeadRecipe(kind, **TRAINING | special)
    return Training.begin(model, texts, recipe, settings, folder).run()


if __name__ == "__main__":
    where, out = map(pathlib.Path, sys.argv[1:])
    for done in training(target(), Corpus.open(where), out):
        print(done.step, flush=True)
