"""Grows a tree of drafted tokens level by level; a chain is one of a node a level."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.distributions import fit_vocabulary, largest
from jaxspec.core.topology import Topology
from jaxspec.types import Context, Draft, Noise


class Level(NamedTuple):
    """Nodes of equal depth that are fed together, padded to the widest level.

    Attributes:
        depth: of them all.
        slots: of the draft.
        children: the slots of the nodes that hang on each; N + 1 where there is none.
        scratch_slots: where their keys and values go.
        parents: where those of the node lie that each hangs on.
        visible: what each sees of the scratch.
    """

    depth: Int[Array, ""]
    slots: Int[Array, " W"]
    children: Int[Array, "W R"]
    scratch_slots: Int[Array, " W"]
    parents: Int[Array, " W"]
    visible: Bool[Array, "W P"]


# (carry, tokens[B, W], level) -> carry, logits[B, W, V] of what follows each token.
Feed = Callable[[Any, Array, Level], tuple[Any, Array]]


class Grown(NamedTuple):
    """The tree so far; a column for each slot, and one that takes what is not there."""

    tokens: Int[Array, "B N+2"]
    valid: Bool[Array, "B N+2"]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """In which order a topology is fed, and where its entries lie in the scratch.

    Entries lie one after another in the order in which they are fed, which is the
    slots' own where leaves are fed too; behind them come those of padding.

    Attributes:
        pending: scratch slots before the nodes'; the last of them is the root's.
        leaves: feed nodes without children too.
    """

    topology: Topology
    pending: int
    leaves: bool = False

    def fed_at(self, depth: int) -> list[int]:
        """The slots of a level that are fed."""
        inner = set(self.topology.parents)
        return [
            slot
            for slot, its_depth in enumerate(self.topology.depths)
            if its_depth == depth and (self.leaves or slot in inner)
        ]

    @functools.cached_property
    def fed(self) -> list[list[int]]:
        """The slots of each level after the root and before the deepest."""
        return [self.fed_at(depth) for depth in range(1, self.topology.depth)]

    @property
    def width(self) -> int:
        """Nodes of the widest of these levels."""
        return max(map(len, self.fed), default=1)

    @property
    def used_slots(self) -> int:
        """Slots of the scratch that hold pending entries or nodes."""
        deepest = self.fed_at(self.topology.depth)
        return self.pending + sum(map(len, self.fed)) + len(deepest)

    @property
    def scratch_slots(self) -> int:
        """Slots of the scratch, P; lanes that pad a level have the last of them."""
        return self.used_slots + self.width - min(map(len, self.fed), default=1)

    @functools.cached_property
    def in_scratch(self) -> Int[np.ndarray, " N+1"]:
        """Where each slot's entries lie; of one that is not fed at the root's."""
        places = np.full(self.topology.nodes + 1, self.pending - 1)
        order = [s for level in self.fed for s in level]
        order += self.fed_at(self.topology.depth)
        places[order] = self.pending + np.arange(len(order))
        return places

    def children(self, slot: int) -> list[int]:
        """The slots that hang on one, then N + 1 up to the most that any has."""
        own = [n + 1 for n, p in enumerate(self.topology.parents) if p == slot]
        missing = self.topology.most_children - len(own)
        return own + [self.topology.nodes + 1] * missing

    def level(self, depth: int, width: int) -> Level:
        """The nodes of a depth, in `width` lanes; as NumPy arrays."""
        own = [0] if depth == 0 else self.fed_at(depth)
        missing = width - len(own)
        slots = np.array(own + [0] * missing)
        nothing = [[self.topology.nodes + 1] * self.topology.most_children]
        children = np.array([*map(self.children, own), *nothing * missing])
        padding = self.used_slots + np.arange(missing)
        places = np.concatenate([self.in_scratch[own], padding])
        parents = np.full(width, self.pending - 1)
        if depth:
            hung_on = np.array(self.topology.parents)[np.array(own) - 1]
            parents[: len(own)] = self.in_scratch[hung_on]
        visible = np.zeros((width, self.scratch_slots), bool)
        visible[:, : self.pending] = True
        # Padding sees itself too: a query that sees nothing is not a number.
        np.put_along_axis(visible, places[:, None], True, axis=1)
        for lane, slot in enumerate(own):
            way = self.topology.ancestors[slot]
            visible[lane, self.in_scratch[way[way > 0]]] = True
        level = np.array(depth), slots, children, places, parents, visible
        return Level(*level)  # pyright: ignore

    @property
    def root(self) -> Level:
        """The level of the newest token alone, which the drafter feeds itself."""
        return jax.tree.map(jnp.asarray, self.level(0, 1))

    @property
    def levels(self) -> Level:
        """The levels between the root and the deepest, stacked for a `lax.scan`."""
        depths = range(1, self.topology.depth)
        levels = [self.level(depth, self.width) for depth in depths]
        if not levels:
            empty = self.level(0, 1)
            return jax.tree.map(lambda leaf: jnp.asarray(leaf[None][:0]), empty)
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *levels)

    @property
    def deepest(self) -> Level:
        """The last level; no token is drawn after it."""
        depth = self.topology.depth
        level = self.level(depth, len(self.fed_at(depth)))
        return jax.tree.map(jnp.asarray, level)

    @functools.cached_property
    def row_order(self) -> Int[np.ndarray, " M"]:
        """Where each slot's distribution is among the root's and all lanes' ones."""
        order = np.zeros(self.topology.rows, int)
        for step, slots in enumerate(self.fed):
            for lane, slot in enumerate(slots):
                if slot < self.topology.rows:
                    order[slot] = 1 + step * self.width + lane
        return order

    def grow(
        self,
        context: Context,
        noise: Noise,
        vocabulary: int,
        root_logits: Float[Array, "B 1 V"],
        feed: Feed,
        carry: Any,
    ) -> tuple[Draft, Int[Array, "B N+1"], Any]:
        """Draws the children of the root, feeds them, draws theirs, and so on.

        The children of a slot are the top of its log-probabilities plus the noise:
        drawn without replacement (Kool et al. 2019, section 2.3), on greedy rows the
        likeliest.

        Returns:
            The draft, where each slot's entries lie in the scratch, and the carry.
        """
        topology = self.topology
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
            scores = log_probs + noise(slots, positions)
            tokens, drawn = largest(scores, topology.most_children)
            # A row that is not numbers is left to the rule, which refuses what it drew.
            possible = (drawn != -jnp.inf) & grown.valid[:, level.slots, None]
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
        grown, first = branch(Grown(columns, root_valid), root_logits, self.root)
        (grown, carry), rest = lax.scan(step, (grown, carry), self.levels)
        rest = jnp.moveaxis(rest, 0, 1).reshape(rows, -1, vocabulary)
        log_probs = jnp.concatenate([first, rest], axis=1)
        order = self.row_order
        if not np.array_equal(order, np.arange(log_probs.shape[1])):
            log_probs = log_probs[:, order]
        nodes = slice(1, topology.nodes + 1)
        parents = jnp.asarray(topology.parents, jnp.int32)
        parents = jnp.broadcast_to(parents, (rows, topology.nodes))
        draft = Draft(grown.tokens[:, nodes], parents, grown.valid[:, nodes], log_probs)
        in_scratch = jnp.asarray(self.in_scratch, jnp.int32)
        return draft, jnp.broadcast_to(in_scratch, (rows, topology.nodes + 1)), carry
