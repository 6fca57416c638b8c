"""Grows a tree whose contents are chosen by their likelihood (EAGLE-2)."""

import dataclasses
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
        and a level's `visible` has rows first.

        Returns:
            The draft, where each slot's entries lie in the scratch, and the carry.
        """
        del noise
        tree, pending, scratch_slots = self.tree, self.pending, self.scratch_slots
        rows, width = context.tokens.shape[0], tree.top_k

        def children(logits, frontier: Frontier, scores, depth):
            """The likeliest children of each node, and the scores of their paths."""
            count = jnp.full(frontier.places.shape, depth)
            fitted = fit_vocabulary(logits, vocabulary)
            log_probs = context.warp(fitted, frontier.paths, count)
            tokens, own = largest(log_probs, width)
            # Rounding may leave a certain token over 0, and likelier than its parent.
            return tokens, scores[..., None] + jnp.minimum(own, 0.0)

        def advance(candidates, start, tokens, scores, frontier: Frontier, depth):
            """Adds the children, and makes the likeliest of them the next frontier."""
            candidates = candidates.add(start, tokens, scores, frontier.places)
            flat = jnp.where(jnp.isnan(scores), -jnp.inf, scores).reshape(rows, -1)
            chosen = lax.top_k(flat, width)[1]
            lanes = chosen // width

            def inherit(values):
                index = lanes.reshape(rows, width, *(1,) * (values.ndim - 2))
                return jnp.take_along_axis(values, index, axis=1)

            drawn = jnp.take_along_axis(tokens.reshape(rows, -1), chosen, axis=1)
            paths = inherit(frontier.paths).at[:, :, depth].set(drawn)
            return candidates, Frontier(
                start + chosen, paths, inherit(frontier.visible)
            )

        def step(state, depth):
            candidates, frontier, carry = state
            lanes = jnp.arange(width)
            slots = pending + (depth - 1) * width + lanes
            visible = frontier.visible | (slots[:, None] == jnp.arange(scratch_slots))
            placed = candidates.scratch_slots.at[
                jnp.arange(rows)[:, None], frontier.places
            ].set(slots)
            candidates = candidates._replace(scratch_slots=placed)
            tokens = jnp.take_along_axis(candidates.tokens, frontier.places, axis=1)
            level = Level(depth, lanes, lanes[:, None], slots, visible)
            carry, logits = feed(carry, tokens, level)
            scores = jnp.take_along_axis(candidates.scores, frontier.places, axis=1)
            frontier = frontier._replace(visible=visible)
            tokens, scores = children(logits, frontier, scores, depth)
            start = width + (depth - 1) * width**2
            candidates, frontier = advance(
                candidates, start, tokens, scores, frontier, depth
            )
            return (candidates, frontier, carry), None

        seen = jnp.broadcast_to(
            jnp.arange(scratch_slots) < pending, (rows, 1, scratch_slots)
        )
        none = jnp.zeros((rows, 1, tree.depth), jnp.int32)
        root = Frontier(jnp.full((rows, 1), -1, jnp.int32), none, seen)
        candidates = Candidates.init(tree, rows, pending - 1)
        certain = jnp.zeros((rows, 1), jnp.float32)
        tokens, scores = children(root_logits, root, certain, 0)
        candidates, frontier = advance(candidates, 0, tokens, scores, root, 0)
        state = (candidates, frontier, carry)
        (candidates, _, carry), _ = lax.scan(step, state, jnp.arange(1, tree.depth))
        places, parents = candidates.keep(tree.nodes)

        def of_kept(values):
            return jnp.take_along_axis(values, places, axis=1)

        valid = (of_kept(candidates.scores) > -jnp.inf) & context.active[:, None]
        in_scratch = jnp.pad(
            of_kept(candidates.scratch_slots),
            ((0, 0), (1, 0)),
            constant_values=pending - 1,
        )
        return Draft(of_kept(candidates.tokens), parents, valid), in_scratch, carry
