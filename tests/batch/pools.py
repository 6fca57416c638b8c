"""Small models in pools, what their rows write alone, and what is left in a row."""

import contextlib
import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

from jaxspec.batch.inputs import Item
from jaxspec.batch.pool import Entry, Pool
from jaxspec.generator import Generator
from jaxspec.loading import LanguageModel
from jaxspec.models.decoder import Decoder
from jaxspec.requests import make_requests
from jaxspec.rows import map_rows
from tests import fakes, quick, runs

CAPACITY, ROWS, NODES = 1024, 4, 3


@contextlib.contextmanager
def cheap_programs(folder):
    """Within it programs compile in half the time, and equal ones once."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = [getattr(jax.config, name) for name in names]
    with quick.generators():
        for name, value in zip(names, (str(folder), 0.0), strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def target_model(layers: int = 1) -> LanguageModel:
    """A tiny decoder with positions for more than one piece of prompt."""
    config = fakes.tiny(1, layers).config
    config = dataclasses.replace(config, max_positions=2 * CAPACITY)
    return LanguageModel("tiny", Decoder(config, rngs=nnx.Rngs(1)))


def make_generator(target: LanguageModel, kind: str) -> Generator:
    """A generator by what drafts: a draft model, lookup, early-exit:1 or none."""
    drafter: Any = kind
    if kind == "draft":
        drafter = LanguageModel("near", fakes.near(target.decoder, 0.3))
    if kind == "none":
        return Generator(target, capacity=CAPACITY)
    return Generator(target, drafter, draft_tokens=NODES, capacity=CAPACITY)


def make_prompts(lengths, seed: int) -> list[list[int]]:
    """Prompts of these lengths; every second one goes round in a few ids."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 64, length) for length in lengths]
    rows[1::2] = [np.resize(row[:7], row.size) for row in rows[1::2]]
    return [row.tolist() for row in rows]


def items(prompts) -> list[Item]:
    return [Item(index, prompt, None) for index, prompt in enumerate(prompts)]


def make_entries(target, prompts, **options) -> list[Entry]:
    requests = make_requests(target, prompts, **options)
    return [Entry(index, request) for index, request in enumerate(requests)]


def tie_of(target: LanguageModel, texts, starts) -> tuple[float, float]:
    """The smallest gap between the two best logits at the texts' new tokens, and delta.

    Delta is how far logits move between one token a forward, a round and a prompt.
    """
    tokens = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    by_block = [
        np.asarray(
            runs.replay.lower(target.decoder, tokens, block).compile()(
                target.decoder, tokens
            )
        )
        for block in (1, NODES + 1, 64)
    ]
    best = np.sort(by_block[0], axis=-1)[..., -2:]
    gaps = best[..., 1] - best[..., 0]
    own = [
        gaps[row, start - 1 : len(text) - 1]
        for row, (text, start) in enumerate(zip(texts, starts, strict=True))
    ]
    delta = max(float(np.abs(each - by_block[0]).max()) for each in by_block[1:])
    return float(np.concatenate(own).min()), delta


class Left(NamedTuple):
    """What a row holds when it has ended, bit for bit.

    Attributes:
        committed: keys and values of the target's cache and of the draft's, if it has
            one; what stands past their lengths means nothing.
    """

    row: int
    ids: list[int]
    finish: int
    from_draft: list[bool]
    counts: list[list[int]]
    committed: list[np.ndarray]

    def assert_same(self, other: "Left") -> None:
        """All but the number of the row."""
        assert self[1:5] == other[1:5]
        for mine, its in zip(self.committed, other.committed, strict=True):
            np.testing.assert_array_equal(mine, its)


def left_in(state, row: int) -> Left:
    one = map_rows(lambda axis, leaf: np.take(np.asarray(leaf), [row], axis), state)
    text = slice(int(one.prompt_length[0]), int(one.length[0]))
    caches = [one.cache, *([one.drafter.cache] if one.drafter else [])]
    return Left(
        row,
        one.tokens[0, text].tolist(),
        int(one.finish[0]),
        one.from_draft[0, text].tolist(),
        [each[0].tolist() for each in one.statistics],
        [array for cache in caches for array in runs.committed(cache, cache.length)],
    )


def drain(pool: Pool, entries=()) -> dict[int, Left]:
    """Puts entries while there is room, and runs until all have ended."""
    waiting, ended = list(entries), {}
    while waiting or pool.running:
        while waiting and pool.free_parts():
            pool.put([waiting.pop(0)])
        for entry, row, _ in pool.run():
            ended[entry.index] = left_in(pool._state, row)
    return ended


def spoil(pool: Pool, row: int, number: float, whole: int | None = None) -> None:
    """Overwrites all floats of a row, and with `whole` all integers and truths too."""

    def put(axis, leaf):
        value = number if np.issubdtype(leaf.dtype, np.floating) else whole
        if value is None:
            return leaf
        changed = np.array(leaf)
        changed[(slice(None),) * axis + (row,)] = np.asarray(value).astype(leaf.dtype)
        return jax.numpy.asarray(changed)

    pool._state = map_rows(put, pool._state)


@pytest.fixture(scope="module")
def cheap(tmp_path_factory):
    with cheap_programs(tmp_path_factory.mktemp("programs")):
        yield
