"""Medusa: heads on the target's last hidden state, each a guess at a later token.

Cai et al. 2024 (Medusa), section 2.1.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.core.distributions import widen
from jaxspec.core.topology import Topology
from jaxspec.drafters.levels import Level, Schedule
from jaxspec.drafters.shaped import Shaped
from jaxspec.models.layers import project
from jaxspec.types import Chunk, Context, Draft, Model, Noise, Output, Target, Verdict


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Heads:
    """`heads` stacks of residual blocks, and what turns their output into logits.

    Attributes:
        weights: of the blocks, y = x + silu(W x + b).
        vocabulary: a head's own last matrix; None: the target's head serves all.
        known: the ids that are drafted; None: all.
        places: where each target id stands among them, their number if it does not.
    """

    weights: Float[Array, "heads layers E E"]
    biases: Float[Array, "heads layers E"]
    vocabulary: Float[Array, "heads v E"] | None = None
    known: Int[Array, " v"] | None = None
    places: Int[Array, " V"] | None = None

    def __call__(
        self, model: Model, hidden: Float[Array, "B E"], count: int
    ) -> Float[Array, "B count V"]:
        """Logits of the first `count` heads; `hidden` is not normed yet."""
        normed = model.norm(hidden).astype(self.weights.dtype)
        features = [self.features(normed, head) for head in range(count)]
        if self.vocabulary is None:
            stacked = jnp.stack(features, axis=1).astype(hidden.dtype)
            logits = model.unembed(stacked, self.known)
        else:
            pairs = zip(features, self.vocabulary, strict=False)
            logits = jnp.stack([project(*pair, jnp.float32) for pair in pairs], axis=1)
        return logits if self.places is None else widen(logits, self.places)

    def features(self, normed: Float[Array, "*B E"], head: int) -> Float[Array, "*B E"]:
        """What a head makes of the target's normed hidden state."""
        for layer in range(self.weights.shape[1]):
            mixed = project(normed, self.weights[head, layer])
            normed = normed + jax.nn.silu(mixed + self.biases[head, layer])
        return normed


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["heads"], meta_fields=["topology"]
)
@dataclass(frozen=True)
class Medusa(Shaped):
    """Drafts depth d with head d, whatever was drafted before it.

    The heads read the hidden state that the newest token was drawn from, so that a
    round drafts before it runs the target. That state is all that is kept.
    """

    heads: Heads
    topology: Topology

    taps = ()
    prefix_layers = 0

    def init(self, rows: int, capacity: int, width: int) -> Float[Array, "B E"]:
        """A hidden state of zeros."""
        return jnp.zeros((rows, self.heads.weights.shape[-1]), self.heads.weights.dtype)

    def prefill(
        self, target: Target, state: Array, chunk: Chunk, output: Output
    ) -> Float[Array, "B E"]:
        """Keeps the last token's."""
        last = jnp.maximum(chunk.count - 1, 0)
        return _keep(state, output, last, chunk.count > 0)

    def propose(
        self, target: Target, state: Array, context: Context, noise: Noise
    ) -> tuple[Draft, Array]:
        """Draws each level from its head; children of all its nodes alike."""
        logits = self.heads(target.model, state, self.depth)
        schedule = Schedule(self.topology, pending=1)

        def feed(carry, tokens, level: Level):
            own = jnp.take(logits, level.depth, axis=1)[:, None]
            return carry, jnp.repeat(own, tokens.shape[1], axis=1)

        vocabulary = target.model.vocab_size
        draft, _, state = schedule.grow(
            context, noise, vocabulary, logits[:, :1], feed, state
        )
        return draft, state

    def commit(
        self,
        target: Target,
        state: Array,
        draft: Draft,
        verdict: Verdict,
        output: Output,
    ) -> Float[Array, "B E"]:
        """Keeps that of the last committed slot, which the newest was drawn from."""
        last = jnp.maximum(verdict.count - 1, 0)[:, None]
        slot = jnp.take_along_axis(verdict.path, last, axis=1)[:, 0]
        return _keep(state, output, slot, verdict.count > 0)


def _keep(state, output: Output, slot, there) -> Float[Array, "B E"]:
    fresh = jnp.take_along_axis(output.hidden, slot[:, None, None], axis=1)[:, 0]
    return jnp.where(there[:, None], fresh.astype(state.dtype), state)
