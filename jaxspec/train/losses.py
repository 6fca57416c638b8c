"""What a drafter is trained to make small; each value is of one position.

`target_log_probs` may be of a part of the vocabulary, not adding up to 1: what the
target gives to the rest can never be accepted, and no drafter is blamed for it.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def mean_over(
    values: Float[Array, "*B"], supervised: Bool[Array, "*B"]
) -> Float[Array, ""]:
    """The mean of the supervised positions alone, however many others there are."""
    total = jnp.where(supervised, values, 0).sum()
    return total / jnp.maximum(supervised.sum(), 1)


def shift(values: Array, by: int) -> Array:
    """`values[b, t + by]` at `[b, t]`; zeros, or False, past the end.

    Inputs, labels and the mask of what is supervised are shifted by this, and never one
    without the others.
    """
    pad = ((0, 0), (0, by)) + ((0, 0),) * (values.ndim - 2)
    return jnp.pad(values, pad)[:, by:]


def cross_entropy(
    target_log_probs: Float[Array, "*B V"], draft_log_probs: Float[Array, "*B V"]
) -> Float[Array, "*B"]:
    """To the target's whole distribution: its forward KL but for a constant."""
    weighted = jnp.exp(target_log_probs) * draft_log_probs
    return -jnp.where(target_log_probs > -jnp.inf, weighted, 0).sum(axis=-1)


def reverse_kl(
    target_log_probs: Float[Array, "*B V"], draft_log_probs: Float[Array, "*B V"]
) -> Float[Array, "*B"]:
    """Of the draft from the target: seeks one of its modes."""
    difference = draft_log_probs - target_log_probs
    return (jnp.exp(draft_log_probs) * difference).sum(axis=-1)


def overlap(
    target_log_probs: Float[Array, "*B V"], draft_log_probs: Float[Array, "*B V"]
) -> Float[Array, "*B"]:
    """The chance that a drafted token is accepted, the sum of min(p, q).

    It is 1 less the total variation: Leviathan et al. 2023, section 3.2.
    """
    return jnp.exp(jnp.minimum(target_log_probs, draft_log_probs)).sum(axis=-1)


def total_variation(
    target_log_probs: Float[Array, "*B V"], draft_log_probs: Float[Array, "*B V"]
) -> Float[Array, "*B"]:
    """The chance that a drafted token is refused."""
    return 1 - overlap(target_log_probs, draft_log_probs)


# What a drafter may be trained to make small, by name.
LOSSES = {
    "forward-kl": cross_entropy,
    "reverse-kl": reverse_kl,
    "total-variation": total_variation,
}


def smooth_l1(
    wanted: Float[Array, "*B E"], guessed: Float[Array, "*B E"]
) -> Float[Array, "*B"]:
    """Between features, as EAGLE-1 has it: Li et al. 2024 (EAGLE)."""
    distance = jnp.abs(wanted - guessed)
    near = 0.5 * distance * distance
    return jnp.where(distance < 1, near, distance - 0.5).mean(axis=-1)


def tokens_per_round(
    accepted: Float[Array, "depth B T"], begins: Bool[Array, "B T"]
) -> Float[Array, ""]:
    """Expected tokens of a round, the last one included.

    Args:
        accepted: `[d, b, t]` is the chance that a chain's node of depth d + 1 is
            accepted if those before it were, of a round that begins at t.
        begins: where rounds may begin.
    """
    return 1 + mean_over(jnp.cumprod(accepted, axis=0).sum(axis=0), begins)
