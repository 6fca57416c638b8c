"""The drafter that proposes nothing: plain decoding."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.drafters.stateless import Stateless
from jaxspec.types import Context, Draft, Noise, State, Target


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Autoregressive(Stateless):
    """No draft: every round emits the target's one next token."""

    nodes = depth = 0

    def propose(
        self, target: Target, state: State, context: Context, noise: Noise
    ) -> tuple[Draft, State]:
        """An empty draft."""
        empty = jnp.zeros((context.tokens.shape[0], 0), jnp.int32)
        return Draft(empty, empty, empty.astype(bool)), state
