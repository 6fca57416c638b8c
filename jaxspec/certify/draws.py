"""Many short continuations by the generator's own programs, and what they should be."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.batching import NEUTRAL, chunks, pack, power_of_two
from jaxspec.cache import KVCache
from jaxspec.certify.plain import Followed, follow
from jaxspec.core.analytics import block_reach_probs
from jaxspec.core.distributions import at
from jaxspec.core.noise import seed_keys
from jaxspec.decoding.round import bind_noise, bind_warp
from jaxspec.decoding.state import RUNNING, DecodingState, Options
from jaxspec.generator import Generator
from jaxspec.programs import Program
from jaxspec.requests import make_requests
from jaxspec.types import Context, Target

SMALLEST_CAPACITY = 64


class Draws(NamedTuple):
    """Continuations of prompts by one option set, from their first round on.

    Attributes:
        followed: plain decoding's view of every emitted token.
        tokens: the emitted tokens.
        verified: whether a draft token was tested at the position.
        accepted: whether it was accepted.
        tested: whether the first round had a valid draft token at the depth.
        reached: whether it accepted so many.
        reach: the probability of that, given the draft.
    """

    followed: Followed
    tokens: Any
    verified: Any
    accepted: Any
    tested: Any
    reached: Any
    reach: Any

    @classmethod
    def join(cls, parts: Sequence["Draws"]) -> "Draws":
        """All rows of several."""
        return jax.tree.map(lambda *each: np.concatenate(each), *parts)

    def rows(self, rows: Any) -> "Draws":
        """Some of the rows."""
        return jax.tree.map(lambda each: each[rows], self)


def reach_probs(rule: str, path: Followed, draft_probs: Any) -> np.ndarray:
    """P(at least i accepted | the drafted tokens), for i = 1, 2, ...

    `rejection`: every token is accepted by itself, with min(1, p / q). `block`: Sun et
    al. 2024, algorithm 2 (given the first i tokens). `coupled`: by the shared noise.
    """
    if path.shared is not None:
        return np.cumprod(np.asarray(path.shared.agree, float), axis=1)
    ratios = np.asarray(path.prob, float) / np.asarray(draft_probs, float)
    if rule == "block":
        return np.asarray(block_reach_probs(ratios), float)
    return np.cumprod(np.minimum(ratios, 1), axis=1)


def spread(state: DecodingState, keys: Any, limit: Any) -> DecodingState:
    """A prefilled row, copied to as many rows as there are keys."""
    rows = jnp.zeros(keys.shape[0], jnp.int32)

    def take(leaf):
        return leaf.take_rows(rows) if isinstance(leaf, KVCache) else leaf[rows]

    copied = jax.tree.map(take, state, is_leaf=lambda leaf: isinstance(leaf, KVCache))
    return copied._replace(keys=keys, limit=limit)


def peek(model: Any, drafter: Any, state: DecodingState, options: Options) -> Any:
    """The draft of the next round, which leaves the state alone.

    Returns:
        Tokens, which are valid, the probability of each to the drafter, and the
        distributions (None of a deterministic drafter).
    """
    warp = bind_warp(state, options)
    context = Context(state.tokens, state.length, state.active, warp)
    noise = bind_noise(state, options, model.vocab_size).draft
    target = Target(model, state.cache)
    draft, _ = drafter.propose(target, state.drafter, context, noise)
    if draft.log_probs is None:
        return draft.tokens, draft.valid, jnp.ones(draft.tokens.shape), None
    drawn = jnp.exp(at(draft.log_probs, draft.tokens))
    return draft.tokens, draft.valid, drawn, draft.log_probs


class Bench:
    """Draws continuations of a few prompts, each prefilled once and copied."""

    def __init__(
        self,
        generator: Generator,
        prompts: Sequence[Sequence[int]],
        option_sets: Mapping[str, Mapping[str, Any]],
        positions: int,
        batch_size: int,
    ):
        """`positions`: tokens drawn after each prompt."""
        self._generator, self._prompts = generator, [list(ids) for ids in prompts]
        self._sets, self._positions = option_sets, positions
        self._rows = batch_size
        longest = max(map(len, prompts))
        self._capacity = power_of_two(longest + positions, SMALLEST_CAPACITY)
        self._spread, self._peek = Program(spread), Program(peek)
        self._follow = Program(follow)
        self._copy = Program(lambda state: jax.tree.map(jnp.copy, state))

    def draw(
        self, counts: Mapping[str, int], seed: int, on_batch: Callable[[], None]
    ) -> dict[str, Draws]:
        """So many continuations by each option set named.

        Sample i of a set has its own seed and prompt, whatever the counts: a larger
        count goes on from a smaller one.
        """
        parts: dict[str, list[Draws]] = {name: [] for name in counts}
        for first, prompt in enumerate(self._prompts):
            samples = range(first, max(counts.values()), len(self._prompts))
            rows = [(n, i) for i in samples for n in counts if i < counts[n]]
            prefilled = self._prefill(prompt) if rows else None
            for begin in range(0, len(rows), self._rows):
                chosen = rows[begin : begin + self._rows]
                drawn = self._batch(prompt, prefilled, chosen, seed)
                for name in counts:
                    own = [row for row, (its, _) in enumerate(chosen) if its == name]
                    parts[name].append(drawn.rows(own))
                on_batch()
        return {name: Draws.join(each) for name, each in parts.items()}

    def _batch(
        self, prompt: list[int], prefilled: Any, rows: list[tuple[str, int]], seed: int
    ) -> Draws:
        model, drafter = self._generator.target.decoder, self._generator.drafter
        options, keys = self._options(prompt, rows, seed, self._rows)
        limit = np.full(self._rows, len(prompt) + self._positions, np.int32)
        state = self._spread(prefilled, keys, limit)
        # The rounds give their state away.
        begun = self._copy(state)
        drafted, valid, drawn, log_probs = self._peek(model, drafter, begun, options)
        state, verified, accepted, reached = self._run(state, options, len(prompt))
        own = slice(len(prompt), len(prompt) + self._positions)
        emitted = np.asarray(state.tokens)[:, own]
        followed = self._follow(model, begun, options, emitted, None)
        drafted = drafted[:, : self._positions]
        path = self._follow(model, begun, options, drafted, log_probs)
        drawn, valid = (np.asarray(e)[:, : self._positions] for e in (drawn, valid))
        reach = reach_probs(self._generator.rule.name, path, drawn)
        followed = jax.device_get(followed)
        return Draws(followed, emitted, verified, accepted, valid, reached, reach)

    def _options(
        self, prompt: list[int], rows: list[tuple[str, int]], seed: int, size: int
    ) -> tuple[Options, Any]:
        """Options and keys of a batch, the last row being repeated to fill it."""
        rows = rows + rows[-1:] * (size - len(rows))
        order = list(self._sets)
        seeds = [seed + i * len(order) + order.index(name) for name, i in rows]
        names = sorted({name for each in self._sets.values() for name in each})
        columns = {
            name: [self._sets[each].get(name, NEUTRAL[name]) for each, _ in rows]
            for name in names
        }
        requests = make_requests(
            self._generator.target, [prompt] * size, seed=seeds, **columns
        )
        packed = self._generator.pack_options(requests, size, (), None)
        return packed, seed_keys(seeds)

    def _prefill(self, prompt: list[int]) -> Any:
        """The state as a round finds it: all of the prompt is fed but its last token.

        No token is drawn by prefill, so that every row has the prompt's own draft.
        """
        generator = self._generator
        model, drafter = generator.target.decoder, generator.drafter
        first, later, _ = generator.programs
        options, _ = self._options(prompt, [(next(iter(self._sets)), 0)], 0, 1)
        [request] = make_requests(generator.target, [prompt], max_new_tokens=1)
        prompts = pack([request], 1, self._capacity)
        fed = prompts._replace(length=prompts.length - 1)
        # The state is made of all the prompt.
        pieces, state = [chunk for chunk, _ in chunks(fed)], prompts
        # No wider than need be: a cache has as many slots more, and is copied by rows.
        width = max(piece.tokens.shape[1] for piece in pieces)
        for piece in pieces:
            program = first if state is prompts else later
            state = program(
                model, drafter, state, piece, options, np.bool_(False), width
            )
        return state

    def _run(self, state: Any, options: Options, prompt: int) -> tuple[Any, ...]:
        """All rounds, one a dispatch, and what was tested and accepted where."""
        model, drafter = self._generator.target.decoder, self._generator.drafter
        shape = (self._rows, self._positions)
        verified, accepted = np.zeros(shape, bool), np.zeros(shape, bool)
        reached = None  # the first round's
        while (np.asarray(state.finish) == RUNNING).any():
            before = jax.device_get((state.length, state.statistics))
            state = self._generator.programs[2](
                model, drafter, state, options, np.int32(1)
            )
            after = jax.device_get(state.statistics)
            drafted = after.drafted - before[1].drafted > 0
            count = (after.accepted - before[1].accepted).sum(axis=1)[:, None]
            depth = np.arange(1, drafted.shape[1] + 1)
            place = before[0][:, None] - prompt + depth - 1
            inside = drafted & (count >= depth - 1) & (place < self._positions)
            row, node = np.nonzero(inside)
            verified[row, place[row, node]] = True
            accepted[row, place[row, node]] = (count >= depth)[row, node]
            if reached is None:
                reached = count >= np.arange(1, self._positions + 1)
        return state, verified, accepted, reached
