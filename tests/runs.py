"""Drives prompts through the production prefill and loop, and compares the texts."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import causal, run_rows
from jaxspec.core.accept import RULES, Rule
from jaxspec.core.noise import seed_keys
from jaxspec.core.report import Reporting
from jaxspec.core.sampling import Sampling, Sequences
from jaxspec.decoding.loop import decode, prefill
from jaxspec.decoding.state import DecodingState, Options, Prompts
from jaxspec.types import Chunk

FOREVER = 10**6


class Programs(NamedTuple):
    prefill: Callable
    decode: Callable


# Compiles in less than half the time, and runs several times slower. XLA makes the same
# of a program; only the machine code differs.
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


def programs(compiler_options: dict | None = QUICK) -> Programs:
    """Freshly traced programs: for tests that replace a part of the loop."""
    jit = functools.partial(jax.jit, compiler_options=compiler_options)
    return Programs(
        jit(lambda *args: prefill(*args), static_argnums=6),
        jit(lambda *args: decode(*args)),
    )


SHARED = programs()
# For very many samples, and where it matters what the compiler made.
OPTIMIZED = programs(None)


def _map_arrays(function, values):
    return jax.tree.map(function, values, is_leaf=lambda each: isinstance(each, list))


class Batch(NamedTuple):
    """What a test asks of the loop; rows by their prompts, in ids.

    Attributes:
        options: the other fields of `Sampling`, by name, an array (or `Sequences`)
            with rows first; absent ones cost the program nothing.
        stops: sequences of ids that end a row.
        rule: a name, or a rule that is none of the product's.
    """

    prompts: Sequence[Sequence[int]]
    new: Any = 64
    temperature: Any = 0.0
    seeds: Sequence[int] | None = None
    eos: Sequence[int] = ()
    options: dict = {}  # noqa: RUF012
    stops: Sequences | None = None
    rule: str | Rule = "rejection"
    reporting: Reporting | None = None
    capacity: int = 112
    chunk: int = 48

    def rows(self, order: Sequence[int]) -> "Batch":
        """The same rows in another order, or fewer of them."""

        def take(each):
            each = np.asarray(each)
            if each.ndim < 2:
                each = np.broadcast_to(each, len(self.prompts))
            return each[list(order)]

        return self._replace(
            prompts=[self.prompts[row] for row in order],
            new=take(self.new),
            temperature=take(self.temperature),
            seeds=[self.row_seeds[row] for row in order],
            options=_map_arrays(take, self.options),
            stops=_map_arrays(take, self.stops),
        )

    @property
    def row_seeds(self) -> Sequence[int]:
        return range(len(self.prompts)) if self.seeds is None else self.seeds

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(prompt) for prompt in self.prompts], np.int32)

    @property
    def tokens(self) -> np.ndarray:
        tokens = np.zeros((len(self.prompts), self.capacity), np.int32)
        for row, prompt in enumerate(self.prompts):
            tokens[row, : len(prompt)] = prompt
        return tokens

    def device(self) -> tuple[Prompts, Options]:
        rows = len(self.prompts)
        limit = np.minimum(self.lengths + self.new, self.capacity).astype(np.int32)
        temperature = np.broadcast_to(np.float32(self.temperature), rows)
        options = _map_arrays(jnp.asarray, self.options)
        stops = _map_arrays(jnp.asarray, self.stops)
        rule = RULES[self.rule] if isinstance(self.rule, str) else self.rule
        eos = np.full((rows, 4), -1, np.int32)
        eos[:, : len(self.eos)] = self.eos
        prompts = (self.tokens, self.lengths, limit, seed_keys(self.row_seeds))
        return (
            Prompts(*(jnp.asarray(each) for each in prompts)),
            Options(
                Sampling(jnp.asarray(temperature), **options),
                jnp.asarray(eos),
                stops,
                rule,
                self.reporting,
            ),
        )


class Run(NamedTuple):
    """A generation that has ended."""

    batch: Batch
    state: DecodingState

    @property
    def ids(self) -> list[list[int]]:
        """The new tokens of each row."""
        tokens, lengths = np.asarray(self.state.tokens), np.asarray(self.state.length)
        return [
            tokens[row, start:end].tolist()
            for row, (start, end) in enumerate(
                zip(self.batch.lengths, lengths, strict=True)
            )
        ]


def start(target, drafter, batch: Batch, made: Programs = SHARED):
    """Prefills, chunk after chunk; returns the state and the options."""
    prompts, options = batch.device()
    lengths, chunk = batch.lengths, batch.chunk
    state, pieces = prompts, max(1, -(-int(lengths.max()) // chunk))
    for piece in range(pieces):
        begin = piece * chunk
        fed = np.zeros((len(lengths), chunk), np.int32)
        part = batch.tokens[:, begin : begin + chunk]
        fed[:, : part.shape[1]] = part
        begins = np.full(len(lengths), begin, np.int32)
        count = np.clip(lengths - begin, 0, chunk).astype(np.int32)
        final = jnp.asarray(piece == pieces - 1)
        piece_of = Chunk(jnp.asarray(fed), jnp.asarray(begins), jnp.asarray(count))
        state = made.prefill(target, drafter, state, piece_of, options, final, chunk)
    return state, options


def generate(target, drafter, batch: Batch, made: Programs = SHARED) -> Run:
    state, options = start(target, drafter, batch, made)
    state = made.decode(target, drafter, state, options, jnp.int32(FOREVER))
    return Run(batch, jax.block_until_ready(state))


def rounds(
    target, drafter, batch: Batch, made: Programs = SHARED
) -> Iterator[DecodingState]:
    """The state after prefill and after each round, one dispatch a round."""
    state, options = start(target, drafter, batch, made)
    yield state
    while bool(state.active.any()):
        state = made.decode(target, drafter, state, options, jnp.int32(1))
        yield state


@functools.partial(jax.jit, static_argnums=2)
def replay(model, tokens, block: int):
    """Logits at every position of given texts, fed `block` tokens at a time."""
    rows, length = tokens.shape
    steps = -(-length // block)
    padded = jnp.pad(tokens, ((0, 0), (0, steps * block - length)))
    slots = jnp.arange(block)

    def feed(cache, step):
        piece = jax.lax.dynamic_slice_in_dim(padded, step * block, block, axis=1)
        output, scratch = run_rows(
            model,
            cache,
            model.init_scratch(rows, block),
            piece,
            jnp.broadcast_to(step * block + slots, (rows, block)),
            slots,
            causal(rows, block),
        )
        path = jnp.broadcast_to(slots, (rows, block))
        cache = cache.commit(scratch, path, jnp.full(rows, block))
        return cache, model.unembed(model.norm(output.hidden))

    cache = model.init_cache(rows, steps * block, block)
    _, logits = jax.lax.scan(feed, cache, jnp.arange(steps))
    return logits.swapaxes(0, 1).reshape(rows, steps * block, -1)[:, :length]


class Plain(NamedTuple):
    """A plain run, with what says how far its ids can be relied on.

    Attributes:
        gaps: between the two largest logits, at each new token of each row.
        delta: the largest change of a logit between the shapes in use.
    """

    run: Run
    gaps: list[np.ndarray]
    delta: float


def plain(
    target, drafter, batch: Batch, blocks: Sequence[int], made: Programs = SHARED
) -> Plain:
    run = generate(target, drafter, batch, made)
    tokens = run.state.tokens
    logits = np.asarray(replay(target, tokens, 1))
    delta = 0.0
    for block in blocks:
        other = np.asarray(replay(target, tokens, block))
        delta = max(delta, float(np.abs(other - logits).max()))
    best = np.sort(logits, axis=-1)
    gaps = best[..., -1] - best[..., -2]
    lengths = np.asarray(run.state.length)
    spans = zip(run.batch.lengths, lengths, strict=True)
    return Plain(run, [gaps[r, a - 1 : b - 1] for r, (a, b) in enumerate(spans)], delta)


def assert_same_ids(expected: Plain, ids: list[list[int]], rows=None) -> None:
    """Ids equal the plain run's, which must nowhere be near a tie.

    Says where the first difference of a row is, and how close the choice was there.
    """
    rows = range(len(ids)) if rows is None else rows
    gaps, delta = [expected.gaps[row] for row in rows], expected.delta
    wanted = [expected.run.ids[row] for row in rows]
    smallest = min((gap.min() for gap in gaps if gap.size), default=np.inf)
    print(f"smallest top-two gap met: {smallest:.2e}; delta: {delta:.2e}")
    for row, want, got, gap in zip(rows, wanted, ids, gaps, strict=True):
        if want != got:
            raise AssertionError(describe_difference(row, want, got, gap, delta))
    assert smallest > 10 * delta, f"a near tie: {smallest:.2e} against {delta:.2e}"


def describe_difference(row, want, got, gap, delta) -> str:
    pairs = enumerate(zip(want, got, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(want), len(got)))
    if first == min(len(want), len(got)):
        return f"row {row}: {len(got)} tokens instead of {len(want)}"
    verdict = "a near tie" if gap[first] < 2 * delta else "no near tie"
    return (
        f"row {row} differs first at new token {first}: {got[first]} instead of "
        f"{want[first]}; the plain top-two gap there is {gap[first]:.2e} ({verdict}: "
        f"delta {delta:.2e})"
    )


def assert_same_texts_and_caches(one: DecodingState, other: DecodingState) -> None:
    """Bit for bit, whatever stands where nothing was committed."""
    written = np.arange(one.tokens.shape[1]) < np.asarray(one.length)[:, None]
    for left, right in (
        (one.length, other.length),
        (np.where(written, one.tokens, 0), np.where(written, other.tokens, 0)),
        (one.hidden, other.hidden),
        *zip(
            committed(one.cache, one.cache.length),
            committed(other.cache, other.cache.length),
            strict=True,
        ),
    ):
        np.testing.assert_array_equal(left, right)


def committed(cache, length) -> list[np.ndarray]:
    """Each row's keys and values below `length`, group by group, for bitwise tests.

    Of a ring those that the next query sees.
    """
    out = []
    newest = np.asarray(length)[:, None] - 1
    windows = dict.fromkeys(cache.windows)
    for window, arrays in zip(windows, cache.groups, strict=True):
        for array in map(np.asarray, arrays):
            slots = np.arange(array.shape[4])
            back = (newest - slots) % slots.size
            keep = (back <= newest) & (back + 1 < (window or np.inf))
            out.append(np.where(keep[None, None, :, None, :, None], array, 0))
    return out
