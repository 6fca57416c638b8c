"""Tells a drafter that fits its target from one that was loaded wrongly."""

import warnings

import numpy as np

from jaxspec.decoding.state import Statistics
from jaxspec.drafters.stateless import Stateless
from jaxspec.types import Drafter

FIRST_ROUNDS = 200
# A draft by chance alone does better with most vocabularies' commonest tokens.
SUSPICIOUS = 0.02


class AcceptanceWatch:
    """Adds up what became of first draft tokens, and warns once if nearly none held."""

    def __init__(self, drafter: Drafter):
        """Watches from now on."""
        self._rounds = self._accepted = 0
        # One without weights of its own has no checkpoint to be wrong.
        self._done = isinstance(drafter, Stateless)

    def see(self, statistics: Statistics) -> None:
        """Takes in a batch; the verdict falls with the first 200 rounds or more."""
        if self._done:
            return
        # A chain has one first node in each round that has any, a tree more.
        drafting = np.minimum(statistics.rounds, statistics.drafted[:, 0])
        self._rounds += int(drafting.sum())
        self._accepted += int(statistics.accepted[:, 0].sum())
        if self._rounds < FIRST_ROUNDS:
            return
        self._done = True
        if self._accepted < SUSPICIOUS * self._rounds:
            warnings.warn(
                f"the drafter's first tokens were accepted in {self._accepted} of "
                f"{self._rounds} rounds: its checkpoint may have been mis-loaded, "
                "or not be made for this target; plain decoding is faster",
                stacklevel=2,
            )
