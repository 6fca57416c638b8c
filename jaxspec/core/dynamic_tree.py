"""Trees whose contents are chosen in every round, in fixed shapes."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.errors import UserError


@dataclasses.dataclass(frozen=True)
class DynamicTree:
    """Expands the likeliest paths, and keeps the likeliest nodes (EAGLE-2).

    Li et al. 2024 (EAGLE-2), section 4. Contents follow from the draft's probabilities
    alone: no child is drawn, since pruning drawn ones by their score is biased.

    Attributes:
        depth: levels.
        top_k: nodes of a level that are expanded, and children of each.
        nodes: kept of all that were made.
    """

    depth: int
    top_k: int
    nodes: int

    def __post_init__(self):
        """Checks the numbers.

        Raises:
            UserError: one is below 1, fewer nodes are made than are to be kept, or more
                of a level are expanded than could ever be kept.
        """
        given = dataclasses.asdict(self)
        if min(given.values()) < 1:
            raise UserError(f"dynamic tree: {given}, expected numbers over 0")
        if not self.depth <= self.nodes <= self.candidates:
            raise UserError(
                f"dynamic tree: nodes is {self.nodes}, expected {self.depth} (the "
                f"depth) to {self.candidates} (all that are made)"
            )
        if self.top_k > self.nodes:
            raise UserError(
                f"dynamic tree: top_k is {self.top_k}, expected at most {self.nodes}, "
                "the nodes that are kept"
            )

    @property
    def candidates(self) -> int:
        """Nodes that are made in a round."""
        return self.top_k + (self.depth - 1) * self.top_k**2


class Candidates(NamedTuple):
    """All nodes of a round in the order they are made: a parent before its children.

    Attributes:
        scores: log-probability of the path; minus infinity: impossible.
        parents: their places in this order; -1 is the root.
        scratch_slots: where the entries of an expanded node lie.
    """

    tokens: Int[Array, "B C"]
    scores: Float[Array, "B C"]
    parents: Int[Array, "B C"]
    scratch_slots: Int[Array, "B C"]

    @classmethod
    def init(cls, tree: DynamicTree, rows: int, scratch_slot: int) -> "Candidates":
        """None yet; unexpanded nodes are said to lie in `scratch_slot`."""
        shape = rows, tree.candidates
        whole = jnp.zeros(shape, jnp.int32)
        scores = jnp.full(shape, -jnp.inf, jnp.float32)
        return cls(whole, scores, whole - 1, jnp.full_like(whole, scratch_slot))

    def add(
        self,
        start: Int[Array, ""],
        tokens: Int[Array, "B w K"],
        scores: Float[Array, "B w K"],
        parents: Int[Array, "B w"],
    ) -> "Candidates":
        """Puts the children of `parents` from place `start` on."""
        rows = tokens.shape[0]
        hung = jnp.broadcast_to(parents[:, :, None], tokens.shape)
        # What is not a number has no place in an order.
        scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)

        def put(old, new):
            return lax.dynamic_update_slice(old, new.reshape(rows, -1), (0, start))

        return self._replace(
            tokens=put(self.tokens, tokens),
            scores=put(self.scores, scores),
            parents=put(self.parents, hung),
        )

    def keep(self, nodes: int) -> tuple[Int[Array, "B N"], Int[Array, "B N"]]:
        """The places of the likeliest nodes in ascending order, and their parent slots.

        A path is never likelier than its parent's, and of equals the first is taken:
        the parent of a kept node is kept.
        """
        places = jnp.sort(lax.top_k(self.scores, nodes)[1], axis=1)
        parents = jnp.take_along_axis(self.parents, places, axis=1)
        is_parent = parents[:, :, None] == places[:, None, :]
        slots = jnp.where(is_parent.any(axis=-1), is_parent.argmax(axis=-1) + 1, 0)
        return places, slots.astype(jnp.int32)
