"""States by their rows: every array of one has the rows first, a `KVCache` apart."""

from collections.abc import Callable
from typing import Any

import jax

from jaxspec.cache import KVCache


def map_rows(change: Callable[..., Any], state: Any, *others: Any) -> Any:
    """`change(axis of the rows, array, ...)` for every array of a state."""

    def leaf(one, *rest):
        if isinstance(one, KVCache):
            return jax.tree.map(change, one.row_axes, one, *rest)
        return change(0, one, *rest)

    is_cache = lambda each: isinstance(each, KVCache)  # noqa: E731
    return jax.tree.map(leaf, state, *others, is_leaf=is_cache)
