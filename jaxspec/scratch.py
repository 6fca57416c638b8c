"""The scratch space of one round: what a forward pass writes, none of it committed."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Scratch(NamedTuple):
    """The keys and values of the round's slots, one array a layer."""

    keys: tuple[Float[Array, "*B K P D"], ...]
    values: tuple[Float[Array, "*B K P D"], ...]
    positions: Int[Array, "*B P"]

    @classmethod
    def init(
        cls, layers: int, rows: int, kv_heads: int, slots: int, width: int, dtype
    ) -> "Scratch":
        """Empty scratch for `rows` rows of `slots` slots."""
        empty = jnp.zeros((rows, kv_heads, slots, width), dtype)
        return cls((empty,) * layers, (empty,) * layers, jnp.zeros((rows, slots), int))

    def first(self, slots: int) -> "Scratch":
        """The first `slots` slots of it."""
        keys, values = (
            tuple(layer[..., :slots, :] for layer in each)
            for each in (self.keys, self.values)
        )
        return Scratch(keys, values, self.positions[..., :slots])

    def place(self, positions: Int[Array, " T"], slots: Int[Array, " T"]) -> "Scratch":
        """Says, for one row, at which positions the tokens in `slots` stand."""
        return self._replace(positions=_place(self.positions, positions, slots, 0))

    def write(
        self,
        layer: int,
        keys: Float[Array, "K T D"],
        values: Float[Array, "K T D"],
        slots: Int[Array, " T"],
    ) -> "Scratch":
        """Puts one row's fresh entries of one layer into `slots`."""
        new_keys = _place(self.keys[layer], keys, slots, 1)
        new_values = _place(self.values[layer], values, slots, 1)
        return self._replace(
            keys=(*self.keys[:layer], new_keys, *self.keys[layer + 1 :]),
            values=(*self.values[:layer], new_values, *self.values[layer + 1 :]),
        )


def _place(old: Array, fresh: Array, slots: Int[Array, " T"], axis: int) -> Array:
    """`old.at[slots].set(fresh)` along `axis`, as a gather: CPU scatters are loops."""
    hit = slots[:, None] == jnp.arange(old.shape[axis])
    fresh = jnp.take(fresh, jnp.argmax(hit, axis=0), axis=axis)
    written = hit.any(axis=0)
    return jnp.where(jnp.expand_dims(written, range(1, old.ndim - axis)), fresh, old)
