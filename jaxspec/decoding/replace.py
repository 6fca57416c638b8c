"""Puts a fresh row in the place of one that has ended, between dispatches."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxspec.decoding.state import DecodingState
from jaxspec.rows import map_rows
from jaxspec.types import Drafter, Model


def replace_row(
    model: Model,
    drafter: Drafter,
    state: DecodingState,
    fresh: DecodingState,
    row: Int[Array, " 1"],
    wanted: Bool[Array, " 1"],
) -> DecodingState:
    """Overwrites the whole row `row` with the only row of `fresh`, if that is wanted.

    Nothing of the row before is left: caches, the drafter's state and statistics too.
    Over a mesh each part of the rows has a row, a fresh one and a wish of its own.
    """
    del model, drafter

    def put(axis, old, new):
        kept = lax.dynamic_slice_in_dim(old, row[0], 1, axis)
        chosen = jnp.where(wanted[0], new, kept)
        return lax.dynamic_update_slice_in_dim(old, chosen, row[0], axis)

    return map_rows(put, state, fresh)
