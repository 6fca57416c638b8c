"""A smaller model of the same vocabulary as drafter."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache import KVCache, Scratch, causal, run_rows
from jaxspec.core import tree
from jaxspec.core.distributions import fit_vocabulary, sample
from jaxspec.types import Chunk, Context, Draft, Noise, Output, Target, Verdict


class DraftModelState(NamedTuple):
    """The draft's own cache, and the scratch that a round hands to its commit.

    The cache holds the committed tokens but the last two: after a fully accepted round
    the draft has fed neither its last token nor the bonus token, so every round begins
    by feeding [previous, newest], whatever was accepted.
    """

    cache: KVCache
    scratch: Scratch


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["model"],
    meta_fields=["draft_tokens"],
)
@dataclass(frozen=True)
class DraftModel:
    """Drafts a chain of `draft_tokens` tokens with a model of its own."""

    model: Any
    draft_tokens: int

    taps = ()
    prefix_layers = 0

    @property
    def nodes(self) -> int:
        """Draft nodes a round."""
        return self.draft_tokens

    @property
    def depth(self) -> int:
        """The length of the chain."""
        return self.draft_tokens

    def init(self, rows: int, capacity: int, width: int) -> DraftModelState:
        """Empty; a round commits previous, newest and all draft tokens but the last."""
        slots = self.draft_tokens + 1
        cache = self.model.init_cache(rows, capacity, max(width, slots))
        return DraftModelState(cache, self.model.init_scratch(rows, slots))

    def prefill(
        self, target: Target, state: DraftModelState, chunk: Chunk, output: Output
    ) -> DraftModelState:
        """Feeds the chunk to the draft too."""
        rows, tokens = chunk.tokens.shape
        slots = jnp.arange(tokens)
        _, scratch = run_rows(
            self.model,
            state.cache,
            self.model.init_scratch(rows, tokens),
            chunk.tokens,
            chunk.start[:, None] + slots,
            slots,
            causal(rows, tokens),
        )
        path = jnp.broadcast_to(slots, (rows, tokens))
        return state._replace(cache=state.cache.commit(scratch, path, chunk.count))

    def propose(
        self, target: Target, state: DraftModelState, context: Context, noise: Noise
    ) -> tuple[Draft, DraftModelState]:
        """Draws the chain token by token in a `lax.scan`."""
        # Prefill has committed one token more than a round starts from.
        cache = state.cache.shorten(jnp.maximum(context.length - 2, 0))
        rows, steps = context.tokens.shape[0], self.draft_tokens
        visible = causal(rows, steps + 1)
        vocabulary = target.model.vocab_size

        def feed(scratch, tokens, slots, path, drawn):
            """Feeds tokens into `slots`, draws the child of the last of them."""
            output, scratch = run_rows(
                self.model,
                cache,
                scratch,
                tokens,
                cache.length[:, None] + slots,
                slots,
                visible[:, slots],
            )
            logits = self.model.unembed(self.model.norm(output.hidden[:, -1:]))
            count = jnp.full((rows, 1), drawn)
            log_probs = context.warp(
                fit_vocabulary(logits, vocabulary), path[:, None], count
            )
            # Node i hangs on slot i, whose position is length - 1 + i.
            gumbel = noise(count, context.length[:, None] + drawn)
            token = sample(log_probs, gumbel)
            return scratch, token, path.at[:, drawn].set(token[:, 0]), log_probs[:, 0]

        def step(carry, drawn):
            scratch, token, path = carry
            slots = drawn[None] + 1
            scratch, token, path, row = feed(scratch, token, slots, path, drawn)
            return (scratch, token, path), row

        ends = context.length[:, None] - jnp.array([2, 1])
        pending = jnp.take_along_axis(context.tokens, ends, axis=1, mode="clip")
        path = jnp.zeros((rows, steps), jnp.int32)
        scratch, token, path, first = feed(
            state.scratch, pending, jnp.arange(2), path, jnp.int32(0)
        )
        (scratch, _, path), rest = lax.scan(
            step, (scratch, token, path), jnp.arange(1, steps)
        )
        log_probs = jnp.concatenate([first[None], rest]).swapaxes(0, 1)
        valid = jnp.broadcast_to(context.active[:, None], path.shape)
        draft = Draft(path, tree.chain(rows, steps), valid, log_probs)
        return draft, DraftModelState(cache, scratch)

    def commit(
        self,
        target: Target,
        state: DraftModelState,
        draft: Draft,
        verdict: Verdict,
        output: Output,
    ) -> DraftModelState:
        """Keeps as many slots as the target emitted tokens: all but the last two."""
        slots = self.draft_tokens + 1
        path = jnp.broadcast_to(jnp.arange(slots), (verdict.count.shape[0], slots))
        cache = state.cache.commit(state.scratch, path, verdict.count)
        return state._replace(cache=cache)
