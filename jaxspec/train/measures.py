"""How good a drafter's guesses are."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.distributions import arg_max
from jaxspec.train.losses import mean_over, overlap, shift, tokens_per_round


class Measures(NamedTuple):
    """Of a batch; by depth, 1 first.

    Attributes:
        accuracy: how often the likeliest guess is the target's likeliest token.
        acceptance: how often a token drawn from the guess is accepted, temperature 1.
        greedy_tokens_per_round: expected of a chain, with the likeliest guesses.
        sampled_tokens_per_round: expected of a chain, at temperature 1.
    """

    accuracy: Float[Array, " depth"]
    acceptance: Float[Array, " depth"]
    greedy_tokens_per_round: Float[Array, ""]
    sampled_tokens_per_round: Float[Array, ""]

    def to_json(self) -> dict[str, Any]:
        """Numbers and lists of them, by name."""
        return {
            name: np.asarray(each).tolist() for name, each in self._asdict().items()
        }


class Guesses(NamedTuple):
    """Of one depth, by where their rounds begin.

    Attributes:
        right: the likeliest guess is the target's likeliest token.
        overlap: the chance that a token drawn from the guess is accepted.
    """

    right: Bool[Array, "B T"]
    overlap: Float[Array, "B T"]

    @classmethod
    def of(
        cls,
        target_log_probs: Float[Array, "B T v"],
        draft_log_probs: Float[Array, "B T v"],
        likeliest: Int[Array, "B T"],
        known: Int[Array, " v"] | None,
    ) -> "Guesses":
        """From distributions over a vocabulary of `known` ids; None: all."""
        best = arg_max(draft_log_probs)
        best = best if known is None else known[best]
        return cls(best == likeliest, overlap(target_log_probs, draft_log_probs))

    def begun(self, before: int) -> "Guesses":
        """The same, of rounds that began so many positions before."""
        return Guesses(*(shift(each, before) for each in self))


def measure(guesses: Sequence[Guesses], supervised: Bool[Array, "B T"]) -> Measures:
    """What guesses are worth.

    Args:
        guesses: by depth.
        supervised: where rounds begin whose first guess is about a token that the
            target wrote; each further one is about the token after.
    """
    right, accepted = (jnp.stack(each) for each in zip(*guesses, strict=True))
    depth = len(guesses)
    # A round whose last guesses are about nothing would count as a bad one.
    whole = supervised & shift(supervised, depth - 1)

    def by_depth(values):
        each = [mean_over(values[d], shift(supervised, d)) for d in range(depth)]
        return jnp.stack(each)

    def by_round(values):
        return tokens_per_round(values.astype(jnp.float32), whole)

    return Measures(
        by_depth(right), by_depth(accepted), by_round(right), by_round(accepted)
    )
