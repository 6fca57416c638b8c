"""A batch of constant shape whose rows are replaced as they end."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.batching import (
    LARGEST_CHUNK,
    SMALLEST_CHUNK,
    chunks,
    pack,
    power_of_two,
)
from jaxspec.decoding.loop import decode
from jaxspec.decoding.replace import replace_row
from jaxspec.decoding.state import RUNNING, DecodingState
from jaxspec.generator import Generator
from jaxspec.programs import Program
from jaxspec.requests import Request
from jaxspec.results import Outcome, read_outcome
from jaxspec.sharding import fetch

# Between two looks at who has ended; each is a dispatch.
ROUNDS = 8


class Entry(NamedTuple):
    """A request, and the index of its prompt in the input."""

    index: int
    request: Request


class Pool:
    """Rows that run together, of which each may be another request.

    What a row writes does not depend on its neighbours, on when it came, or on the row
    that it has: every request is prefilled by a program of one row, in pieces that its
    own length decides, and every round has the same shape.
    """

    def __init__(self, generator: Generator, rows: int, sample: Request):
        """An idle pool.

        Args:
            generator: with a capacity.
            rows: a multiple of the parts of its mesh.
            sample: a request with the options of all that will come.
        """
        assert generator.capacity is not None
        self.generator, self.rows = generator, rows
        self.capacity = generator.capacity
        partition = generator.target.partition
        self.parts = 1 if partition is None else partition.row_parts
        self._models = generator.target.decoder, generator.drafter
        self._options = {
            count: generator.pack_options([sample] * count, count, None, None)
            for count in (rows, self.parts)
        }
        self._rounds = Program(
            functools.partial(decode, one_token_rounds=False),
            donate=(2,),
            partition=partition,
        )
        self._replace = Program(replace_row, donate=(2,), partition=partition)
        begin = Program(self._begin, static=1, partition=partition)
        idle = pack([], rows, self.capacity)
        self._state = begin(*self._models, idle, self._options[rows], LARGEST_CHUNK)
        self.entries: list[Entry | None] = [None] * rows

    @staticmethod
    def _begin(model, drafter, prompts, options, width) -> DecodingState:
        return DecodingState.init(model, drafter, prompts, options, width)

    @property
    def programs(self) -> tuple[Program, ...]:
        """All that it dispatches, but for the idle batch."""
        return (*self.generator.programs[:2], self._rounds, self._replace)

    @property
    def running(self) -> int:
        """How many rows have a request."""
        return sum(entry is not None for entry in self.entries)

    def free_parts(self) -> list[int]:
        """The parts of the mesh in which a row is free."""
        size = self.rows // self.parts
        parts = [self.entries[at : at + size] for at in range(0, self.rows, size)]
        return [part for part, own in enumerate(parts) if None in own]

    def put(self, entries: Sequence[Entry]) -> None:
        """Gives requests of one `signature` rows, each in another free part."""
        chosen = dict(zip(self.free_parts(), entries, strict=False))
        if len(chosen) < len(entries):
            raise ValueError(f"{len(entries)} requests for {len(chosen)} free parts")
        size = self.rows // self.parts
        row, wanted = np.zeros(self.parts, np.int32), np.zeros(self.parts, bool)
        requests: list[Request | None] = [None] * self.parts
        for part, entry in chosen.items():
            own = self.entries[part * size : (part + 1) * size]
            row[part], wanted[part] = own.index(None), True
            self.entries[part * size + row[part]] = entry
            requests[part] = entry.request
        fresh = self._prefill(requests)
        self._state = self._replace(*self._models, self._state, fresh, row, wanted)

    def _prefill(self, requests: Sequence[Request | None]) -> DecodingState:
        """A row for each part; where there is no request an inert one."""
        first, later, _ = self.generator.programs
        prompts = pack(requests, self.parts, self.capacity)
        state: Any = prompts
        for chunk, final in chunks(prompts):
            program = first if state is prompts else later
            state = program(
                *self._models,
                state,
                chunk,
                self._options[self.parts],
                final,
                LARGEST_CHUNK,
            )
        return state

    def run(self) -> Iterator[tuple[Entry, int, Outcome]]:
        """Some rounds; yields what ended in them, with its row of the outcome.

        These rows are free after it.
        """
        options, count = self._options[self.rows], np.int32(ROUNDS)
        self._state = self._rounds(*self._models, self._state, options, count)
        finish = fetch(self._state.finish)
        ended = [
            (row, entry)
            for row, entry in enumerate(self.entries)
            if entry is not None and finish[row] != RUNNING
        ]
        if not ended:
            return
        outcome = read_outcome(self._state)
        for row, entry in ended:
            self.entries[row] = None
            yield entry, row, outcome


def signature(request: Request) -> tuple[int, int]:
    """What decides the shapes of a prefill: pieces, and the width of the last one."""
    pieces, last = divmod(len(request.ids) - 1, LARGEST_CHUNK)
    return pieces + 1, power_of_two(last + 1, SMALLEST_CHUNK)
