"""Log-probabilities of the emitted tokens, for those who ask."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.core.adjust import LARGEST_FLOAT
from jaxspec.core.distributions import arg_max, at, log_softmax


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Reporting:
    """What is reported of each emitted token, beside its log-probabilities; static.

    Attributes:
        alternatives: how many of the likeliest ids.
    """

    alternatives: int = 0


class LogProbs(NamedTuple):
    """Natural logs of the target's probabilities, for each emitted token.

    Attributes:
        warped: of the token, in the distribution it was to be drawn from (that of a
            greedy row before the arg-max).
        raw: of the token, in the model's own distribution.
        top_ids: the likeliest ids of the model's own distribution, best first.
        top_raw: their log-probabilities in it.
    """

    warped: Float[Array, "B T"]
    raw: Float[Array, "B T"]
    top_ids: Int[Array, "B T n"]
    top_raw: Float[Array, "B T n"]

    @classmethod
    def init(
        cls, reporting: Reporting | None, rows: int, tokens: int
    ) -> "LogProbs | None":
        """Zeros; None where nobody asks."""
        if reporting is None:
            return None
        zeros = jnp.zeros((rows, tokens))
        top = jnp.zeros((rows, tokens, reporting.alternatives))
        return cls(zeros, zeros, top.astype(jnp.int32), top)


def report(
    reporting: Reporting,
    logits: Float[Array, "B m V"],
    warped: Float[Array, "B m V"],
    slots: Int[Array, "B T"],
    tokens: Int[Array, "B T"],
) -> LogProbs:
    """Of `tokens`, each in the distributions of its slot."""
    # Bounded, else a logit of plus infinity, which is a certainty, gives NaN.
    raw = log_softmax(jnp.minimum(logits.astype(jnp.float32), LARGEST_FLOAT))
    top_ids, top_raw = top(raw, reporting.alternatives)
    place = (jnp.arange(tokens.shape[0])[:, None], slots)
    return LogProbs(
        warped[*place, tokens], raw[*place, tokens], top_ids[place], top_raw[place]
    )


def top(
    values: Float[Array, "*B V"], count: int
) -> tuple[Int[Array, "*B n"], Float[Array, "*B n"]]:
    """The largest entries and their indices, best first; ties to the lowest index.

    By repeated arg-max: `lax.top_k` sorts, and over a sharded vocabulary gathers it.
    """
    indices = jnp.arange(values.shape[-1])
    ids, found = [], []
    for _ in range(count):
        best = arg_max(values)
        ids.append(best)
        found.append(at(values, best))
        values = jnp.where(indices == best[..., None], -jnp.inf, values)
    if not count:
        empty = jnp.zeros((*values.shape[:-1], 0))
        return empty.astype(jnp.int32), empty
    return jnp.stack(ids, axis=-1), jnp.stack(found, axis=-1)
