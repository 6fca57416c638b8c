"""Rings: where an entry of a windowed layer lies, once its row is longer than the ring.

Position p lies in slot `p mod R` of R, until position `p + R` takes its place.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


def positions(
    slots: Int[Array, " slots"], size: int, length: Int[Array, ""]
) -> Int[Array, " slots"]:
    """What stands in `slots` of a ring of `size`; an empty slot is negative."""
    newest = length - 1
    return newest - (newest - slots) % size


def write(stored: Array, entries: Array, start: tuple, axis: int) -> Array:
    """`lax.dynamic_update_slice` on an array that is a ring along `axis`."""
    size, width = stored.shape[axis], entries.shape[axis]
    first = start[axis] % size
    margin = [
        (width, width, 0) if at == axis else (0, 0, 0) for at in range(len(start))
    ]
    wide = lax.pad(entries, jnp.zeros((), entries.dtype), margin)
    in_piece = jnp.arange(width).reshape([-1] + [1] * (entries.ndim - axis - 1))

    def write_piece(stored, at, skipped):
        """Writes a piece of `width` slots from `at` on, all entries but `skipped`.

        Slots of the piece that no entry belongs into keep what they hold.
        """
        corner = (*start[:axis], at, *start[axis + 1 :])
        old = lax.dynamic_slice(stored, corner, entries.shape)
        fresh = lax.dynamic_slice_in_dim(wide, width + skipped, width, axis)
        index = skipped + in_piece
        piece = jnp.where((index >= 0) & (index < width), fresh, old)
        return lax.dynamic_update_slice(stored, piece, corner)

    # Up to the end, then on from slot 0: one slice would be clamped there.
    before_end = jnp.minimum(first, size - width)
    stored = write_piece(stored, before_end, before_end - first)
    return write_piece(stored, 0, jnp.minimum(-first % size, width))
