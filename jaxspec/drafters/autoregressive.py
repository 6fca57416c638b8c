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
    # A round has one token as it is.
    may_miss = False

    def propose(
        self, target: Target, state: State, context: Context, noise: Noise
    ) -> tuple[Draft, State]:
        """An empty draft."""
        return self.empty(context.tokens.shape[0]), state

    def empty(self, rows: int) -> Draft:
        """The draft of every round."""
        none = jnp.zeros((rows, 0), jnp.int32)
        return Draft(none, none, none.astype(bool))
