"""What drafters share that keep nothing of their own between rounds."""

from jaxspec.types import Chunk, Draft, Output, State, Target, Verdict


class Stateless:
    """Three of the four verbs; `propose` is left to the drafter."""

    taps: tuple[int, ...] = ()
    prefix_layers = 0

    def init(self, rows: int, capacity: int, width: int) -> State:
        """No state."""
        return ()

    def prefill(
        self, target: Target, state: State, chunk: Chunk, output: Output
    ) -> State:
        """Nothing to take in."""
        return state

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
