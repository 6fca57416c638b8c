"""A smaller model of the same vocabulary as drafter."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.cache import KVCache, causal, run_rows
from jaxspec.core.dynamic_tree import DynamicTree
from jaxspec.core.topology import Topology
from jaxspec.drafters.dynamic import Expansion
from jaxspec.drafters.levels import Level, Schedule
from jaxspec.drafters.shaped import Shaped
from jaxspec.scratch import Scratch
from jaxspec.types import Chunk, Context, Draft, Noise, Output, Target, Verdict

# Tokens that a round feeds before it drafts.
PENDING = 2


class DraftModelState(NamedTuple):
    """The draft's own cache, and the scratch that a round hands to its commit.

    The cache holds the committed tokens but the last two: after a fully accepted round
    the draft has fed neither its last token nor the bonus token, so every round begins
    by feeding [previous, newest], whatever was accepted. `in_scratch` is where the
    entries of each slot of the draft lie.
    """

    cache: KVCache
    scratch: Scratch
    in_scratch: Int[Array, "B N+1"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["model"],
    meta_fields=["shape"],
)
@dataclass(frozen=True)
class DraftModel(Shaped):
    """Drafts a chain or a tree with a model of its own.

    Attributes:
        shape: of the draft: k, of a chain, or a tree.
    """

    model: Any
    shape: int | Topology | DynamicTree

    taps = ()
    prefix_layers = 0

    @property
    def topology(self) -> Topology | DynamicTree:
        """The shape as a tree."""
        return Topology.chain(self.shape) if isinstance(self.shape, int) else self.shape

    @property
    def schedule(self) -> Schedule | Expansion:
        """How the tree is grown; a round begins with [previous, newest]."""
        if isinstance(self.topology, DynamicTree):
            return Expansion(self.topology, PENDING)
        return Schedule(self.topology, PENDING)

    def init(self, rows: int, capacity: int, width: int) -> DraftModelState:
        """Empty; a round commits previous, newest and a path of nodes but its last."""
        cache = self.model.init_cache(rows, capacity, max(width, self.depth + 1))
        scratch = self.model.init_scratch(rows, self.schedule.scratch_slots)
        slots = jnp.zeros((rows, self.nodes + 1), jnp.int32)
        return DraftModelState(cache, scratch, slots)

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
                jnp.broadcast_to(visible, (tokens.shape[0], *visible.shape[-2:])),
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
        both = jnp.arange(PENDING)
        visible = jnp.tri(PENDING, schedule.scratch_slots, dtype=bool)
        # Made anew: what an earlier round left there may be no number.
        scratch = jax.tree.map(jnp.zeros_like, state.scratch)
        scratch, hidden = run(scratch, pending, both, both, visible)
        draft, in_scratch, scratch = schedule.grow(
            context,
            noise,
            target.model.vocab_size,
            logits(hidden[:, -1:]),
            feed,
            scratch,
        )
        return draft, DraftModelState(cache, scratch, in_scratch)

    def commit(
        self,
        target: Target,
        state: DraftModelState,
        draft: Draft,
        verdict: Verdict,
        output: Output,
    ) -> DraftModelState:
        """Keeps as many slots as the target emitted tokens: all but the last two."""
        path = verdict.path[:, :-1]
        fed = jnp.take_along_axis(state.in_scratch, path, axis=1)
        path = jnp.pad(fed, ((0, 0), (1, 0)))
        cache = state.cache.commit(state.scratch, path, verdict.count)
        return state._replace(cache=cache)
