"""What a running generation holds, and what it counts."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec.cache import KVCache
from jaxspec.core.accept import RULES, Rule
from jaxspec.core.history import Counts, History
from jaxspec.core.report import LogProbs, Reporting
from jaxspec.core.sampling import Sampling, Sequences
from jaxspec.types import Drafter, Model

# Why a row ended; 0 while it runs. Of events at one token the first here is named.
RUNNING, EOS, STOP, LENGTH, ERROR = range(5)


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
    """What applies to a call; arrays are traced, so that no value of them recompiles.

    Attributes:
        eos_ids: end each row, padded with -1.
        stops: sequences of ids that end a row; None: no row has one.
        rule: how draft tokens are accepted; static.
        reporting: which log-probabilities are kept; static, None: none.
    """

    sampling: Sampling
    eos_ids: Int[Array, "B eos"]
    stops: Sequences | None = None
    rule: Rule = RULES["rejection"]
    reporting: Reporting | None = None

    @property
    def ends(self) -> Int[Array, "B e"]:
        """The ids that end each row by themselves, padded with -1."""
        if self.stops is None:
            return self.eos_ids
        last = self.stops.tokens[..., -1]
        single = jnp.where(self.stops.length == 1, last, -1)
        return jnp.concatenate([self.eos_ids, single], axis=1)


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
        prompt_length: how many of them are the prompt's.
        limit: the length at which the row ends.
        finish: why the row ended, `RUNNING` while it has not.
        hidden: of the last prompt token, until the first token is drawn.
        counts: None where no penalty asks.
        log_probs: None where nobody asks.
    """

    tokens: Int[Array, "B S"]
    from_draft: Bool[Array, "B S"]
    length: Int[Array, " B"]
    prompt_length: Int[Array, " B"]
    limit: Int[Array, " B"]
    finish: Int[Array, " B"]
    keys: UInt32[Array, "B 2"]
    hidden: Float[Array, "B E"]
    cache: KVCache
    drafter: Any
    statistics: Statistics
    counts: Counts | None
    log_probs: LogProbs | None

    @property
    def active(self) -> Bool[Array, " B"]:
        """Which rows still run."""
        return self.finish == RUNNING

    @property
    def history(self) -> History:
        """The committed text as the warp reads it."""
        return History(self.tokens, self.length, self.prompt_length, self.counts)

    @classmethod
    def init(
        cls,
        model: Model,
        drafter: Drafter,
        prompts: Prompts,
        options: Options,
        width: int,
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
            prompt_length=prompts.length,
            limit=prompts.limit,
            finish=jnp.where(prompts.limit > prompts.length, RUNNING, LENGTH),
            keys=prompts.keys,
            hidden=model.init_hidden(rows),
            cache=model.init_cache(rows, capacity, widest),
            drafter=drafter.init(rows, capacity, width),
            statistics=Statistics(zeros, zeros, by_depth, by_depth),
            counts=Counts.init(
                options.sampling, prompts.tokens, prompts.length, model.vocab_size
            ),
            log_probs=LogProbs.init(options.reporting, rows, capacity),
        )
