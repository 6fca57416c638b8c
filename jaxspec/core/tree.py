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

    Squares the one-step relation log2(N + 1) times, so that any depth is reached. As
    matrix products: a tree of 60 nodes would else be 200,000 steps a row and squaring.
    """
    nodes = parents.shape[1]
    slots = jnp.arange(nodes + 1)
    is_parent = parents[:, :, None] == slots
    is_parent = jnp.pad(is_parent, ((0, 0), (1, 0), (0, 0)))
    reach = jnp.eye(nodes + 1, dtype=bool) | is_parent
    for _ in range(max(nodes, 1).bit_length()):
        # Sums of at most N + 1 ones: exact in float32.
        steps = reach.astype(jnp.float32)
        reach = jnp.matmul(steps, steps, precision="highest") > 0
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


def earlier_siblings(parents: Int[Array, "B N"]) -> Bool[Array, "B N N"]:
    """Whether node j has the parent of node i and comes before it, at `[i, j]`."""
    node = jnp.arange(parents.shape[1])
    siblings = parents[:, :, None] == parents[:, None, :]
    return siblings & (node < node[:, None])


def longest_path(
    parents: Int[Array, "B N"], accepted: Bool[Array, "B N"], depth: int | None
) -> tuple[Int[Array, "B depth+1"], Int[Array, " B"], Int[Array, " B"]]:
    """The way down to the deepest node that is accepted with all its ancestors.

    Of equally deep ones the first is taken. Without a `depth` the tree is a chain.

    Returns:
        The slots on the way, the root first, then any; how many nodes it has; and the
        slot where it ends.
    """
    ancestors = ancestry(parents)
    levels = depths(ancestors)
    taken = jnp.pad(accepted, ((0, 0), (1, 0)), constant_values=True)
    reached = (taken[:, None, :] | ~ancestors).all(axis=-1)
    last = jnp.where(reached, levels, -1).argmax(axis=-1)[:, None]
    on_way = jnp.take_along_axis(ancestors, last[:, :, None], axis=1)
    longest = parents.shape[1] if depth is None else depth
    place = jnp.arange(longest + 1, dtype=jnp.int32)
    here = on_way & (levels[:, None, :] == place[:, None])
    slots = jnp.arange(levels.shape[1], dtype=jnp.int32)
    path = jnp.where(here, slots, 0).sum(axis=-1, dtype=jnp.int32)
    count = jnp.take_along_axis(levels, last, axis=1)[:, 0]
    path = jnp.where(place <= count[:, None], path, place)
    return path, count, last[:, 0]
