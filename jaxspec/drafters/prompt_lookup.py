"""Prompt lookup: drafts what followed the last occurrence of the text's own ending."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.core import tree
from jaxspec.drafters.stateless import Stateless
from jaxspec.types import Context, Draft, Noise, State, Target


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class PromptLookup(Stateless):
    """Looks the longest suffix n-gram up in the row's own tokens (Saxena 2023).

    It keeps no state and runs no model. The longest match wins, then the most recent.
    Where the continuation reaches the end of the text it goes round: the draft of
    `a b a b a` is `b a b a`. A row with no match drafts nothing.

    Attributes:
        draft_tokens: k, of each round.
        min_ngram: shorter matches are no match.
        max_ngram: longer matches count no more.
    """

    draft_tokens: int
    min_ngram: int = 2
    max_ngram: int = 8

    may_miss = True

    @property
    def nodes(self) -> int:
        """Draft nodes a round."""
        return self.draft_tokens

    @property
    def depth(self) -> int:
        """The length of the chain."""
        return self.draft_tokens

    def propose(
        self, target: Target, state: State, context: Context, noise: Noise
    ) -> tuple[Draft, State]:
        """A chain copied from the text; deterministic, so without distributions."""
        start, matched = longest_match(context.tokens, context.length, self.max_ngram)
        period = context.length - start
        offset = jnp.arange(self.nodes) % period[:, None]
        tokens = jnp.take_along_axis(context.tokens, start[:, None] + offset, axis=1)
        found = (matched >= self.min_ngram) & context.active
        valid = jnp.broadcast_to(found[:, None], tokens.shape)
        return Draft(tokens, tree.chain(*tokens.shape), valid), state


def longest_match(
    tokens: Int[Array, "B S"], length: Int[Array, " B"], max_ngram: int
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Where the text goes on after the best earlier copy of its ending.

    Returns:
        The position of the token that followed the copy, and how many tokens matched
        (0: none, and the position is the newest token's).
    """
    capacity = tokens.shape[1]
    starts = jnp.arange(capacity)
    matched = jnp.zeros(tokens.shape, jnp.int32)
    running = (starts >= 1) & (starts < length[:, None])
    for back in range(1, max_ngram + 1):
        own = jnp.take_along_axis(tokens, length[:, None] - back, axis=1, mode="clip")
        before = jnp.pad(tokens, ((0, 0), (back, 0)))[:, :capacity]
        running = running & (starts >= back) & (before == own)
        matched += running
    best = (matched * capacity + starts * (matched > 0)).argmax(axis=1)
    count = jnp.take_along_axis(matched, best[:, None], axis=1)[:, 0]
    return jnp.where(count > 0, best, length - 1), count
