"""The commit boundary: the one place that says where a row's text ends."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.core.history import ends_with
from jaxspec.core.report import LogProbs
from jaxspec.decoding.state import (
    EOS,
    ERROR,
    LENGTH,
    RUNNING,
    STOP,
    DecodingState,
    Options,
)
from jaxspec.types import Verdict


def emit(
    state: DecodingState,
    verdict: Verdict,
    emitted: Int[Array, "B width"],
    failed: Bool[Array, " B"],
    reported: LogProbs | None,
    options: Options,
) -> tuple[DecodingState, Verdict]:
    """Cuts a round at the first event of each row, and inactive rows to nothing.

    Tokens, log-probabilities, lengths, caches and statistics follow the count that it
    returns. A row whose last distribution was none (`failed`) keeps the tokens before
    that one, as plain decoding would, and ends in error.
    """
    place = jnp.arange(emitted.shape[1])
    is_eos = (emitted[:, :, None] == options.eos_ids[:, None]).any(axis=-1)
    is_stop = _stops(state, emitted, options)
    before_end = jnp.where(is_eos | is_stop, place, emitted.shape[1]).min(axis=-1)
    room = state.limit - state.length
    drawn = verdict.count - failed
    count = jnp.minimum(jnp.minimum(drawn, before_end + 1), room)
    count = jnp.where(state.active, count, 0)
    length = state.length + count

    def at_end(events):
        return (events & (place == count[:, None] - 1)).any(axis=1)

    finish = jnp.where(failed & (count == drawn), ERROR, RUNNING)
    finish = jnp.where(length >= state.limit, LENGTH, finish)
    finish = jnp.where(at_end(is_stop), STOP, finish)
    finish = jnp.where(at_end(is_eos), EOS, finish)
    # Places past the count are sent out of range and dropped.
    capacity = state.tokens.shape[1]
    columns = jnp.where(place < count[:, None], state.length[:, None] + place, capacity)
    put = (jnp.arange(emitted.shape[0])[:, None], columns)
    is_draft = place < verdict.count[:, None] - 1
    counts, log_probs = state.counts, state.log_probs
    if counts is not None:
        counts = counts.add(emitted, count)
    if log_probs is not None and reported is not None:
        pairs = zip(log_probs, reported, strict=True)
        log_probs = LogProbs(*[a.at[put].set(b, mode="drop") for a, b in pairs])
    state = state._replace(
        tokens=state.tokens.at[put].set(emitted, mode="drop"),
        from_draft=state.from_draft.at[put].set(is_draft, mode="drop"),
        length=length,
        finish=jnp.where(state.active, finish, state.finish),
        counts=counts,
        log_probs=log_probs,
    )
    return state, verdict._replace(count=count)


def _stops(
    state: DecodingState, emitted: Int[Array, "B width"], options: Options
) -> Bool[Array, "B width"]:
    """Where a stop sequence is complete that lies in the output as a whole."""
    if options.stops is None:
        return jnp.zeros(emitted.shape, bool)
    rows, width = emitted.shape
    paths = jnp.broadcast_to(emitted[:, None], (rows, width, width))
    written = jnp.broadcast_to(jnp.arange(1, width + 1), (rows, width))
    longest = options.stops.tokens.shape[-1]
    endings = state.history.ending(paths, written, longest)
    output = (state.length - state.prompt_length)[:, None] + written
    is_output = output[..., None] >= options.stops.length[:, None]
    found = (ends_with(endings, options.stops) & is_output).any(axis=-1)
    if options.sampling.min_new_tokens is not None:
        found &= output >= options.sampling.min_new_tokens[:, None]
    return found
