"""Self-speculation: the target's own first layers draft, and verify goes on from them.

Zhang et al. 2024 (Draft & Verify); Elhoushi et al. 2024 (LayerSkip), section 4.3. A
model that was not trained for it accepts little: its first layers do not yet know the
answer.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxspec.cache import run_rows
from jaxspec.core.distributions import widen
from jaxspec.core.topology import Topology
from jaxspec.drafters.levels import Level, Schedule
from jaxspec.drafters.shaped import Shaped
from jaxspec.drafters.stateless import Stateless
from jaxspec.models.layers import Linear, RMSNorm
from jaxspec.types import Context, Draft, Noise, State, Target


class ExitAdapter(nnx.Module):
    """Makes the hidden state at the exit look like the last one: x + W norm(x).

    With W zero, as it is made, it changes nothing.
    """

    def __init__(self, width: int, norm_eps: float, dtype, rngs: nnx.Rngs):
        self.norm = RMSNorm(width, norm_eps)
        self.linear = Linear(width, width, False, dtype, rngs)
        self.linear.weight = nnx.Param(jnp.zeros((width, width), dtype))

    def __call__(self, hidden: Float[Array, "*B E"]) -> Float[Array, "*B E"]:
        """Applies it to any batch."""
        return hidden + self.linear(self.norm(hidden))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["adapter", "known", "places"],
    meta_fields=["layers", "topology"],
)
@dataclass(frozen=True)
class EarlyExit(Shaped, Stateless):
    """Drafts with the first `layers` layers, the final norm and the head.

    It keeps nothing between rounds: the target's cache holds what these layers have
    read. What they compute in a round is handed to the verify, keys and values and the
    hidden states, so that no layer computes a node twice.

    Attributes:
        adapter: applied to the hidden state before the norm; None: nothing is.
        known: the ids that are drafted; None: all.
        places: where each target id stands among them, their number if it does not.
    """

    layers: int
    topology: Topology
    adapter: Any = None
    known: Int[Array, " v"] | None = None
    places: Int[Array, " V"] | None = None

    @property
    def prefix_layers(self) -> int:
        """Layers of the target that `propose` runs for every slot."""
        return self.layers

    def propose(
        self, target: Target, state: State, context: Context, noise: Noise
    ) -> tuple[Draft, State]:
        """Grows the tree from the newest token; leaves are fed too, for the verify."""
        schedule = Schedule(self.topology, pending=1, leaves=True)
        model, rows = target.model, context.tokens.shape[0]

        def run(carry, tokens, level: Level):
            """Feeds a level into the first layers, and keeps its hidden states."""
            scratch, kept = carry
            offsets = jnp.broadcast_to(level.depth, tokens.shape)
            output, scratch = run_rows(
                model,
                target.cache,
                scratch,
                tokens,
                context.length[:, None] - 1 + offsets,
                level.scratch_slots,
                jnp.broadcast_to(level.visible, (rows, *level.visible.shape)),
                last=self.layers,
            )
            kept = kept.at[:, level.scratch_slots].set(output.hidden)
            return (scratch, kept), output.hidden

        def feed(carry, tokens, level: Level):
            carry, hidden = run(carry, tokens, level)
            return carry, self._logits(model, hidden)

        slots = schedule.scratch_slots
        kept = jnp.repeat(model.init_hidden(rows)[:, None], slots, axis=1)
        newest = jnp.take_along_axis(
            context.tokens, context.length[:, None] - 1, axis=1
        )
        carry = (model.init_scratch(rows, slots), kept)
        carry, logits = feed(carry, newest, schedule.root)
        draft, _, carry = schedule.grow(
            context, noise, model.vocab_size, logits, feed, carry
        )
        deepest = schedule.deepest
        carry, _ = run(carry, draft.tokens[:, deepest.slots - 1], deepest)
        scratch, kept = carry
        used = slice(self.nodes + 1)
        prefix = (kept[:, used], scratch.first(self.nodes + 1))
        return draft._replace(prefix=prefix), state

    def _logits(self, model, hidden) -> Float[Array, "B W V"]:
        adapted = hidden if self.adapter is None else self.adapter(hidden)
        logits = model.unembed(model.norm(adapted), self.known)
        return logits if self.places is None else widen(logits, self.places)
