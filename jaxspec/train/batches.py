"""Batches of training texts, in an order that a seed fixes."""

import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jaxspec.checkpoints.head_files import open_weights
from jaxspec.checkpoints.tensors import StoredTensor
from jaxspec.errors import UserError, refuse
from jaxspec.train.capture import pad_texts
from jaxspec.train.corpus import Corpus, States, Taps, states_of
from jaxspec.train.objective import Batch

# Every so many texts one is held out, to see what was learned. It is odd, since of
# texts that the model wrote every other is greedy.
HELD_OUT = 31
# Texts of like length are sought among so many batches.
SORTED_TOGETHER = 16


class _Text(NamedTuple):
    part: int
    first: int
    size: int
    start: int


class Batches:
    """All texts of a corpus whose states were kept, `rows` to a batch.

    Attributes:
        steps: batches of one pass over the texts that are not held out.
    """

    def __init__(self, corpus: Corpus, taps: Taps, rows: int, longest: int, seed: int):
        """`longest`: what a longer text has past so many tokens is left out."""
        self._states = states_of(taps)
        self._files: dict[tuple[str, int], Mapping[str, StoredTensor]] = {}
        self._corpus, self.rows, self._longest = corpus, rows, longest
        self._seed = seed
        self._texts = list(self._find())
        numbers = np.arange(len(self._texts))
        self._held_out = numbers[numbers % HELD_OUT == 0]
        self._seen = numbers[numbers % HELD_OUT != 0]
        self.steps = self._seen.size // rows
        if not self.steps:
            raise UserError(
                f"{corpus.folder} holds {numbers.size} texts, too few for a batch of "
                f"{rows} beside those held out; choose a smaller batch or make more"
            )

    def at(self, step: int) -> Batch:
        """The batch of a step: the same whenever, and by whomever, it is asked for."""
        epoch, index = divmod(step, self.steps)
        return self._read(self._order(epoch)[index])

    def held_out(self) -> Iterator[Batch]:
        """The texts that no step sees."""
        by_size = sorted(self._held_out, key=lambda n: self._texts[n].size)
        for first in range(0, len(by_size), self.rows):
            yield self._read(np.array(by_size[first : first + self.rows]))

    def _find(self) -> Iterator[_Text]:
        for part in range(len(self._corpus)):
            texts = self._corpus.texts(part)
            firsts = np.cumsum(texts.lengths) - texts.lengths
            for first, size, start in zip(
                firsts, texts.lengths, texts.starts, strict=True
            ):
                if start < size:
                    yield _Text(part, int(first), int(size), int(start))

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def _order(self, epoch: int) -> list[np.ndarray]:
        """Shuffled; then texts of like length brought together, and shuffled again."""
        rng = np.random.default_rng((self._seed, epoch))
        shuffled = rng.permutation(self._seen)[: self.steps * self.rows]
        batches: list[np.ndarray] = []
        for first in range(0, shuffled.size, SORTED_TOGETHER * self.rows):
            group = shuffled[first : first + SORTED_TOGETHER * self.rows]
            sizes = [self._texts[number].size for number in group]
            group = group[np.argsort(sizes, kind="stable")]
            batches += list(group.reshape(-1, self.rows))
        return [batches[index] for index in rng.permutation(len(batches))]

    def _read(self, numbers: np.ndarray) -> Batch:
        texts = [self._texts[number] for number in numbers]
        kept = [text._replace(size=min(text.size, self._longest)) for text in texts]
        rows = [self._rows_of(text) for text in kept]
        tokens = pad_texts([row[0] for row in rows], self.rows)
        lanes = np.arange(tokens.shape[1])
        written = np.zeros(tokens.shape, bool)
        states = [
            np.zeros((*tokens.shape, *each.shape[1:]), each.dtype)
            for each in rows[0][1:]
        ]
        for row, text in enumerate(kept):
            written[row] = (text.start <= lanes) & (lanes < text.size)
            for whole, each in zip(states, rows[row][1:], strict=True):
                whole[row, : text.size] = each
        return Batch(tokens, written, *states)  # pyright: ignore

    def _opened(self, kind: str, part: int) -> Mapping[str, StoredTensor]:
        """A part's file; the states must be as many as the tokens."""
        if (kind, part) not in self._files:
            path = self._corpus.path(kind, part)
            tensors = open_weights(path)
            size = int(self._corpus.texts(part).lengths.sum())
            wanted = ("tokens",) if kind == "texts" else States._fields
            refuse(
                [
                    f"{path}: `{name}` is not there for each of {size} tokens; remove "
                    "the file to have it made again"
                    for name in wanted
                    if name not in tensors or tensors[name].shape[:1] != (size,)
                ]
            )
            self._files[kind, part] = tensors
        return self._files[kind, part]

    def _rows_of(self, text: _Text) -> list[np.ndarray]:
        """Tokens and states of one text, read from where they lie in the files."""
        part, first, size, _ = text
        tokens = self._opened("texts", part)["tokens"]
        states = self._opened(self._states, part)
        stored = [tokens, *(states[name] for name in States._fields)]
        return [each.rows(first, first + size) for each in stored]
