"""From the prompts of a job to records, as rows end."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from jaxspec.batch.inputs import Item
from jaxspec.batch.pool import Entry, Pool, signature
from jaxspec.errors import UserError
from jaxspec.generator import Generator
from jaxspec.requests import Prompt, Request, make_requests
from jaxspec.results import Outcome, Stats, Timing, make_results

# How far ahead prompts are looked at that can be prefilled together.
WAITING_PER_PART = 8
# What a record says of speculation; seconds would differ from run to run.
FIGURES = ("rounds", "drafted", "accepted", "acceptance_rate", "tokens_per_round")
FIGURES += ("accepted_by_position",)


class Runner:
    """Continues prompts in a pool of rows, each as it would be alone.

    Attributes:
        tokens: emitted so far.
        drafted: draft tokens so far.
        accepted: of them.
    """

    def __init__(self, generator: Generator, rows: int, seed: int, **options: Any):
        """Prepares a pool; nothing is compiled for prompts yet.

        Args:
            generator: with a capacity.
            rows: that run together.
            seed: of the job; prompt i gets `seed + i`, as with `jaxspec generate`.
            options: of `Generator.generate`, the same for all prompts.
        """
        self._generator, self._seed, self._options = generator, seed, options
        (sample,) = make_requests(generator.target, [[0]], seed=0, **options)
        self.pool = Pool(generator, rows, sample)
        self.tokens = self.drafted = self.accepted = 0

    def run(self, items: Iterable[Item]) -> Iterator[dict[str, Any]]:
        """Yields the record of each item, in the order in which they end."""
        source, waiting = iter(items), deque[Entry]()
        while True:
            yield from self._look_ahead(source, waiting)
            self._fill(waiting)
            if not self.pool.running:
                return
            for entry, row, outcome in self.pool.run():
                yield self._record(entry, row, outcome)

    def _look_ahead(
        self, source: Iterator[Item], waiting: deque[Entry]
    ) -> Iterator[dict[str, Any]]:
        """Makes requests of the next items; yields the records of those that fail."""
        while len(waiting) < WAITING_PER_PART * self.pool.parts:
            item = next(source, None)
            if item is None:
                return
            request = self._request(item)
            if isinstance(request, str):
                yield _error_record(item.index, item.prompt, request)
            else:
                waiting.append(Entry(item.index, request))

    def _request(self, item: Item) -> Request | str:
        """The request of an item, or what is wrong with it."""
        if item.prompt is None:
            return item.error or "no prompt"
        try:
            (request,) = make_requests(
                self._generator.target,
                [item.prompt],
                seed=self._seed + item.index,
                **self._options,
            )
        except UserError as error:
            return str(error).replace("prompt 0", f"prompt {item.index}")
        most = self.pool.capacity - 1
        if len(request.ids) > most:
            return (
                f"prompt {item.index} has {len(request.ids)} tokens, but a capacity of "
                f"{most + 1} takes at most {most}; shorten it or raise the capacity"
            )
        return request

    def _fill(self, waiting: deque[Entry]) -> None:
        """Gives free rows the next requests, those of one shape together."""
        while waiting and (free := self.pool.free_parts()):
            wanted = signature(waiting[0].request)
            alike = [each for each in waiting if signature(each.request) == wanted]
            chosen = alike[: len(free)]
            for entry in chosen:
                waiting.remove(entry)
            self.pool.put(chosen)

    def _record(self, entry: Entry, row: int, outcome: Outcome) -> dict[str, Any]:
        tokenizer = self._generator.target.tokenizer
        decode = (lambda _, ids: tokenizer.decode(ids)) if tokenizer else _no_text
        own = Outcome(*[_row_of(part, row) for part in outcome])
        (result,) = make_results([entry.request], own, Timing(0.0, 0.0, 0.0), decode)
        self._count(result.stats, len(result.token_ids))
        return {
            "index": entry.index,
            "prompt": result.prompt,
            "text": result.text,
            "token_ids": result.token_ids,
            "finish_reason": result.finish_reason,
            "stats": {name: getattr(result.stats, name) for name in FIGURES},
        }

    def _count(self, stats: Stats, tokens: int) -> None:
        self.tokens += tokens
        self.drafted += stats.drafted
        self.accepted += stats.accepted


def _row_of(part: Any, row: int) -> Any:
    """One row of a part of an outcome, still with an axis of rows."""
    return jax.tree.map(lambda leaf: leaf[row : row + 1], part)


def _no_text(row: int, ids: list[int]) -> str:
    return ""


def _error_record(index: int, prompt: Prompt | None, message: str) -> dict[str, Any]:
    return {
        "index": index,
        "prompt": prompt,
        "text": "",
        "token_ids": [],
        "finish_reason": "error",
        "stats": None,
        "error": message,
    }
