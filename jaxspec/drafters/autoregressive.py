"""The drafter that proposes nothing: plain decoding."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.types import Chunk, Context, Draft, Noise, Output, State, Target, Verdict


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Autoregressive:
    """No draft: every round emits the target's one next token."""

    taps: tuple[int, ...] = ()
    nodes: int = 0
    depth: int = 0
    prefix_layers: int = 0

    def init(self, rows: int, capacity: int, width: int) -> State:
        """No state."""
        return ()

    def prefill(
        self, target: Target, state: State, chunk: Chunk, output: Output
    ) -> State:
        """Nothing to take in."""
        return state

    def propose(
        self, target: Target, state: State, context: Context, noise: Noise
    ) -> tuple[Draft, State]:
        """An empty draft."""
        empty = jnp.zeros((context.tokens.shape[0], 0), jnp.int32)
        return Draft(empty, empty, empty.astype(bool)), state

    def commit(
        self,
        target: Target,
        state: State,
        draft: Draft,
        verdict: Verdict,
        output: Output,
    ) -> State:
        """Nothing to keep."""
        return state
