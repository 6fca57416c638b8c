"""A smaller model of the same vocabulary as drafter."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.cache import KVCache, Scratch, causal, run_rows
from jaxspec.core.topology import Topology
from jaxspec.drafters.levels import Level, Schedule, grow
from jaxspec.types import Chunk, Context, Draft, Noise, Output, Target, Verdict


class DraftModelState(NamedTuple):
    """The draft's own cache, and the scratch that a round hands to its commit.

    The cache holds the committed tokens but the last two: after a fully accepted round
    the draft has fed neither its last token nor the bonus token, so every round begins
    by feeding [previous, newest], whatever was accepted.
    """

    cache: KVCache
    scratch: Scratch


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["model"],
    meta_fields=["shape"],
)
@dataclass(frozen=True)
class DraftModel:
    """Drafts a chain or a tree with a model of its own.

    Attributes:
        shape: of the draft: k, of a chain, or a tree.
    """

    model: Any
    shape: int | Topology

    taps = ()
    prefix_layers = 0

    @property
    def topology(self) -> Topology:
        """The shape as a tree."""
        if isinstance(self.shape, Topology):
            return self.shape
        return Topology.chain(self.shape)

    @property
    def schedule(self) -> Schedule:
        """A round begins with [previous, newest]."""
        return Schedule(self.topology, pending=2)

    @property
    def nodes(self) -> int:
        """Draft nodes a round."""
        return self.topology.nodes

    @property
    def depth(self) -> int:
        """The length of the longest path."""
        return self.topology.depth

    def init(self, rows: int, capacity: int, width: int) -> DraftModelState:
        """Empty; a round commits previous, newest and a path of nodes but its last."""
        cache = self.model.init_cache(rows, capacity, max(width, self.depth + 1))
        scratch = self.model.init_scratch(rows, self.schedule.scratch_slots)
        return DraftModelState(cache, scratch)

    def prefill(
        self, target: Target, state: DraftModelState, chunk: Chunk, output: Output
    ) -> DraftModelState:
        """Feeds the chunk to the draft too."""
        rows, tokens = chunk.tokens.shape
        slots = jnp.arange(tokens)
        _, scratch = run_rows(
            self.model,
            state.cache,
            self.model.init_scratch(rows, tokens),
            chunk.tokens,
            chunk.start[:, None] + slots,
            slots,
            causal(rows, tokens),
        )
        path = jnp.broadcast_to(slots, (rows, tokens))
        return state._replace(cache=state.cache.commit(scratch, path, chunk.count))

    def propose(
        self, target: Target, state: DraftModelState, context: Context, noise: Noise
    ) -> tuple[Draft, DraftModelState]:
        """Feeds [previous, newest], then the tree level by level."""
        # Prefill has committed one token more than a round starts from.
        cache = state.cache.shorten(jnp.maximum(context.length - 2, 0))
        schedule = self.schedule

        def run(scratch, tokens, offsets, slots, visible):
            """Feeds tokens that stand `offsets` past the cache."""
            output, scratch = run_rows(
                self.model,
                cache,
                scratch,
                tokens,
                jnp.broadcast_to(cache.length[:, None] + offsets, tokens.shape),
                slots,
                jnp.broadcast_to(visible, (tokens.shape[0], *visible.shape)),
            )
            return scratch, output.hidden

        def logits(hidden):
            return self.model.unembed(self.model.norm(hidden))

        def feed(scratch, tokens, level: Level):
            # The root is one past the cache.
            scratch, hidden = run(
                scratch, tokens, 1 + level.depth, level.scratch_slots, level.visible
            )
            return scratch, logits(hidden)

        ends = context.length[:, None] - jnp.array([2, 1])
        pending = jnp.take_along_axis(context.tokens, ends, axis=1, mode="clip")
        both = jnp.arange(2)
        visible = jnp.tri(2, schedule.scratch_slots, dtype=bool)
        scratch, hidden = run(state.scratch, pending, both, both, visible)
        draft, scratch = grow(
            schedule,
            context,
            noise,
            target.model.vocab_size,
            logits(hidden[:, -1:]),
            feed,
            scratch,
        )
        return draft, DraftModelState(cache, scratch)

    def commit(
        self,
        target: Target,
        state: DraftModelState,
        draft: Draft,
        verdict: Verdict,
        output: Output,
    ) -> DraftModelState:
        """Keeps as many slots as the target emitted tokens: all but the last two."""
        fed = jnp.asarray(self.schedule.in_scratch)[verdict.path[:, :-1]]
        path = jnp.pad(fed, ((0, 0), (1, 0)))
        cache = state.cache.commit(state.scratch, path, verdict.count)
        return state._replace(cache=cache)
