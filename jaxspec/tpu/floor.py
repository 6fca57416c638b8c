"""The least that a round is expected to move: weights and live keys once a pass.

The target makes one pass, a drafter one for each level of its draft. An embedding that
is not the head is only looked up in. What stays in the memory on a chip from pass to
pass is moved less often: then a round is below the floor.
"""

from typing import Any

import jax
import numpy as np

from jaxspec.cache import KVCache
from jaxspec.decoding.state import DecodingState
from jaxspec.drafters.eagle import Eagle
from jaxspec.drafters.early_exit import EarlyExit
from jaxspec.drafters.medusa import Medusa
from jaxspec.sharding import Partition


def floor_bytes(
    decoder: Any,
    drafter: Any,
    state: DecodingState,
    partition: Partition,
    live_tokens: int,
) -> float:
    """Of one round, on one chip.

    Args:
        decoder: the target, of placed shapes.
        drafter: of placed shapes.
        state: the batch's, of shapes.
        partition: where all of it lies.
        live_tokens: of each row.
    """
    where = partition.state(state)
    keys = _live_bytes(state.cache, where.cache, live_tokens)
    target = _read_bytes(decoder) + keys
    own = _read_bytes(drafter)
    if isinstance(drafter, Medusa):
        # One pass makes all levels: each head is read once, and the vocabulary once.
        shared = drafter.heads.vocabulary is None
        return target + own + shared * _head_bytes(decoder, drafter.heads.known)
    if isinstance(drafter, EarlyExit):
        # The first layers once more for each level; the verify goes on from the last.
        share = drafter.layers / decoder.config.num_layers
        level = model_bytes(list(decoder.layers[: drafter.layers])) + share * keys
        return target + drafter.depth * (
            level + own + _head_bytes(decoder, drafter.known)
        )
    own += _live_bytes(state.drafter, where.drafter, live_tokens)
    if isinstance(drafter, Eagle) and getattr(drafter.head, "lm_head", None) is None:
        own += _head_bytes(decoder, None)
    return target + drafter.depth * own


def shard_bytes(tree: Any, shardings: Any) -> int:
    """Of all arrays, on one chip."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
    return sum(_shard_bytes(leaf, where) for leaf, where in pairs)


def model_bytes(model: Any) -> int:
    """Of all placed arrays, on one chip."""
    leaves = jax.tree.leaves(model)
    return sum(_shard_bytes(leaf, leaf.sharding) for leaf in leaves)


def _shard_bytes(leaf: Any, where: Any) -> int:
    return int(np.prod(where.shard_shape(leaf.shape))) * leaf.dtype.itemsize


def _read_bytes(owner: Any) -> int:
    """Of a model's or a drafter's own arrays, but for an embedding that is no head."""
    model = getattr(owner, "model", None) or getattr(owner, "head", None) or owner
    embedding = getattr(model, "embed_tokens", None)
    tied = getattr(getattr(model, "config", None), "tied", False)
    unread = 0 if embedding is None or tied else model_bytes(embedding)
    return model_bytes(owner) - unread


def _head_bytes(decoder: Any, known: Any) -> float:
    """Of the target's vocabulary head, of `known` ids alone where they are given."""
    head = decoder.embed_tokens if decoder.lm_head is None else decoder.lm_head
    share = 1 if known is None else known.size / decoder.config.vocab_size
    return share * model_bytes(head)


def _live_bytes(tree: Any, places: Any, live_tokens: int) -> float:
    """Of the live keys and values of the caches in a tree."""
    is_cache = lambda each: isinstance(each, KVCache)  # noqa: E731
    caches, where = (jax.tree.leaves(each, is_leaf=is_cache) for each in (tree, places))
    return sum(
        share * shard_bytes(arrays, own)
        for cache, place in zip(caches, where, strict=True)
        if is_cache(cache)
        for share, arrays, own in zip(
            cache.live_shares(live_tokens), cache.groups, place.groups, strict=True
        )
    )
