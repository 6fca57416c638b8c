"""What a generation gives back for each prompt."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.core.report import LogProbs, Reporting
from jaxspec.decoding.state import (
    EOS,
    ERROR,
    LENGTH,
    STOP,
    DecodingState,
    Prompts,
    Statistics,
)
from jaxspec.requests import Prompt, Request
from jaxspec.sharding import fetch

FINISH_REASONS = {EOS: "eos", STOP: "stop", LENGTH: "length", ERROR: "error"}


@dataclasses.dataclass(frozen=True)
class Stats:
    """What speculation did for a row, and how long its batch took.

    Attributes:
        rounds: forward passes of the target after prefill that emitted a token.
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


class Alternative(NamedTuple):
    """An id that the model found likely, and its natural log-probability."""

    id: int
    raw: float


@dataclasses.dataclass(frozen=True)
class TokenLogProbs:
    """Natural log-probabilities of the tokens of a result, one entry a token.

    Attributes:
        warped: in the distribution that the token was to be drawn from, all options
            applied; of a greedy row, all options before the temperature.
        raw: in the model's own distribution.
        alternatives: the likeliest ids of the model's own distribution, best first.
    """

    warped: list[float]
    raw: list[float]
    alternatives: list[list[Alternative]]


@dataclasses.dataclass(frozen=True)
class Result:
    """The continuation of one prompt.

    Attributes:
        prompt: as it was given.
        text: without the prompt and without special tokens; a stop text, and what
            stands after it, is left out.
        token_ids: without the prompt; what ended the row (an EOS, a stop sequence, the
            token that completes a stop text) is the last.
        finish_reason: the event that came first; of several at one token the first of
            `eos`, `stop` (a stop sequence or text), `length` (max_new_tokens or the
            capacity) and `error` (the next token has no distribution: the target's
            logits are not numbers, or the options rule every id out).
        from_draft: for each token, whether it is an accepted draft token.
        log_probs: None unless asked for.
    """

    prompt: Prompt
    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    from_draft: list[bool] = dataclasses.field(repr=False)
    log_probs: TokenLogProbs | None = dataclasses.field(default=None, repr=False)

    def to_json(self) -> dict[str, Any]:
        """The fields of one line of `jaxspec generate --json`."""
        fields = dataclasses.asdict(self)
        del fields["from_draft"]
        if self.log_probs is None:
            del fields["log_probs"]
        else:
            fields["log_probs"]["alternatives"] = [
                [each._asdict() for each in likeliest]
                for likeliest in self.log_probs.alternatives
            ]
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
    log_probs: LogProbs | None


def read_outcome(state: DecodingState) -> Outcome:
    """Fetches what results are made of."""
    names = Outcome._fields
    return Outcome(*fetch([getattr(state, name) for name in names]))


def idle_outcome(prompts: Prompts, depth: int, reporting: Reporting | None) -> Outcome:
    """The end of a batch of which nothing was asked."""
    rows, capacity = prompts.tokens.shape
    none, by_depth = np.zeros(rows, int), np.zeros((rows, depth), int)
    return Outcome(
        prompts.tokens,
        np.zeros((rows, capacity), bool),
        prompts.length,
        np.full(rows, LENGTH),
        Statistics(none, none, by_depth, by_depth),  # pyright: ignore
        LogProbs.init(reporting, rows, capacity),
    )


def make_results(
    requests: Sequence[Request],
    outcome: Outcome,
    timing: Timing,
    text_of: Callable[[int, list[int]], str],
) -> list[Result]:
    """One result for each request, in order; `text_of` is given a row and its ids."""
    results = []
    for row, request in enumerate(requests):
        own = slice(len(request.ids), int(outcome.length[row]))
        ids = outcome.tokens[row, own].tolist()
        results.append(
            Result(
                prompt=request.prompt,
                text=text_of(row, ids),
                token_ids=ids,
                finish_reason=FINISH_REASONS[int(outcome.finish[row])],
                stats=_make_stats(outcome.statistics, row, timing),
                from_draft=outcome.from_draft[row, own].tolist(),
                log_probs=_make_log_probs(outcome.log_probs, row, own),
            )
        )
    return results


def _make_log_probs(
    log_probs: LogProbs | None, row: int, own: slice
) -> TokenLogProbs | None:
    if log_probs is None:
        return None
    warped, raw, ids, top = (np.asarray(each)[row, own] for each in log_probs)
    pairs = zip(ids.tolist(), top.tolist(), strict=True)
    return TokenLogProbs(
        warped.tolist(),
        raw.tolist(),
        [
            # An impossible id is no alternative.
            [
                Alternative(*each)
                for each in zip(*pair, strict=True)
                if each[1] > -np.inf
            ]
            for pair in pairs
        ],
    )


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
