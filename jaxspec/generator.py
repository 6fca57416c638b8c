"""The generator: prompts in, results out, each batch as two compiled programs."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from jaxspec.batching import (
    LARGEST_CHUNK,
    chunks,
    pack,
    pack_eos,
    pack_sampling,
    power_of_two,
)
from jaxspec.decoding.loop import decode, prefill
from jaxspec.decoding.state import RUNNING, DecodingState, Options, Prompts
from jaxspec.drafters.autoregressive import Autoregressive
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.errors import UserError, refuse
from jaxspec.loading import LanguageModel, require_same_tokenizer
from jaxspec.programs import Program
from jaxspec.requests import PerRow, Prompt, Request, is_single, make_requests
from jaxspec.results import Result, Timing, idle_outcome, make_results, read_outcome
from jaxspec.types import Drafter

SMALLEST_CAPACITY = 512
ALL_ROUNDS = 2**31 - 1


class Generator:
    """Speculative decoding of a target with a drafter, exact whatever the drafter.

    A generation is one dispatch for each chunk of prompt and one for all rounds. Prompt
    lengths and capacity are rounded up to powers of two, and every other number is an
    argument of the compiled program, so another length or value compiles nothing.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: LanguageModel | Drafter | str | None = None,
        *,
        draft_tokens: int = 4,
        capacity: int | None = None,
    ):
        """Checks that the parts fit together.

        Args:
            target: whose distribution the output has.
            drafter: a model of the same tokenizer, `"prompt-lookup"`, a drafter made by
                hand, or None for plain decoding.
            draft_tokens: k, of each round.
            capacity: the most tokens of a row, prompt included; by default what the
                prompts of a call need.

        Raises:
            UserError: the tokenizers differ, or a number is out of range.
        """
        longest = target.decoder.config.max_positions
        if capacity is not None and not 2 <= capacity <= longest:
            raise UserError(
                f"capacity is {capacity}, expected 2 to {longest} (the positions of "
                f"{target.reference})"
            )
        self.target = target
        self.drafter = _make_drafter(target, drafter, draft_tokens)
        self.capacity = capacity
        # First chunk of a prompt, later chunks, rounds. The state is given away: the
        # caches are updated where they lie.
        self.programs = (
            Program(prefill, static=1),
            Program(prefill, static=1, donate=(2,)),
            Program(decode, donate=(2,)),
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        temperature: PerRow = 0.0,
        top_k: int | Sequence[int] | None = None,
        top_p: PerRow = None,
        min_p: PerRow = None,
        seed: int | Sequence[int] = 0,
        batch_size: int | None = None,
        eos_ids: Collection[int] | None = None,
    ) -> Any:
        """Continues one prompt (gives a `Result`) or several (gives a list of them).

        An option of a row is one value for all prompts or a list with one for each.

        Args:
            prompts: a text, a chat, token ids, or a list of such.
            max_new_tokens: of each row; 0 gives an empty answer.
            temperature: 0 is greedy.
            top_k: keep the k most likely tokens; 0 keeps all.
            top_p: keep the most likely tokens that reach this probability; over 0.
            min_p: keep tokens this likely relative to the most likely one.
            seed: an int gives row i the seed `seed + i`.
            batch_size: rows of a batch; by default all prompts are one.
            eos_ids: ids that end a row; by default the tokenizer's.

        Raises:
            UserError: lists all that is wrong with the prompts and options.
        """
        results = self.iterate(
            [prompts] if is_single(prompts) else prompts,  # pyright: ignore
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            batch_size=batch_size,
            eos_ids=eos_ids,
        )
        return next(results) if is_single(prompts) else list(results)

    def iterate(
        self,
        prompts: Sequence[Prompt],
        *,
        batch_size: int | None = None,
        eos_ids: Collection[int] | None = None,
        **options: Any,
    ) -> Iterator[Result]:
        """Yields the results of a list of prompts in order, as their batches end.

        Options are those of `generate`; all are checked before the first batch runs.
        """
        requests = make_requests(self.target, prompts, **options)
        check_batch_size(batch_size)
        size = batch_size or max(len(requests), 1)
        capacity, ends = self._capacity_for(requests), self._eos(eos_ids)
        batches = [requests[at : at + size] for at in range(0, len(requests), size)]
        return (
            result
            for batch in batches
            for result in self._run(batch, pack(batch, size, capacity), ends)
        )

    def stream(
        self, prompt: Prompt, *, eos_ids: Collection[int] | None = None, **options: Any
    ) -> Iterator[str]:
        """Yields the text of one prompt piece by piece, as its rounds end.

        It runs the program of `generate`, one round a dispatch; options are the same.
        """
        if self.target.tokenizer is None:
            raise UserError(
                f"{self.target.reference} has no tokenizer to make text with"
            )
        requests = make_requests(self.target, [prompt], **options)
        prompts = pack(requests, 1, self._capacity_for(requests))
        text, seen = self.target.tokenizer.stream_decoder(), len(requests[0].ids)
        for state in self._states(requests, prompts, self._eos(eos_ids), rounds=1):
            length = int(np.asarray(state.length)[0])
            yield text.push(np.asarray(state.tokens)[0, seen:length].tolist())
            seen = length
        yield text.flush()

    def _capacity_for(self, requests: Sequence[Request]) -> int:
        """Tokens a row must hold; a prompt leaves room for at least one new token."""
        longest = self.target.decoder.config.max_positions
        most = longest if self.capacity is None else self.capacity
        refuse(
            [
                f"prompt {row} has {len(request.ids)} tokens, but a capacity of {most} "
                f"takes at most {most - 1}; shorten it or raise the capacity "
                f"({self.target.reference} has {longest} positions)"
                for row, request in enumerate(requests)
                if len(request.ids) >= most
            ]
        )
        if self.capacity is not None:
            return self.capacity
        needed = [len(request.ids) + request.max_new_tokens for request in requests]
        return min(power_of_two(max(needed, default=1), SMALLEST_CAPACITY), longest)

    def _eos(self, eos_ids: Collection[int] | None) -> np.ndarray:
        if eos_ids is None:
            tokenizer = self.target.tokenizer
            eos_ids = () if tokenizer is None else tokenizer.eos_ids
        return pack_eos(eos_ids)

    def _run(
        self, batch: Sequence[Request], prompts: Prompts, ends: np.ndarray
    ) -> list[Result]:
        before = np.array([(p.seconds, p.compile_seconds) for p in self.programs])
        outcome = idle_outcome(prompts, self.drafter.depth)
        for state in self._states(batch, prompts, ends, rounds=ALL_ROUNDS):
            outcome = outcome if _is_running(state) else read_outcome(state)
        after = np.array([(p.seconds, p.compile_seconds) for p in self.programs])
        first, later, rounds = (after - before)[:, 0].tolist()
        timing = Timing(first + later, rounds, float((after - before)[:, 1].sum()))
        return make_results(batch, outcome, timing, self.target.tokenizer)

    def _states(
        self,
        batch: Sequence[Request],
        prompts: Prompts,
        ends: np.ndarray,
        *,
        rounds: int,
    ) -> Iterator[DecodingState]:
        """The state after prefill and after every `rounds` rounds, until all ended."""
        if (prompts.limit <= prompts.length).all():
            return
        options = Options(pack_sampling(batch, len(prompts.length)), ends)  # pyright: ignore
        model, drafter = self.target.decoder, self.drafter
        first, later, run_rounds = self.programs
        state: Any = prompts
        for chunk, final in chunks(prompts):
            program = first if state is prompts else later
            state = program(model, drafter, state, chunk, options, final, LARGEST_CHUNK)
        yield state
        while _is_running(state):
            state = run_rounds(model, drafter, state, options, np.int32(rounds))
            yield state


def _is_running(state: DecodingState) -> bool:
    """Asked on the host: an operation on the device would be one more dispatch."""
    return bool((np.asarray(state.finish) == RUNNING).any())


def check_batch_size(batch_size: int | None) -> None:
    """Refuses a batch size under 1; None is one batch of all prompts.

    Raises:
        UserError: names the value.
    """
    if batch_size is not None and not (isinstance(batch_size, int) and batch_size > 0):
        raise UserError(f"batch_size is {batch_size!r}, expected a whole number over 0")


def _make_drafter(
    target: LanguageModel, drafter: LanguageModel | Drafter | str | None, count: int
) -> Drafter:
    if not isinstance(count, int) or count < 1:
        raise UserError(f"draft_tokens is {count!r}, expected a whole number over 0")
    if drafter is None:
        return Autoregressive()
    if drafter == "prompt-lookup":
        return PromptLookup(count)
    if isinstance(drafter, LanguageModel):
        require_same_tokenizer(target, drafter)
        return DraftModel(drafter.decoder, count)
    if isinstance(drafter, str):
        raise UserError(
            f"drafter is {drafter!r}, expected 'prompt-lookup', a loaded model or None"
        )
    return drafter
