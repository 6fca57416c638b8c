"""Random numbers that depend on a row's own seed and history only.

Each draw has its key: (row seed, committed length at the start of the round, slot,
purpose). A token drawn without any draft, and the token of prefill, has slot 0, so its
key says nothing but the row's seed and the position of the token; under a rule that
shares noise every token has that key. The bits are those of threefry2x32 in its
partitionable form, whatever the user's defaults: then a padded or sharded vocabulary
changes no id.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

PURPOSES = 3
NEXT_TOKEN, DRAFT_TOKEN, ACCEPT = range(PURPOSES)


def seed_keys(seeds: Sequence[int]) -> UInt32[np.ndarray, "B 2"]:
    """The key data of each row's seed: its high and its low 32 bits."""
    return np.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], np.uint32)


def gumbels(
    keys: UInt32[Array, "B 2"],
    lengths: Int[Array, " B"],
    slots: Int[Array, "B m"],
    purpose: int,
    size: int,
) -> Float[Array, "B m V"]:
    """Standard Gumbel noise over `size` ids for each slot."""
    lengths = jnp.broadcast_to(lengths[:, None], slots.shape)
    return _draw(keys, lengths, slots, purpose, lambda key: _gumbel(key, size))


def shared_gumbels(
    keys: UInt32[Array, "B 2"], positions: Int[Array, "B m"], size: int
) -> Float[Array, "B m V"]:
    """The Gumbel noise with which plain decoding draws the token of each position."""
    root = jnp.zeros_like(positions)
    return _draw(keys, positions, root, NEXT_TOKEN, lambda key: _gumbel(key, size))


def uniforms(
    keys: UInt32[Array, "B 2"],
    lengths: Int[Array, " B"],
    slots: Int[Array, "B m"],
    purpose: int,
) -> Float[Array, "B m"]:
    """One uniform in [0, 1) for each slot."""

    def draw(key):
        return jax.random.uniform(key, dtype=jnp.float32)

    lengths = jnp.broadcast_to(lengths[:, None], slots.shape)
    return _draw(keys, lengths, slots, purpose, draw)


def _gumbel(key, size: int) -> Float[Array, " V"]:
    """Minus the log of an exponential, whose small end has all 32 bits.

    That end decides a draw. `jax.random.gumbel` has 23 bits there, so that over 152k
    equal ids it ties for the maximum in about 1 draw of 100, and ties go to the lowest
    id; its bits also depend on the user's defaults.
    """
    bits = jax.random.bits(key, (size,), jnp.uint32)
    # Never 0 or 1: infinite noise would make an impossible id possible, or hide one.
    tail = jnp.clip(bits.astype(jnp.float32) * 2.0**-32, 2.0**-33, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-tail))


def _draw(keys, lengths, slots, purpose, draw):
    def one(key_data, length, slot):
        key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
        key = jax.random.fold_in(key, length)
        return draw(jax.random.fold_in(key, slot * PURPOSES + purpose))

    per_slot = jax.vmap(one, in_axes=(None, 0, 0))
    with jax.threefry_partitionable(True):
        return jax.vmap(per_slot)(keys, lengths, slots)
