"""What follows from the parents of a draft's nodes: depth, ancestry, paths.

A chain is the tree whose node i hangs on slot i; nothing here knows the difference.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def chain(rows: int, nodes: int) -> Int[Array, "B N"]:
    """The parents of a chain: node i (slot i + 1) hangs on slot i."""
    return jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), (rows, nodes))


def ancestry(parents: Int[Array, "B N"]) -> Bool[Array, "B N+1 N+1"]:
    """Whether slot j is slot i itself or an ancestor of it, at `[i, j]`.

    Squares the one-step relation log2(N + 1) times, so that any depth is reached.
    """
    nodes = parents.shape[1]
    slots = jnp.arange(nodes + 1)
    is_parent = parents[:, :, None] == slots
    is_parent = jnp.pad(is_parent, ((0, 0), (1, 0), (0, 0)))
    reach = jnp.eye(nodes + 1, dtype=bool) | is_parent
    for _ in range(max(nodes, 1).bit_length()):
        reach = (reach[:, :, :, None] & reach[:, None, :, :]).any(axis=2)
    return reach


def depths(ancestors: Bool[Array, "B N+1 N+1"]) -> Int[Array, "B N+1"]:
    """How far each slot is below the root, which has depth 0."""
    return ancestors.sum(axis=-1, dtype=jnp.int32) - 1


def paths(
    tokens: Int[Array, "B N"], ancestors: Bool[Array, "B N+1 N+1"], depth: int
) -> tuple[Int[Array, "B N+1 depth"], Int[Array, "B N+1"]]:
    """The tokens drafted on the way to each slot, itself included, and how many."""
    levels = depths(ancestors)
    wanted = jnp.arange(1, depth + 1)[None, None, :, None]
    on_path = ancestors[:, :, None, :] & (levels[:, None, None, :] == wanted)
    by_slot = jnp.pad(tokens, ((0, 0), (1, 0)))
    return jnp.where(on_path, by_slot[:, None, None, :], 0).sum(axis=-1), levels
