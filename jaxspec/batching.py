"""Requests as padded arrays, in the few shapes that programs are compiled for."""

from collections.abc import Collection, Iterator, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxspec.core.noise import seed_keys
from jaxspec.core.sampling import Sampling, Sequences
from jaxspec.decoding.state import Prompts
from jaxspec.errors import UserError
from jaxspec.requests import Request
from jaxspec.types import Chunk

LARGEST_CHUNK = 512
SMALLEST_CHUNK = 16
EOS_SLOTS = 8
SEQUENCE_SLOTS = 4
# What each option of numbers is in a row that does not use it.
NEUTRAL: dict[str, Any] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_new_tokens": 0,
}


def power_of_two(size: int, smallest: int) -> int:
    """The smallest power of two that is at least `size` and `smallest`."""
    return 1 << (max(size, smallest) - 1).bit_length()


def pack(requests: Sequence[Request | None], rows: int, capacity: int) -> Prompts:
    """The prompts of a batch; rows past the requests, and those of None, are inert."""
    tokens = np.zeros((rows, capacity), np.int32)
    # An inert row holds one token, so that every position it names exists.
    length, limit = np.ones(rows, np.int32), np.ones(rows, np.int32)
    seeds = [0] * rows
    for row, request in enumerate(requests):
        if request is None:
            continue
        count = len(request.ids)
        tokens[row, :count] = request.ids
        length[row] = count
        limit[row] = min(count + request.max_new_tokens, capacity)
        seeds[row] = request.seed
    return Prompts(tokens, length, limit, seed_keys(seeds))  # pyright: ignore


def pack_sampling(requests: Sequence[Request], rows: int, vocabulary: int) -> Sampling:
    """The sampling options of a batch; inert rows are greedy."""

    def column(name: str):
        values = [getattr(request, name) for request in requests]
        if values[0] is None:
            return None
        idle = NEUTRAL[name]
        dtype = np.int32 if isinstance(idle, int) else np.float32
        padded: Any = np.array(values + [idle] * (rows - len(values)), dtype)
        return padded

    return Sampling(
        **{name: column(name) for name in NEUTRAL},  # pyright: ignore
        logit_bias=_pack_bias(requests, rows, vocabulary),
        banned=pack_sequences([each.banned_sequences for each in requests], rows),
    )


def _pack_bias(requests: Sequence[Request], rows: int, vocabulary: int) -> Any:
    if not any(request.logit_bias for request in requests):
        return None
    bias = np.zeros((rows, vocabulary), np.float32)
    for row, request in enumerate(requests):
        for token, value in request.logit_bias.items():
            bias[row, token] = value
    return bias


def pack_sequences(
    sequences: Sequence[Sequence[Sequence[int]]], rows: int
) -> Sequences | None:
    """The sequences of each row, padded to powers of two; None: no row has any."""
    most = max((len(own) for own in sequences), default=0)
    if not most:
        return None
    longest = max(len(each) for own in sequences for each in own)
    count, width = (power_of_two(each, SEQUENCE_SLOTS) for each in (most, longest))
    tokens = np.full((rows, count, width), -1, np.int32)
    length = np.zeros((rows, count), np.int32)
    for row, own in enumerate(sequences):
        for place, each in enumerate(own):
            tokens[row, place, width - len(each) :] = each
            length[row, place] = len(each)
    return Sequences(tokens, length)  # pyright: ignore


def pack_eos(eos_ids: Collection[int], rows: int) -> Int[np.ndarray, "B eos"]:
    """The ids that end each row, padded with an id that no token has.

    Raises:
        UserError: they are no ids.
    """
    if not _are_ids(eos_ids):
        raise UserError(f"eos_ids is {eos_ids!r}, expected ids from 0 to 2**31 - 1")
    padded = np.full((rows, power_of_two(len(eos_ids), EOS_SLOTS)), -1, np.int32)
    padded[:, : len(eos_ids)] = sorted(eos_ids)
    return padded


def _are_ids(values: Any) -> bool:
    return isinstance(values, Collection) and all(
        # The ids of a GGUF file are NumPy's.
        isinstance(each, Integral) and 0 <= int(each) < 2**31
        for each in values
    )


def chunks(prompts: Prompts) -> Iterator[tuple[Chunk, np.bool_]]:
    """The prompts piece by piece, and whether a piece is the last.

    Only the last piece has another width than `LARGEST_CHUNK`: a power of two, so that
    prompts of 5 to 16 tokens share a program.
    """
    longest = int(prompts.length.max())
    for start in range(0, longest, LARGEST_CHUNK):
        rest = min(longest - start, LARGEST_CHUNK)
        width = power_of_two(rest, SMALLEST_CHUNK)
        piece = np.asarray(prompts.tokens)[:, start : start + width]
        padding = width - piece.shape[1]
        count = np.clip(np.asarray(prompts.length) - start, 0, width)
        yield (
            Chunk(
                np.pad(piece, ((0, 0), (0, padding))),  # pyright: ignore
                np.full(len(count), start, np.int32),  # pyright: ignore
                count.astype(np.int32),  # pyright: ignore
            ),
            np.bool_(start + rest == longest),
        )
