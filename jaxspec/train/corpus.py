"""Texts with what the target knew while it read them, in a folder of sharded files.

A part is a file of texts and, once they were read, a file of hidden states; each is
written under another name first, so that an interrupted job leaves whole parts only.
"""

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import BFloat16, Float, Int

from jaxspec.checkpoints.atomic import replace
from jaxspec.checkpoints.fields import read_json
from jaxspec.checkpoints.head_files import open_weights
from jaxspec.errors import UserError, refuse
from jaxspec.pins import pin

_RECIPE = "recipe.json"
_PART = re.compile(r"texts-(\d{5})\.safetensors")


# Blocks of the target, counted from 0.
Taps = tuple[int, ...]


def states_of(taps: Taps) -> str:
    """What files of states with these taps are called."""
    return "-".join(map(str, ("states", *taps)))


class Texts(NamedTuple):
    """Texts end to end.

    Attributes:
        tokens: of all texts.
        lengths: of each.
        starts: where in a text the target began to write: what stands before was given
            to it, and no drafter is trained to guess it.
    """

    tokens: Int[np.ndarray, " N"]
    lengths: Int[np.ndarray, " n"]
    starts: Int[np.ndarray, " n"]

    @property
    def written(self) -> int:
        """Tokens that the target wrote."""
        return int((self.lengths - self.starts).sum())

    @property
    def fit(self) -> bool:
        """Whether lengths and starts are those of texts that make up the tokens."""
        shapes = self.lengths.shape == self.starts.shape == (self.lengths.size,)
        return (
            shapes
            and bool((self.starts >= 0).all() and (self.starts <= self.lengths).all())
            and self.tokens.shape == (int(self.lengths.sum()),)
            and bool((self.tokens >= 0).all())
        )

    def each(self) -> Iterator[Int[np.ndarray, " T"]]:
        """The tokens of one text after the other."""
        return iter(np.split(self.tokens, np.cumsum(self.lengths)[:-1]))


class States(NamedTuple):
    """What the target knew after each token of a part's texts, end to end.

    Attributes:
        hidden: of the last block, un-normed.
        taps: un-normed outputs of the tapped blocks.
        log_total: the logarithm of the sum of the exponentials of its logits.
        likeliest: the id of the largest.
    """

    hidden: BFloat16[np.ndarray, "N E"]
    taps: BFloat16[np.ndarray, "N taps E"]
    log_total: Float[np.ndarray, " N"]
    likeliest: Int[np.ndarray, " N"]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A folder of parts, numbered from 0."""

    folder: Path

    @classmethod
    def create(cls, folder: str | os.PathLike[str], recipe: Mapping[str, Any]):
        """Opens the folder, or makes it; `recipe` is what its texts are made by.

        Raises:
            UserError: the folder holds texts that were made in another way.
        """
        corpus = cls(Path(folder))
        pin(corpus.folder / _RECIPE, recipe)
        return corpus

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> "Corpus":
        """Opens a folder that holds texts.

        Raises:
            UserError: it does not.
        """
        corpus = cls(Path(folder))
        if not (corpus.folder / _RECIPE).is_file() or not len(corpus):
            raise UserError(
                f"{folder}: holds no training texts; make them with jaxspec train data"
            )
        return corpus

    @property
    def recipe(self) -> dict[str, Any]:
        """What the texts were made by."""
        return read_json(self.folder / _RECIPE)

    def refuse_other(self, model: str, sha256: str) -> None:
        """Refuses to teach a drafter of one model what another has written.

        Raises:
            UserError: the texts are of other weights than those with this hash.
        """
        recipe = self.recipe
        if recipe.get("sha256") != sha256:
            raise UserError(
                f"{self.folder}: these texts are of {recipe.get('model')}, not of "
                f"{model} (the files differ); let it write its own"
            )

    def __len__(self) -> int:
        """Parts that follow one another from 0."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        there = {int(match[1]) for name in names if (match := _PART.fullmatch(name))}
        return next(part for part in range(len(there) + 1) if part not in there)

    def write_texts(self, part: int, texts: Texts) -> None:
        """Adds a part."""
        self._write("texts", part, texts)

    def texts(self, part: int) -> Texts:
        """Reads the texts of a part.

        Raises:
            UserError: the file is broken.
        """
        texts = Texts(*self._read("texts", part, Texts._fields))
        if not texts.fit:
            raise UserError(
                f"{self.path('texts', part)}: its lengths and starts do not fit its "
                "tokens; make the texts again"
            )
        return texts

    def write_states(self, part: int, taps: Taps, states: States) -> None:
        """Adds what the target knew of a part's texts, `taps` being those of it."""
        self._write(states_of(taps), part, states)

    def has_states(self, part: int, taps: Taps) -> bool:
        """Whether the part's texts were read, with these taps."""
        return self.path(states_of(taps), part).is_file()

    def states(self, part: int, taps: Taps) -> States:
        """Reads what the target knew of a part's texts."""
        return States(*self._read(states_of(taps), part, States._fields))

    def path(self, kind: str, part: int) -> Path:
        """Where the `texts`, or what `states_of` names, of a part lie."""
        return self.folder / f"{kind}-{part:05}.safetensors"

    def _write(self, kind: str, part: int, tensors: Any) -> None:
        from safetensors.flax import save

        arrays = {name: jnp.asarray(a) for name, a in tensors._asdict().items()}
        replace(self.path(kind, part), save(arrays))

    def _read(self, kind: str, part: int, names: tuple[str, ...]) -> list[np.ndarray]:
        path = self.path(kind, part)
        tensors = open_weights(path)
        refuse([f"{path}: tensor `{n}` is missing" for n in names if n not in tensors])
        return [tensors[n].rows(0, tensors[n].shape[0]) for n in names]
