"""Grows a tree whose contents are chosen by their likelihood (EAGLE-2)."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.distributions import fit_vocabulary, largest
from jaxspec.core.dynamic_tree import Candidates, DynamicTree
from jaxspec.drafters.levels import Feed, Level
from jaxspec.types import Context, Draft, Noise


class Frontier(NamedTuple):
    """The nodes of a level that are expanded next.

    Attributes:
        places: among all candidates.
        paths: the tokens on the way to each, itself included.
        visible: what each sees of the scratch, itself not yet included.
    """

    places: Int[Array, "B K"]
    paths: Int[Array, "B K depth"]
    visible: Bool[Array, "B K P"]


@dataclasses.dataclass(frozen=True)
class Expansion:
    """How a dynamic tree is grown.

    Attributes:
        pending: scratch slots before the nodes', which all nodes see; the last of them
            is the root's.
    """

    tree: DynamicTree
    pending: int

    @property
    def scratch_slots(self) -> int:
        """Slots of the scratch, P: expanded nodes have one each."""
        return self.pending + (self.tree.depth - 1) * self.tree.top_k

    def grow(
        self,
        context: Context,
        noise: Noise,
        vocabulary: int,
        root_logits: Float[Array, "B 1 V"],
        feed: Feed,
        carry: Any,
    ) -> tuple[Draft, Int[Array, "B N+1"], Any]:
        """Expands the likeliest nodes level by level and keeps the likeliest of all.

        As `Schedule.grow`, but nothing is drawn, so that the noise is not asked for,
        and a level's `parents` and `visible` have rows first.

        Returns:
            The draft, where each slot's entries lie in the scratch, and the carry.
        """
        del noise
        rows = context.tokens.shape[0]
        expand = functools.partial(self._expand, context, vocabulary)

        def step(state, depth):
            candidates, frontier, carry = state
            candidates, level = self._place(candidates, frontier, depth)
            tokens = _take(candidates.tokens, frontier.places)
            carry, logits = feed(carry, tokens, level)
            frontier = frontier._replace(visible=level.visible)
            return (*expand(candidates, frontier, logits, depth), carry), None

        none = Candidates.init(self.tree, rows, self.pending - 1)
        start = expand(none, self._root(rows), root_logits, jnp.int32(0))
        depths = jnp.arange(1, self.tree.depth)
        (candidates, _, carry), _ = lax.scan(step, (*start, carry), depths)
        return *self._keep(candidates, context.active), carry

    def _root(self, rows: int) -> Frontier:
        """The newest token alone; it is no candidate."""
        seen = jnp.arange(self.scratch_slots) < self.pending
        return Frontier(
            jnp.full((rows, 1), -1, jnp.int32),
            jnp.zeros((rows, 1, self.tree.depth), jnp.int32),
            jnp.broadcast_to(seen, (rows, 1, self.scratch_slots)),
        )

    def _place(
        self, candidates: Candidates, frontier: Frontier, depth: Int[Array, ""]
    ) -> tuple[Candidates, Level]:
        """Gives the nodes of a frontier their slots of the scratch."""
        rows, width = frontier.places.shape
        lanes = jnp.arange(width)
        slots = self.pending + (depth - 1) * width + lanes
        own = slots[:, None] == jnp.arange(self.scratch_slots)
        row = jnp.arange(rows)[:, None]
        placed = candidates.scratch_slots.at[row, frontier.places].set(slots)
        hung_on = _take(candidates.parents, frontier.places)
        parents = _take(candidates.scratch_slots, jnp.maximum(hung_on, 0))
        parents = jnp.where(hung_on < 0, self.pending - 1, parents)
        visible = frontier.visible | own
        level = Level(depth, lanes, lanes[:, None], slots, parents, visible)
        return candidates._replace(scratch_slots=placed), level

    def _expand(
        self,
        context: Context,
        vocabulary: int,
        candidates: Candidates,
        frontier: Frontier,
        logits: Float[Array, "B w V"],
        depth: Int[Array, ""],
    ) -> tuple[Candidates, Frontier]:
        """Adds the children of a frontier; the likeliest of them are the next one."""
        width, (rows, lanes) = self.tree.top_k, frontier.places.shape
        count = jnp.full((rows, lanes), depth)
        fitted = fit_vocabulary(logits, vocabulary)
        log_probs = context.warp(fitted, frontier.paths, count)
        tokens, own = largest(log_probs, width)
        # The root's score is that of a certain path.
        scores = jnp.where(depth == 0, 0.0, _take(candidates.scores, frontier.places))
        # Rounding may leave a certain token over 0, and likelier than its parent.
        scores = scores[..., None] + jnp.minimum(own, 0.0)
        start = jnp.maximum(width + (depth - 1) * width**2, 0)
        candidates = candidates.add(start, tokens, scores, frontier.places)

        fresh = lax.dynamic_slice_in_dim(candidates.scores, start, lanes * width, 1)
        chosen = lax.top_k(fresh, width)[1]
        places, parents = start + chosen, (chosen // width)[:, :, None]
        paths, visible = (
            jnp.take_along_axis(each, parents, axis=1)
            for each in (frontier.paths, frontier.visible)
        )
        paths = paths.at[:, :, depth].set(_take(candidates.tokens, places))
        return candidates, Frontier(places, paths, visible)

    def _keep(
        self, candidates: Candidates, active: Bool[Array, " B"]
    ) -> tuple[Draft, Int[Array, "B N+1"]]:
        """The likeliest of all as a draft, and where their entries lie."""
        places, parents = candidates.keep(self.tree.nodes)
        valid = (_take(candidates.scores, places) > -jnp.inf) & active[:, None]
        slots = _take(candidates.scratch_slots, places)
        root = ((0, 0), (1, 0))
        in_scratch = jnp.pad(slots, root, constant_values=self.pending - 1)
        return Draft(_take(candidates.tokens, places), parents, valid), in_scratch


def _take(values: Array, places: Int[Array, "B n"]) -> Array:
    return jnp.take_along_axis(values, places, axis=1)
