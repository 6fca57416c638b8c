"""Grows a tree of drafted tokens level by level; a chain is one of a node a level."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.distributions import arg_max, at, fit_vocabulary
from jaxspec.core.topology import Topology
from jaxspec.types import Context, Draft, Noise


class Level(NamedTuple):
    """Nodes of equal depth that are fed together, padded to the widest level.

    Attributes:
        depth: of them all.
        slots: of the draft.
        children: the slots of the nodes that hang on each; N + 1 where there is none.
        scratch_slots: where their keys and values go.
        visible: what each sees of the scratch.
    """

    depth: Int[Array, ""]
    slots: Int[Array, " W"]
    children: Int[Array, "W R"]
    scratch_slots: Int[Array, " W"]
    visible: Bool[Array, "W P"]


# (carry, tokens[B, W], level) -> carry, logits[B, W, V] of what follows each token.
Feed = Callable[[Any, Array, Level], tuple[Any, Array]]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """In which order a topology is fed, and where its entries lie in the scratch.

    Only nodes with children are fed.

    Attributes:
        pending: scratch slots before the nodes'; the last of them is the root's.
    """

    topology: Topology
    pending: int

    @functools.cached_property
    def fed(self) -> list[list[int]]:
        """The slots of each level after the root that have a child."""
        depths, inner = self.topology.depths, set(self.topology.parents)
        return [
            [slot for slot in sorted(inner) if depths[slot] == depth]
            for depth in range(1, self.topology.depth)
        ]

    @property
    def width(self) -> int:
        """Nodes of the widest level."""
        return max(map(len, self.fed), default=1)

    @property
    def scratch_slots(self) -> int:
        """Slots of the scratch, padding of narrow levels included, P."""
        return self.pending + len(self.fed) * self.width

    @functools.cached_property
    def in_scratch(self) -> Int[np.ndarray, " N+1"]:
        """Where each slot's entries lie; of one that is not fed at the root's."""
        places = np.full(self.topology.nodes + 1, self.pending - 1)
        for step, slots in enumerate(self.fed):
            first = self.pending + step * self.width
            places[slots] = first + np.arange(len(slots))
        return places

    def children(self, slot: int) -> list[int]:
        """The slots that hang on one, then N + 1 up to the most that any has."""
        own = [n + 1 for n, p in enumerate(self.topology.parents) if p == slot]
        missing = self.topology.most_children - len(own)
        return own + [self.topology.nodes + 1] * missing

    @property
    def root(self) -> Level:
        """The level of the newest token alone, which the drafter feeds itself."""
        visible = np.arange(self.scratch_slots) < self.pending
        children = np.array([self.children(0)])
        place, zero = np.array([self.pending - 1]), np.array([0])
        return Level(*map(jnp.asarray, (0, zero, children, place, visible[None])))

    @property
    def levels(self) -> Level:
        """All levels after the root, stacked for a `lax.scan`."""
        steps, width = len(self.fed), self.width
        nothing = [self.topology.nodes + 1] * self.topology.most_children
        slots = np.zeros((steps, width), int)
        children = np.tile(np.array(nothing), (steps, width, 1))
        places = np.arange(self.pending, self.scratch_slots).reshape(steps, width)
        visible = np.zeros((steps, width, self.scratch_slots), bool)
        visible[..., : self.pending] = True
        # Padding sees itself too: a query that sees nothing is not a number.
        np.put_along_axis(visible, places[..., None], True, axis=2)
        for step, own in enumerate(self.fed):
            slots[step, : len(own)] = own
            for lane, slot in enumerate(own):
                children[step, lane] = self.children(slot)
                way = self.topology.ancestors[slot]
                visible[step, lane, self.in_scratch[way[way > 0]]] = True
        depth = np.arange(1, steps + 1)
        return Level(*map(jnp.asarray, (depth, slots, children, places, visible)))

    @functools.cached_property
    def row_order(self) -> Int[np.ndarray, " M"]:
        """Where each slot's distribution is among the root's and all lanes' ones."""
        return np.maximum(self.in_scratch[: self.topology.rows] - self.pending + 1, 0)


class Grown(NamedTuple):
    """The tree so far; a column for each slot, and one that takes what is not there."""

    tokens: Int[Array, "B N+2"]
    valid: Bool[Array, "B N+2"]


def grow(
    schedule: Schedule,
    context: Context,
    noise: Noise,
    vocabulary: int,
    root_logits: Float[Array, "B 1 V"],
    feed: Feed,
    carry: Any,
) -> tuple[Draft, Any]:
    """Draws the children of the root, feeds them, draws theirs, and so on.

    The children of a slot are the top of its log-probabilities plus the noise: drawn
    without replacement (Kool et al. 2019, section 2.3), on greedy rows the likeliest.
    """
    topology = schedule.topology
    rows = context.tokens.shape[0]
    ancestors = jnp.asarray(topology.ancestors)

    def branch(grown: Grown, logits: Array, level: Level):
        """Draws the children of a level's nodes."""
        paths = grown.tokens[:, ancestors[level.slots]]
        count = jnp.broadcast_to(level.depth, paths.shape[:2])
        fitted = fit_vocabulary(logits, vocabulary)
        log_probs = context.warp(fitted, paths, count)
        slots = jnp.broadcast_to(level.slots, count.shape)
        positions = context.length[:, None] + count
        tokens, possible = _top(log_probs, noise(slots, positions), topology)
        possible &= grown.valid[:, level.slots, None]
        return Grown(
            grown.tokens.at[:, level.children].set(tokens),
            grown.valid.at[:, level.children].set(possible),
        ), log_probs

    def step(state, level: Level):
        grown, carry = state
        carry, logits = feed(carry, grown.tokens[:, level.slots], level)
        grown, log_probs = branch(grown, logits, level)
        return (grown, carry), log_probs

    columns = jnp.zeros((rows, topology.nodes + 2), jnp.int32)
    root_valid = columns.astype(bool).at[:, 0].set(context.active)
    grown, first = branch(Grown(columns, root_valid), root_logits, schedule.root)
    (grown, carry), rest = lax.scan(step, (grown, carry), schedule.levels)
    rest = jnp.moveaxis(rest, 0, 1).reshape(rows, -1, vocabulary)
    log_probs = jnp.concatenate([first, rest], axis=1)
    order = schedule.row_order
    if not np.array_equal(order, np.arange(log_probs.shape[1])):
        log_probs = log_probs[:, order]
    nodes = slice(1, topology.nodes + 1)
    parents = jnp.asarray(topology.parents, jnp.int32)
    parents = jnp.broadcast_to(parents, (rows, topology.nodes))
    draft = Draft(grown.tokens[:, nodes], parents, grown.valid[:, nodes], log_probs)
    return draft, carry


def _top(
    log_probs: Float[Array, "B W V"], gumbel: Float[Array, "B W V"], topology: Topology
) -> tuple[Int[Array, "B W R"], Bool[Array, "B W R"]]:
    """The ids of the largest sums, and which of them are possible at all.

    Arg-max after arg-max: `lax.top_k` sorts, and gathers a sharded vocabulary.
    """
    scores = log_probs + gumbel
    ids = jnp.arange(scores.shape[-1])
    tokens = []
    for _ in range(topology.most_children):
        tokens.append(arg_max(scores))
        scores = jnp.where(ids == tokens[-1][..., None], -jnp.inf, scores)
    # A row that is not numbers is left to the rule, which refuses what it drew.
    possible = [at(log_probs, token) != -jnp.inf for token in tokens]
    return jnp.stack(tokens, axis=-1), jnp.stack(possible, axis=-1)
