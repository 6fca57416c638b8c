"""Small operations on rows of log-probabilities, all in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def arg_max(values: Float[Array, "*B V"]) -> Int[Array, "*B"]:
    """The lowest index of the largest entry.

    Two plain reductions: XLA's own arg-max is a variadic one, which the CPU does not
    vectorise.
    """
    peak = values.max(axis=-1, keepdims=True)
    index = jnp.arange(values.shape[-1], dtype=jnp.int32)
    found = jnp.where(values >= peak, index, values.shape[-1] - 1)
    return found.min(axis=-1)


def largest(
    values: Float[Array, "*B V"], count: int
) -> tuple[Int[Array, "*B count"], Float[Array, "*B count"]]:
    """The indices of the largest entries, and these: minus infinity when none is left.

    Arg-max after arg-max: `lax.top_k` sorts, and gathers a sharded vocabulary.
    """
    index, found = jnp.arange(values.shape[-1]), []
    for _ in range(count):
        best = arg_max(values)
        found.append((best, at(values, best)))
        values = jnp.where(index == best[..., None], -jnp.inf, values)
    ids, entries = zip(*found, strict=True)
    return jnp.stack(ids, axis=-1), jnp.stack(entries, axis=-1)


def one_hot_log(index: Int[Array, "*B"], size: int) -> Float[Array, "*B V"]:
    """Log-probabilities of a certain outcome: 0 there, minus infinity elsewhere."""
    return jnp.where(index[..., None] == jnp.arange(size), 0.0, -jnp.inf)


def sample(
    log_probs: Float[Array, "*B V"], gumbel: Float[Array, "*B V"]
) -> Int[Array, "*B"]:
    """Draws by the Gumbel-max trick (Gumbel 1954); zero noise gives the arg-max."""
    return arg_max(log_probs + gumbel)


def at(log_probs: Float[Array, "*B V"], index: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """The entry of each row at its index."""
    return jnp.take_along_axis(log_probs, index[..., None], axis=-1)[..., 0]


def fit_vocabulary(logits: Float[Array, "*B v"], size: int) -> Float[Array, "*B V"]:
    """Logits over `size` ids: extra ids are cut, missing ones are impossible.

    For a draft whose vocabulary is padded to another size than the target's.
    """
    extra = size - logits.shape[-1]
    if extra <= 0:
        return logits[..., :size]
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, extra)]
    return jnp.pad(logits, padding, constant_values=-jnp.inf)


def widen(
    logits: Float[Array, "*B v"], places: Int[Array, " V"]
) -> Float[Array, "*B V"]:
    """Logits of a reduced vocabulary over the whole: ids it lacks are impossible.

    Args:
        logits: of the reduced vocabulary.
        places: where each id stands in it; `v` for an id that does not. A gather by
            them is several times faster than a scatter of the ids there are.
    """
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, 1)]
    padded = jnp.pad(logits, padding, constant_values=-jnp.inf)
    return jnp.take(padded, places, axis=-1, mode="clip")


def residual_log_probs(
    target_log_probs: Float[Array, "*B V"], draft_probs: Float[Array, "*B V"]
) -> Float[Array, "*B V"]:
    """The normalised max(0, target - draft), or the target where that is zero.

    Leviathan et al. 2023, section 2.3. One draft probability that is not a number makes
    the total none either: such a row was rejected whatever its token, so the target
    itself is drawn.
    """
    excess = jnp.maximum(jnp.exp(target_log_probs) - draft_probs, 0.0)
    total = excess.sum(axis=-1, keepdims=True)
    residual = jnp.log(excess) - jnp.log(total)
    return jnp.where(total > 0, residual, target_log_probs)


def log_softmax(logits: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
    """Log-probabilities in float32, whatever the dtype of the logits."""
    return jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
