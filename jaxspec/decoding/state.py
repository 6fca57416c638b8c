"""What a running generation holds, and what it counts."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec.cache import KVCache
from jaxspec.core.warp import Sampling
from jaxspec.types import Drafter, Model

# Why a row ended; 0 while it runs.
RUNNING, EOS, LENGTH = range(3)


class Prompts(NamedTuple):
    """The rows of a batch before prefill; a row with `limit <= length` is inert.

    Attributes:
        tokens: padded to the capacity.
        length: of each prompt, in tokens.
        limit: the length, prompt included, at which the row ends.
        keys: the key data of each row's seed.
    """

    tokens: Int[Array, "B S"]
    length: Int[Array, " B"]
    limit: Int[Array, " B"]
    keys: UInt32[Array, "B 2"]


class Options(NamedTuple):
    """Values that apply to a call: traced, so that none of them recompiles."""

    sampling: Sampling
    eos_ids: Int[Array, " eos"]


class Statistics(NamedTuple):
    """What speculation did, by row; the token that prefill samples is not in it.

    Attributes:
        rounds: in which the row was active.
        emitted: tokens of those rounds.
        drafted: valid draft nodes by depth, 1 first.
        accepted: accepted ones among them; the bonus token is not one.
    """

    rounds: Int[Array, " B"]
    emitted: Int[Array, " B"]
    drafted: Int[Array, "B depth"]
    accepted: Int[Array, "B depth"]


class DecodingState(NamedTuple):
    """The carry of the loop.

    Attributes:
        tokens: prompt and output; what stands at or past `length` means nothing.
        from_draft: which of the tokens are accepted draft tokens.
        length: committed tokens, the newest (not yet fed) included.
        limit: the length at which the row ends.
        finish: why the row ended, `RUNNING` while it has not.
        hidden: of the last prompt token, until the first token is drawn.
    """

    tokens: Int[Array, "B S"]
    from_draft: Bool[Array, "B S"]
    length: Int[Array, " B"]
    limit: Int[Array, " B"]
    finish: Int[Array, " B"]
    keys: UInt32[Array, "B 2"]
    hidden: Float[Array, "B E"]
    cache: KVCache
    drafter: Any
    statistics: Statistics

    @property
    def active(self) -> Bool[Array, " B"]:
        """Which rows still run."""
        return self.finish == RUNNING

    @classmethod
    def init(
        cls, model: Model, drafter: Drafter, prompts: Prompts, width: int
    ) -> "DecodingState":
        """Empty caches for the prompts; `width` is the largest prefill chunk."""
        rows, capacity = prompts.tokens.shape
        zeros = jnp.zeros(rows, jnp.int32)
        by_depth = jnp.zeros((rows, drafter.depth), jnp.int32)
        widest = max(width, drafter.depth + 1)
        return cls(
            tokens=prompts.tokens,
            from_draft=jnp.zeros(prompts.tokens.shape, bool),
            length=prompts.length,
            limit=prompts.limit,
            finish=jnp.where(prompts.limit > prompts.length, RUNNING, LENGTH),
            keys=prompts.keys,
            hidden=model.init_hidden(rows),
            cache=model.init_cache(rows, capacity, widest),
            drafter=drafter.init(rows, capacity, width),
            statistics=Statistics(zeros, zeros, by_depth, by_depth),
        )
