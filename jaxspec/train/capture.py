"""Reads training texts with the target once, and keeps what it knew."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.cache import causal, run_rows
from jaxspec.core.distributions import arg_max
from jaxspec.models.decoder import Decoder
from jaxspec.train.corpus import Corpus, States
from jaxspec.types import Output

ROWS = 8
# Texts of like length are read together, padded to a multiple of this.
LENGTH_STEP = 128


def read_states(
    decoder: Decoder, corpus: Corpus, taps: tuple[int, ...]
) -> Iterator[int]:
    """Keeps the hidden states of all texts; yields how many parts are done."""
    for part in range(len(corpus)):
        yield part
        if not corpus.has_states(part, taps):
            states = _read_part(decoder, corpus, part, taps)
            corpus.write_states(part, taps, states)
    yield len(corpus)


def _read_part(decoder, corpus: Corpus, part: int, taps: tuple[int, ...]) -> States:
    texts = list(corpus.texts(part).each())
    by_length = sorted(range(len(texts)), key=lambda index: texts[index].size)
    read: dict[int, States] = {}
    for first in range(0, len(texts), ROWS):
        group = by_length[first : first + ROWS]
        tokens = pad_texts([texts[index] for index in group], ROWS)
        states = _forward(decoder, tokens, taps)
        for row, index in enumerate(group):
            size = texts[index].size
            read[index] = States(*(np.asarray(each[row, :size]) for each in states))
    ordered = [read[index] for index in range(len(texts))]
    return States(*(np.concatenate(each) for each in zip(*ordered, strict=True)))


def pad_texts(
    texts: list[Int[np.ndarray, " T"]], rows: int
) -> Int[np.ndarray, "rows T"]:
    """Texts as rows of one length, a multiple of `LENGTH_STEP`."""
    longest = max(text.size for text in texts)
    padded = np.zeros((rows, -(-longest // LENGTH_STEP) * LENGTH_STEP), np.int32)
    for row, text in enumerate(texts):
        padded[row, : text.size] = text
    return padded


def read_whole(
    model: Decoder, tokens: Int[Array, "B T"], taps: tuple[int, ...] = ()
) -> Output:
    """What a model knows after each token of whole texts."""
    rows, length = tokens.shape
    lanes = jnp.arange(length)
    output, _ = run_rows(
        model,
        model.init_cache(rows, 0, 0),
        model.init_scratch(rows, length),
        tokens,
        jnp.broadcast_to(lanes, tokens.shape),
        lanes,
        causal(rows, length),
        taps,
    )
    return output


@functools.partial(jax.jit, static_argnums=2)
def _forward(decoder: Decoder, tokens: Int[Array, "B T"], taps: tuple[int, ...]):
    output = read_whole(decoder, tokens, taps)

    def of_row(hidden: Float[Array, "T E"]):
        logits = decoder.unembed(decoder.norm(hidden))
        return jax.nn.logsumexp(logits, axis=-1), arg_max(logits)

    # Row by row: the logits of all of them would fill the memory.
    log_total, likeliest = jax.lax.map(of_row, output.hidden)
    kept = output.hidden.astype(jnp.bfloat16), output.taps.astype(jnp.bfloat16)
    return States(*kept, log_total, likeliest)  # pyright: ignore
