"""Runs `adjust` and `warp` on rows told by prompt, output, draft and options."""

import jax
import numpy as np

from jaxspec.batching import pack_sequences
from jaxspec.core import tree
from jaxspec.core.adjust import adjust
from jaxspec.core.history import Counts, History
from jaxspec.core.sampling import Sampling
from jaxspec.core.warp import warp
from tests import oracles

INF = float("inf")
VOCAB, CAPACITY, ENDS = 11, 24, (3, 7)
# A root with the children a and b, and a child of each: slots 1, 2 and 3, 4.
TREE = [0, 0, 1, 2]
CHAIN = [0, 1, 2, 3]
ALL = tuple(oracles.ADJUSTMENTS)
COLUMNS = {
    "repetition_penalty": (1.0, "f4"),
    "presence_penalty": (0.0, "f4"),
    "frequency_penalty": (0.0, "f4"),
    "min_new_tokens": (0, "i4"),
    "top_k": (0, "i4"),
    "top_p": (1.0, "f4"),
    "min_p": (0.0, "f4"),
    "temperature": (0.0, "f4"),
}
FILTERS = ("top_k", "top_p", "min_p")
jitted = jax.jit(adjust)
jitted_warp = jax.jit(warp)


def pack(rows, present=ALL):
    """The options of rows, those of `present` as arrays whoever asks for them."""

    def column(name):
        idle, dtype = COLUMNS[name]
        return np.array([row.get(name, idle) for row in rows], dtype)

    given = {name: column(name) for name in present if name in COLUMNS}
    sampling = Sampling(**{"temperature": column("temperature"), **given})
    if "logit_bias" in present:
        bias = np.zeros((len(rows), VOCAB), np.float32)
        for row, options in enumerate(rows):
            for token, value in options.get("logit_bias", {}).items():
                bias[row, token] = value
        sampling = sampling._replace(logit_bias=bias)
    if "banned" in present:
        sequences = [row.get("banned", []) for row in rows]
        # One that no text contains, so that the array is there.
        sequences[0] = sequences[0] or [[VOCAB + 5] * 2]
        sampling = sampling._replace(banned=pack_sequences(sequences, len(rows)))
    return sampling


def history_of(prompts, outputs, sampling):
    tokens = np.full((len(prompts), CAPACITY), 1, np.int32)  # past the end: no text
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        tokens[row, : len(prompt) + len(output)] = [*prompt, *output]
    length = lambda texts: np.array([len(each) for each in texts], np.int32)  # noqa: E731
    counts = Counts.init(sampling, tokens, length(prompts), VOCAB)
    if counts is not None:
        padded = np.zeros((len(outputs), CAPACITY), np.int32)
        for row, output in enumerate(outputs):
            padded[row, : len(output)] = output
        counts = counts.add(padded, length(outputs))
    return History(tokens, length(prompts) + length(outputs), length(prompts), counts)


def run(logits, rows, prompts, outputs, parents, drafted, present=ALL, ends=ENDS):
    """Adjusted logits `[B, N + 1, V]` of the slots of a draft."""
    sampling = pack(rows, present)
    ancestors = tree.ancestry(np.tile(np.int32(parents), (len(rows), 1)))
    depth = int(tree.depths(ancestors).max())
    paths, counts = tree.paths(np.int32(drafted), ancestors, depth)
    ids = np.tile(np.int32([*ends, -1]), (len(rows), 1))
    history = history_of(prompts, outputs, sampling)
    return np.asarray(jitted(logits, sampling, history, ids, paths, counts))


def warped(logits, rows, prompts, outputs):
    """Log-probabilities `[B, V]` of the next token, after every option."""
    nothing = np.zeros((len(rows), 0), np.int32)
    adjusted = run(logits[:, None], rows, prompts, outputs, [], nothing)
    sampling = pack(rows, (*ALL, *FILTERS))
    return np.asarray(jitted_warp(adjusted, sampling))[:, 0]


def hand(logits, prompt=(), output=(), path=(), ends=(), **options):
    """Adjusted logits of one row after `path`; all cases share one program."""
    size = len(logits)
    slots = np.full((1, len(CHAIN) + 1, VOCAB), -INF, np.float32)
    slots[..., :size] = logits
    drafted = [*path, *[0] * (len(CHAIN) - len(path))]
    ends = [*ends, *[-1] * (3 - len(ends))]
    found = run(slots, [options], [prompt], [output], CHAIN, [drafted], ends=ends)
    found = found[0, len(path)]
    assert np.isneginf(found[size:]).all()
    return found[:size].tolist()
