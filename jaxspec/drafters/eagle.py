"""EAGLE: drafts from the target's hidden states, which know more than its tokens do.

Li et al. 2024 (EAGLE; EAGLE-2) and 2025 (EAGLE-3).
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache import KVCache, causal
from jaxspec.core.distributions import widen
from jaxspec.core.dynamic_tree import DynamicTree
from jaxspec.core.topology import Topology
from jaxspec.drafters.dynamic import Expansion
from jaxspec.drafters.levels import Level, Schedule
from jaxspec.drafters.shaped import Shaped
from jaxspec.scratch import Scratch
from jaxspec.types import Chunk, Context, Draft, Model, Noise, Output, Target, Verdict


class EagleState(NamedTuple):
    """The head's own cache, and the pairs that it has not read yet.

    A pair is the feature of a position and the token after it; it stands at the
    feature's position. The cache holds the pairs of the committed text but the newest:
    those whose tokens the last round committed. They end with the newest token, so
    that their features are all that is kept of them.

    Attributes:
        features: true ones, in the last `count` places of each row.
    """

    cache: KVCache
    features: Float[Array, "B pending E"]
    count: Int[Array, " B"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["head", "places"],
    meta_fields=["topology"],
)
@dataclass(frozen=True)
class Eagle(Shaped):
    """Drafts a chain or a tree with a head that feeds on features.

    Every round begins with the true features of what the last one committed; between
    them the head goes on with its own guesses.

    Attributes:
        head: an `EagleHead` or `Eagle3Head`.
        places: where each target id stands in the head's reduced vocabulary, its size
            for an id that does not; None: the head knows all of them.
    """

    head: Any
    topology: Topology | DynamicTree
    places: Any = None

    prefix_layers = 0

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's blocks that the head reads."""
        return self.head.taps

    @property
    def pending(self) -> int:
        """Pairs that a round may have to read before it drafts."""
        return self.depth + 1

    @property
    def schedule(self) -> Schedule | Expansion:
        """How the tree is grown."""
        if isinstance(self.topology, DynamicTree):
            return Expansion(self.topology, self.pending)
        return Schedule(self.topology, self.pending)

    def init(self, rows: int, capacity: int, width: int) -> EagleState:
        """Empty."""
        cache = self.head.init_cache(rows, capacity, max(width, self.pending))
        features = jnp.zeros((rows, self.pending, self.head.width), self.head.dtype)
        return EagleState(cache, features, jnp.zeros(rows, jnp.int32))

    def prefill(
        self, target: Target, state: EagleState, chunk: Chunk, output: Output
    ) -> EagleState:
        """Pairs each token with the feature before it; the last feature waits."""
        rows, tokens = chunk.tokens.shape
        fresh = self.head.features(target.model, output)
        before = jnp.concatenate([state.features[:, -1:], fresh[:, :-1]], axis=1)
        # No feature comes before the text's first token.
        begins = (chunk.start == 0)[:, None]
        lanes = jnp.arange(tokens)
        seen = (lanes > 0) | ~begins
        visible = causal(rows, tokens) & seen[:, None] | jnp.eye(tokens, dtype=bool)
        embedded = self.head.embed(target.model, chunk.tokens)
        _, scratch = self.head.run_rows(
            state.cache,
            self.head.init_scratch(rows, tokens),
            self.head.join(embedded, before),
            jnp.maximum(chunk.start[:, None] - 1 + lanes, 0),
            lanes,
            visible,
        )
        path = jnp.minimum(lanes + begins, tokens - 1)
        pairs = jnp.maximum(chunk.count - begins[:, 0], 0)
        there = chunk.count > 0
        last = jnp.maximum(chunk.count - 1, 0)[:, None, None]
        waiting = jnp.take_along_axis(fresh, last, axis=1)[:, 0]
        waiting = jnp.where(there[:, None], waiting, state.features[:, -1])
        return EagleState(
            state.cache.commit(scratch, path, pairs),
            state.features.at[:, -1].set(waiting),
            jnp.where(there, 1, state.count),
        )

    def propose(
        self, target: Target, state: EagleState, context: Context, noise: Noise
    ) -> tuple[Draft, EagleState]:
        """Reads the pending pairs, then feeds the tree level by level."""
        schedule, model = self.schedule, target.model
        reader = _Reader(self, model, state, context, schedule.scratch_slots)
        carry = reader.pending()
        root = reader.logits(carry.guesses[:, self.pending - 1 : self.pending])
        draft, _, carry = schedule.grow(
            context, noise, model.vocab_size, root, reader.feed, carry
        )
        # These pairs are true, whatever becomes of the draft.
        count = jnp.where(context.active, state.count, 0)
        path = self.pending - count[:, None] + jnp.arange(self.pending)
        path = jnp.minimum(path, self.pending - 1)
        cache = state.cache.commit(carry.scratch, path, count)
        return draft, EagleState(cache, state.features, state.count - count)

    def commit(
        self,
        target: Target,
        state: EagleState,
        draft: Draft,
        verdict: Verdict,
        output: Output,
    ) -> EagleState:
        """Keeps the true features of the committed slots."""
        first = self.pending - verdict.count[:, None]
        place = jnp.maximum(jnp.arange(self.pending) - first, 0)
        slots = jnp.take_along_axis(verdict.path, place, axis=1)[:, :, None]
        hidden = jnp.take_along_axis(output.hidden, slots, axis=1)
        taps = jnp.take_along_axis(output.taps, slots[..., None], axis=1)
        fresh = self.head.features(target.model, Output(hidden, taps))
        there = verdict.count > 0
        return state._replace(
            features=jnp.where(there[:, None, None], fresh, state.features),
            count=jnp.where(there, verdict.count, state.count),
        )


class _Carry(NamedTuple):
    """What a round has read so far; `guesses` are by slot of the scratch."""

    scratch: Scratch
    guesses: Float[Array, "B P E"]


@dataclass(frozen=True)
class _Reader:
    """The head's passes of one round: over the pending pairs, then level by level."""

    drafter: Eagle
    model: Model
    state: EagleState
    context: Context
    scratch_slots: int

    @property
    def newest(self) -> Int[Array, "B 1"]:
        """Where the newest token stands; its pair stands one before."""
        return self.context.length[:, None] - 1

    @property
    def exists(self) -> Bool[Array, "B 1 P"]:
        """Which slots of the scratch hold anything: not those of pairs that are not."""
        pending = self.drafter.pending
        waiting = jnp.arange(pending) >= pending - self.state.count[:, None]
        nodes = ((0, 0), (0, self.scratch_slots - pending))
        return jnp.pad(waiting, nodes, constant_values=True)[:, None]

    def pending(self) -> _Carry:
        """Reads the pairs of true features that wait, in the first slots."""
        head, pending = self.drafter.head, self.drafter.pending
        rows, slots = self.newest.shape[0], self.scratch_slots
        lanes = jnp.arange(pending)
        at = self.newest - (pending - 1 - lanes)
        tokens = jnp.take_along_axis(self.context.tokens, at, axis=1, mode="clip")
        guesses = jnp.zeros((rows, slots, head.width), head.dtype)
        empty = _Carry(head.init_scratch(rows, slots), guesses)
        # A place without a pair sees itself: a query that sees nothing is no number.
        itself = jnp.eye(pending, slots, dtype=bool)
        visible = jnp.tri(pending, slots, dtype=bool) & self.exists | itself
        positions = jnp.maximum(at - 1, 0)
        return self._read(empty, tokens, self.state.features, positions, lanes, visible)

    def feed(self, carry: _Carry, tokens: Array, level: Level) -> tuple[_Carry, Array]:
        """Reads a level of nodes, each with its parent's guess."""
        parents = jnp.broadcast_to(level.parents, tokens.shape)[:, :, None]
        features = jnp.take_along_axis(carry.guesses, parents, axis=1)
        positions = jnp.broadcast_to(self.newest - 1 + level.depth, tokens.shape)
        slots, visible = level.scratch_slots, level.visible & self.exists
        carry = self._read(carry, tokens, features, positions, slots, visible)
        return carry, self.logits(carry.guesses[:, slots])

    def logits(self, guesses: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        """Of the tokens after guessed features, over the target's ids."""
        found = self.drafter.head.logits(self.model, guesses)
        places = self.drafter.places
        return found if places is None else widen(found, places)

    def _read(self, carry, tokens, features, positions, slots, visible) -> _Carry:
        head = self.drafter.head
        pairs = head.join(head.embed(self.model, tokens), features)
        hidden, scratch = head.run_rows(
            self.state.cache, carry.scratch, pairs, positions, slots, visible
        )
        guesses = carry.guesses.at[:, slots].set(head.guess(hidden))
        return _Carry(scratch, guesses)
