"""How good a drafter's guesses are."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.distributions import arg_max
from jaxspec.train.losses import mean_over, overlap, shift, tokens_per_round


class Measures(NamedTuple):
    """Of a batch; by depth, 1 first.

    Attributes:
        accuracy: how often the likeliest guess is the target's likeliest token.
        acceptance: how often a token drawn from the guess is accepted, temperature 1.
        greedy_tokens_per_round: expected, with the likeliest guesses.
        sampled_tokens_per_round: expected, at temperature 1.
    """

    accuracy: Float[Array, " depth"]
    acceptance: Float[Array, " depth"]
    greedy_tokens_per_round: Float[Array, ""]
    sampled_tokens_per_round: Float[Array, ""]


class Guesses(NamedTuple):
    """Of one depth, at the position after which they were made."""

    overlap: Float[Array, "B T"]
    likeliest: Int[Array, "B T"]

    @classmethod
    def of(
        cls,
        target_log_probs: Float[Array, "B T v"],
        draft_log_probs: Float[Array, "B T v"],
        known: Int[Array, " v"] | None,
    ) -> "Guesses":
        """From distributions over a vocabulary of `known` ids."""
        best = arg_max(draft_log_probs)
        best = best if known is None else known[best]
        return cls(overlap(target_log_probs, draft_log_probs), best)


def measure(
    guesses: Sequence[Guesses],
    likeliest: Int[Array, "B T"],
    supervised: Bool[Array, "B T"],
) -> Measures:
    """Guesses against the target's choices; those of depth d + 1 stand d further on.

    Args:
        guesses: by depth.
        likeliest: the target's, where a first guess about it stands.
        supervised: where a first guess is about a token that the target wrote.
    """
    equal = jnp.stack([guess.likeliest == likeliest for guess in guesses])
    accepted = jnp.stack([guess.overlap for guess in guesses])
    depths = range(len(guesses))
    # A round whose last guesses are about nothing would count as a bad one.
    whole = supervised & shift(supervised, len(guesses) - 1)

    def by_round(values):
        moved = jnp.stack([shift(values[depth], depth) for depth in depths])
        return tokens_per_round(moved.astype(jnp.float32), whole)

    def by_depth(values):
        return jnp.stack([mean_over(each, supervised) for each in values])

    return Measures(
        by_depth(equal), by_depth(accepted), by_round(equal), by_round(accepted)
    )
