"""The generator: prompts in, results out, each batch as two compiled programs."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.acceptance_watch import AcceptanceWatch
from jaxspec.arguments import check_call, check_pairing, find_rule
from jaxspec.batching import (
    LARGEST_CHUNK,
    chunks,
    pack,
    pack_eos,
    pack_sampling,
    pack_sequences,
    power_of_two,
)
from jaxspec.core.dynamic_tree import DynamicTree
from jaxspec.core.report import Reporting
from jaxspec.core.topology import Topology
from jaxspec.decoding.loop import decode, prefill
from jaxspec.decoding.state import RUNNING, DecodingState, Options, Prompts
from jaxspec.drafter_names import make_drafter, place_drafter
from jaxspec.errors import UserError, refuse
from jaxspec.loading import LanguageModel, load
from jaxspec.programs import Program
from jaxspec.requests import (
    IdSequences,
    PerRow,
    Prompt,
    Request,
    is_single,
    make_requests,
)
from jaxspec.results import Result, Timing, idle_outcome, make_results, read_outcome
from jaxspec.sharding import Partition, fetch
from jaxspec.stopping import StopTexts
from jaxspec.types import Drafter

SMALLEST_CAPACITY = 512
ALL_ROUNDS = 2**31 - 1


class Generator:
    """Speculative decoding of a target with a drafter, exact whatever the drafter.

    A generation is one dispatch for each chunk of prompt and one for all rounds. Prompt
    lengths and capacity are rounded up to powers of two, and every other number is an
    argument of the compiled program, so another length or value compiles nothing. What
    does: whether an option is used at all in a batch, `log_probs`, the rule, and more
    or longer sequences of ids than the power of two at hand holds.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: LanguageModel | Drafter | str | None = None,
        *,
        draft_tokens: int | None = None,
        tree: Topology | DynamicTree | Sequence[int] | None = None,
        rule: str = "rejection",
        capacity: int | None = None,
    ):
        """Checks that the parts fit together.

        Args:
            target: whose distribution the output has.
            drafter: a model of the same tokenizer, `"auto"` (the best that comes with
                jaxspec for this target), `"prompt-lookup"`, `"early-exit:N"`
                (the target's own first N layers), `"early-exit:PATH"` (the same with
                an adapter from `jaxspec train`), `"medusa:PATH"` (a file of Medusa
                heads), `"eagle:PATH"` (the folder of an EAGLE head), `"draft:PATH"` (a
                model cut from the target by `jaxspec train`), a drafter made by hand,
                or None for plain decoding.
            draft_tokens: k, of each round; by default 4 (of Medusa all heads, of
                `"auto"` the shape that was measured best), in a chain.
            tree: draft a tree instead: `(4, 2, 1)` has 4 first tokens, 2 more after
                each of them, and 1 after each of those; or any `Topology`; or, with a
                draft model or an EAGLE head, a `DynamicTree`.
            rule: how draft tokens are accepted: `rejection`, `block` (more of them),
                `coupled` (the ids are those of plain decoding with the same seed) or
                `typical` (lossy: not the target's distribution).
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
        self.rule = find_rule(rule)
        self.drafter = make_drafter(target, drafter, draft_tokens, tree)
        if target.partition is not None:
            self.drafter = place_drafter(target.partition, self.drafter)
        check_pairing(self.rule, self.drafter)
        self.capacity = capacity
        self._watch = AcceptanceWatch(self.drafter)
        # First chunk of a prompt, later chunks, rounds. The state is given away: the
        # caches are updated where they lie.
        self.programs = (
            Program(prefill, static=1, partition=target.partition),
            Program(prefill, static=1, donate=(2,), partition=target.partition),
            Program(decode, donate=(2,), partition=target.partition),
        )

    @classmethod
    def from_pretrained(
        cls,
        reference: str | os.PathLike[str],
        drafter: LanguageModel | Drafter | str | None = None,
        *,
        dtype: str = "float32",
        partition: Partition | None = None,
        **options: Any,
    ) -> "Generator":
        """Loads a target by `jaxspec.load`; the rest is as for the constructor.

        With a partition all of it is spread over its mesh, the drafter too.

        Raises:
            UserError: the model cannot be had, or does not fit the drafter.
        """
        return cls(load(reference, dtype, partition), drafter, **options)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        min_new_tokens: int | Sequence[int] | None = None,
        temperature: PerRow = 0.0,
        top_k: int | Sequence[int] | None = None,
        top_p: PerRow = None,
        min_p: PerRow = None,
        repetition_penalty: PerRow = None,
        presence_penalty: PerRow = None,
        frequency_penalty: PerRow = None,
        logit_bias: Mapping[int, float] | Sequence[Mapping[int, float]] | None = None,
        banned_sequences: IdSequences = None,
        stop_sequences: IdSequences = None,
        stop: str | Sequence[Any] | None = None,
        seed: int | Sequence[int] = 0,
        include_stop: bool = False,
        log_probs: int | None = None,
        batch_size: int | None = None,
        eos_ids: Collection[int] | None = None,
    ) -> Any:
        """Continues one prompt (gives a `Result`) or several (gives a list of them).

        An option of a row is one value for all prompts or a list with one for each;
        those before `seed` apply to the drafter and to every verified token alike.

        Args:
            prompts: a text, a chat, token ids, or a list of such.
            max_new_tokens: of each row; 0 gives an empty answer.
            min_new_tokens: before so many nothing but an error or the capacity ends a
                row: the ids that would are impossible, stops are not looked for.
            temperature: 0 is greedy.
            top_k: keep the k most likely tokens; 0 keeps all.
            top_p: keep the most likely tokens that reach this probability; over 0.
            min_p: keep tokens this likely relative to the most likely one.
            repetition_penalty: makes ids of prompt and output less likely, over 1.
            presence_penalty: taken from the logits of ids in the output.
            frequency_penalty: the same, for every time that they stand there.
            logit_bias: by id, added to its logit; `-inf` rules it out.
            banned_sequences: of ids (a bare id is one of length 1); no text is
                continued to one.
            stop_sequences: of ids; a row ends with the first in its output.
            stop: a text or texts; the text ends before the first of them. They are
                looked for after every round, which is then a dispatch of its own.
            seed: an int gives row i the seed `seed + i`.
            include_stop: leave the stop text in.
            log_probs: report those of each token, and of so many alternatives.
            batch_size: rows of a batch; by default all prompts are one.
            eos_ids: ids that end a row; by default the tokenizer's.

        Raises:
            UserError: lists all that is wrong with the prompts and options.
        """
        results = self.iterate(
            [prompts] if is_single(prompts) else prompts,  # pyright: ignore
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
            banned_sequences=banned_sequences,
            stop_sequences=stop_sequences,
            stop=stop,
            seed=seed,
            include_stop=include_stop,
            log_probs=log_probs,
            batch_size=batch_size,
            eos_ids=eos_ids,
        )
        return next(results) if is_single(prompts) else list(results)

    def iterate(
        self,
        prompts: Sequence[Prompt],
        *,
        include_stop: bool = False,
        log_probs: int | None = None,
        batch_size: int | None = None,
        eos_ids: Collection[int] | None = None,
        **options: Any,
    ) -> Iterator[Result]:
        """Yields the results of a list of prompts in order, as their batches end.

        Options are those of `generate`; all are checked before the first batch runs.
        """
        requests = make_requests(self.target, prompts, **options)
        check_call(batch_size=batch_size, log_probs=log_probs)
        size = self.whole_rows(batch_size or max(len(requests), 1))
        capacity = self._capacity_for(requests)
        batches = [requests[at : at + size] for at in range(0, len(requests), size)]
        return (
            result
            for batch in batches
            for result in self._run(
                batch,
                pack(batch, size, capacity),
                self.pack_options(batch, size, eos_ids, log_probs),
                include_stop,
            )
        )

    def stream(
        self,
        prompt: Prompt,
        *,
        include_stop: bool = False,
        eos_ids: Collection[int] | None = None,
        **options: Any,
    ) -> Iterator[str]:
        """Yields the text of one prompt piece by piece, as its rounds end.

        It runs the program of `generate`, one round a dispatch; options are the same,
        but for `log_probs`. What may be the beginning of a stop text is held back.
        A row that ends in error ends as any other does: `generate` tells.
        """
        tokenizer = self.target.tokenizer
        if tokenizer is None:
            raise UserError(
                f"{self.target.reference} has no tokenizer to make text with"
            )
        requests = make_requests(self.target, [prompt], **options)
        rows = self.whole_rows(1)
        prompts = pack(requests, rows, self._capacity_for(requests))
        watcher = StopTexts(requests, tokenizer, include_stop, all_rows=True)
        reader, shown = watcher.rows[0], 0
        call = self.pack_options(requests, rows, eos_ids, None)
        for state in self._states(prompts, call, rounds=1, watch=watcher.watch):
            yield reader.text[shown : reader.safe]
            shown = reader.safe
            if not _is_running(state):
                self._watch.see(read_outcome(state).statistics)
        reader.finish()
        yield reader.text[shown:]

    def whole_rows(self, rows: int) -> int:
        """As many rows or a few more: the parts of a mesh have equally many."""
        partition = self.target.partition
        parts = 1 if partition is None else partition.row_parts
        return -(-rows // parts) * parts

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

    def pack_options(
        self,
        batch: Sequence[Request],
        rows: int,
        eos_ids: Collection[int] | None,
        log_probs: int | None,
    ) -> Options:
        """The options of a batch as arrays; rows past the requests are inert."""
        tokenizer = self.target.tokenizer
        if eos_ids is None:
            eos_ids = () if tokenizer is None else tokenizer.eos_ids
        return Options(
            pack_sampling(batch, rows, self.target.decoder.vocab_size),
            pack_eos(eos_ids, rows),  # pyright: ignore
            pack_sequences([request.stop_sequences for request in batch], rows),
            self.rule,
            None if log_probs is None else Reporting(log_probs),
        )

    def _run(
        self,
        batch: Sequence[Request],
        prompts: Prompts,
        options: Options,
        include_stop: bool,
    ) -> list[Result]:
        tokenizer, watcher = self.target.tokenizer, None
        watch, rounds = lambda state: state, ALL_ROUNDS
        if tokenizer is not None and any(request.stop for request in batch):
            watcher, rounds = StopTexts(batch, tokenizer, include_stop), 1
            watch = watcher.watch
        before = np.array([(p.seconds, p.compile_seconds) for p in self.programs])
        outcome = idle_outcome(prompts, self.drafter.depth, options.reporting)
        for state in self._states(prompts, options, rounds=rounds, watch=watch):
            outcome = outcome if _is_running(state) else read_outcome(state)
        self._watch.see(outcome.statistics)
        after = np.array([(p.seconds, p.compile_seconds) for p in self.programs])
        first, later, rounds = (after - before)[:, 0].tolist()
        timing = Timing(first + later, rounds, float((after - before)[:, 1].sum()))

        def text_of(row: int, ids: list[int]) -> str:
            stopped = None if watcher is None else watcher.text(row)
            if stopped is not None:
                return stopped
            return "" if tokenizer is None else tokenizer.decode(ids)

        outcome = outcome if watcher is None else watcher.cut(outcome)
        return make_results(batch, outcome, timing, text_of)

    def _states(
        self,
        prompts: Prompts,
        options: Options,
        *,
        rounds: int,
        watch: Callable[[DecodingState], DecodingState],
    ) -> Iterator[DecodingState]:
        """The state after prefill and after every `rounds` rounds, until all ended.

        `watch` sees each of them first, and may end rows.
        """
        if (prompts.limit <= prompts.length).all():
            return
        model, drafter = self.target.decoder, self.drafter
        first, later, run_rounds = self.programs
        state: Any = prompts
        for chunk, final in chunks(prompts):
            program = first if state is prompts else later
            state = program(model, drafter, state, chunk, options, final, LARGEST_CHUNK)
        state = watch(state)
        yield state
        while _is_running(state):
            state = watch(run_rounds(model, drafter, state, options, np.int32(rounds)))
            yield state


def _is_running(state: DecodingState) -> bool:
    """Asked on the host: an operation on the device would be one more dispatch."""
    return bool((fetch(state.finish) == RUNNING).any())
