"""What changes the logits before the temperature, on greedy rows too.

The order is bias, repetition, presence, frequency, banned sequences, `min_new_tokens`.
Each slot is adjusted by its own history: a penalty at the third node counts the first
two, as it would if they had been committed.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.core.history import Counts, History, ends_with, path_counts
from jaxspec.core.sampling import Sampling, Sequences

LARGEST_FLOAT = float(jnp.finfo(jnp.float32).max)


def adjust(
    logits: Float[Array, "B m V"],
    sampling: Sampling,
    history: History,
    ends: Int[Array, "B e"],
    path_tokens: Int[Array, "B m depth"],
    path_count: Int[Array, "B m"],
) -> Float[Array, "B m V"]:
    """Logits in float32 after the options that look at ids and history.

    `ends` are the ids that end a row, padded with -1.
    """
    # A logit of plus infinity is a certainty, not the NaN that infinity less infinity
    # gives: bounded before any arithmetic, and again after it.
    logits = jnp.minimum(logits.astype(jnp.float32), LARGEST_FLOAT)
    if sampling.logit_bias is not None:
        logits += sampling.logit_bias[:, None]
    if history.counts is not None:
        own = path_counts(path_tokens, path_count, logits.shape[-1])
        logits = _penalise(logits, sampling, history.counts, own)
    if sampling.banned is not None:
        width = sampling.banned.tokens.shape[-1] - 1
        endings = history.ending(path_tokens, path_count, width)
        logits = _ban(logits, sampling.banned, endings)
    if sampling.min_new_tokens is not None:
        written = (history.length - history.prompt_length)[:, None] + path_count
        is_early = written < sampling.min_new_tokens[:, None]
        logits = _rule_out(logits, jnp.where(is_early[..., None], ends[:, None], -1))
    return jnp.minimum(logits, LARGEST_FLOAT)


def _penalise(logits, sampling, counts: Counts, own) -> Float[Array, "B m V"]:
    column = lambda option: option[:, None, None]  # noqa: E731
    in_output = counts.in_output[:, None] + own
    if sampling.repetition_penalty is not None:
        penalty = column(sampling.repetition_penalty)
        assert counts.in_prompt is not None, "counts were made for other options"
        seen = (in_output > 0) | counts.in_prompt[:, None]
        less_likely = jnp.where(logits > 0, logits / penalty, logits * penalty)
        logits = jnp.where(seen, less_likely, logits)
    if sampling.presence_penalty is not None:
        logits -= jnp.where(in_output > 0, column(sampling.presence_penalty), 0.0)
    if sampling.frequency_penalty is not None:
        logits -= column(sampling.frequency_penalty) * in_output
    return logits


def _ban(logits, banned: Sequences, endings) -> Float[Array, "B m V"]:
    """Rules out the last id of each sequence whose other ids end the text."""
    beginnings = banned.tokens[..., :-1], jnp.maximum(banned.length - 1, 0)
    # A sequence of one id is banned after any text.
    is_next = ends_with(endings, Sequences(*beginnings)) | (banned.length == 1)[:, None]
    return _rule_out(logits, jnp.where(is_next, banned.tokens[:, None, :, -1], -1))


def _rule_out(logits, ids: Int[Array, "B m n"]) -> Float[Array, "B m V"]:
    """Makes ids impossible; negative ones are none."""
    rows, slots, vocabulary = logits.shape
    row, slot = jnp.arange(rows)[:, None, None], jnp.arange(slots)[None, :, None]
    # Negative indices would count from the end.
    at = (row, slot, jnp.where(ids < 0, vocabulary, ids))
    # The smaller of the two: a NaN stays one, for the row to end in error.
    return logits.at[at].min(-jnp.inf, mode="drop")
