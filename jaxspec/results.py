"""What a generation gives back for each prompt."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxspec.decoding.state import EOS, LENGTH, DecodingState, Prompts, Statistics
from jaxspec.requests import Prompt, Request

if TYPE_CHECKING:
    from jaxspec.tokenizer import Tokenizer

FINISH_REASONS = {EOS: "eos", LENGTH: "length"}


@dataclasses.dataclass(frozen=True)
class Stats:
    """What speculation did for a row, and how long its batch took.

    Attributes:
        rounds: forward passes of the target after prefill.
        drafted: draft tokens that were verified.
        accepted: those of them that were accepted and emitted; bonus tokens are not.
        acceptance_rate: accepted / drafted; None if nothing was drafted.
        tokens_per_round: mean tokens emitted by a round; None if there was no round.
            The first token comes from prefill and is not counted.
        accepted_by_position: accepted / drafted for each place in the draft.
        prefill_seconds: of the row's batch, first token included, without compiling.
        decode_seconds: of the row's batch, without compiling.
        tokens_per_second: the row's tokens after the first, by decode seconds.
        compile_seconds: spent compiling for the row's batch; 0 if all was there.
    """

    rounds: int
    drafted: int
    accepted: int
    acceptance_rate: float | None
    tokens_per_round: float | None
    accepted_by_position: list[float | None]
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float | None
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class Result:
    """The continuation of one prompt.

    Attributes:
        prompt: as it was given.
        text: without the prompt and without special tokens.
        token_ids: without the prompt; an EOS that ended the row is the last.
        finish_reason: `eos` or `length`.
        from_draft: for each token, whether it is an accepted draft token.
    """

    prompt: Prompt
    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    from_draft: list[bool] = dataclasses.field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """The fields of one line of `jaxspec generate --json`."""
        fields = dataclasses.asdict(self)
        del fields["from_draft"]
        return fields


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one batch."""

    prefill: float
    decode: float
    compiling: float


def _ratio(part: Any, whole: Any) -> float | None:
    """A quotient, or None where there is nothing to divide by."""
    return float(part / whole) if whole else None


class Outcome(NamedTuple):
    """The end of a batch, on the host."""

    tokens: Any
    from_draft: Any
    length: Any
    finish: Any
    statistics: Statistics


def read_outcome(state: DecodingState) -> Outcome:
    """Fetches what results are made of."""
    names = Outcome._fields
    return Outcome(*jax.device_get([getattr(state, name) for name in names]))


def idle_outcome(prompts: Prompts, depth: int) -> Outcome:
    """The end of a batch of which nothing was asked."""
    rows, capacity = prompts.tokens.shape
    none, by_depth = np.zeros(rows, int), np.zeros((rows, depth), int)
    return Outcome(
        prompts.tokens,
        np.zeros((rows, capacity), bool),
        prompts.length,
        np.full(rows, LENGTH),
        Statistics(none, none, by_depth, by_depth),  # pyright: ignore
    )


def make_results(
    requests: Sequence[Request],
    outcome: Outcome,
    timing: Timing,
    tokenizer: "Tokenizer | None",
) -> list[Result]:
    """One result for each request, in order."""
    results = []
    for row, request in enumerate(requests):
        own = slice(len(request.ids), int(outcome.length[row]))
        ids = outcome.tokens[row, own].tolist()
        results.append(
            Result(
                prompt=request.prompt,
                text="" if tokenizer is None else tokenizer.decode(ids),
                token_ids=ids,
                finish_reason=FINISH_REASONS[int(outcome.finish[row])],
                stats=_make_stats(outcome.statistics, row, timing),
                from_draft=outcome.from_draft[row, own].tolist(),
            )
        )
    return results


def _make_stats(counts: Statistics, row: int, timing: Timing) -> Stats:
    """The figures of one row from the device's counts of the batch."""
    drafted, accepted = counts.drafted[row], counts.accepted[row]
    rounds, emitted = int(counts.rounds[row]), int(counts.emitted[row])
    return Stats(
        rounds=rounds,
        drafted=int(drafted.sum()),
        accepted=int(accepted.sum()),
        acceptance_rate=_ratio(accepted.sum(), drafted.sum()),
        tokens_per_round=_ratio(emitted, rounds),
        accepted_by_position=[
            _ratio(*pair) for pair in zip(accepted, drafted, strict=True)
        ],
        prefill_seconds=timing.prefill,
        decode_seconds=timing.decode,
        tokens_per_second=_ratio(emitted, timing.decode),
        compile_seconds=timing.compiling,
    )
