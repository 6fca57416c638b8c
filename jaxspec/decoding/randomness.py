"""The random numbers of one round, by the keys that its acceptance rule asks for."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec.core import noise


class Randomness(NamedTuple):
    """Noise of a round; zero on greedy rows, and nobody else sees a key.

    Under a rule that shares noise, target and drafter draw a token with the Gumbel
    noise of its position, which is plain decoding's. Under any other each draw has its
    own, keyed by the length at which the round began.
    """

    keys: UInt32[Array, "B 2"]
    length: Int[Array, " B"]
    greedy: Bool[Array, " B"]
    vocabulary: int
    shared: bool

    def draft(
        self, slots: Int[Array, "B m"], positions: Int[Array, "B m"]
    ) -> Float[Array, "B m V"]:
        """Of tokens that a drafter draws; a drafter's `Noise`."""
        return self._draw(noise.DRAFT_TOKEN, slots, positions)

    def accept(self, nodes: int, depth: int) -> Array:
        """What the rule takes: uniforms by node, or Gumbel noise by depth if shared."""
        rows = self.length.shape[0]
        if self.shared:
            positions = self.length[:, None] + jnp.arange(depth + 1)
            return self._draw(noise.NEXT_TOKEN, jnp.zeros_like(positions), positions)
        slots = jnp.broadcast_to(jnp.arange(1, nodes + 1), (rows, nodes))
        return noise.uniforms(self.keys, self.length, slots, noise.ACCEPT)

    def next_token(
        self, accepted: Int[Array, " B"], accepting: Array
    ) -> Float[Array, "B V"]:
        """Of the token after the accepted ones; `accepting` is what the rule took."""
        if self.shared:
            at = accepted[:, None, None]
            return jnp.take_along_axis(accepting, at, axis=1)[:, 0]
        root = jnp.zeros((accepted.shape[0], 1), jnp.int32)
        return self._draw(noise.NEXT_TOKEN, root, self.length[:, None])[:, 0]

    def _draw(self, purpose, slots, positions) -> Float[Array, "B m V"]:
        def draw():
            if self.shared:
                drawn = noise.shared_gumbels(self.keys, positions, self.vocabulary)
            else:
                drawn = noise.gumbels(
                    self.keys, self.length, slots, purpose, self.vocabulary
                )
            return jnp.where(self.greedy[:, None, None], 0.0, drawn)

        # One branch for the batch: a greedy batch draws nothing.
        silence = jnp.zeros((*slots.shape, self.vocabulary))
        return lax.cond(self.greedy.all(), lambda: silence, draw)
