"""Greedy identity: the generator writes what plain decoding writes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxspec.generator import Generator
from jaxspec.results import Alternative, Result

# So many of the likeliest ids are compared between the two runs.
COMPARED = 4


@dataclasses.dataclass(frozen=True)
class Identity:
    """Greedy runs of some prompts with and without speculation.

    Attributes:
        prompts: how many.
        tokens: plain tokens up to the first difference of each prompt.
        verified: draft tokens that were verified.
        accepted: draft tokens that were accepted.
        delta: the largest change of a log-probability between the two runs' forwards,
            over the likeliest ids.
        smallest_gap: between the two likeliest ids of plain decoding, at any token.
        near_ties: prompts whose ids differ first where the gap is under 2 delta.
        differences: prompts whose ids differ first elsewhere: each is a fault.
    """

    prompts: int
    tokens: int
    verified: int
    accepted: int
    delta: float
    smallest_gap: float
    near_ties: int
    differences: int


def compare_greedy(
    generator: Generator, prompts: Sequence[Any], max_new_tokens: int, on_prompt: Any
) -> Identity:
    """Runs every prompt with both, one at a time."""
    plain = Generator(generator.target, capacity=generator.capacity)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "log_probs": COMPARED}
    runs = [
        each.iterate(prompts, batch_size=1, **options) for each in (plain, generator)
    ]
    pairs = []
    for pair in zip(*runs, strict=True):
        pairs.append(pair)
        on_prompt()
    shared = [_shared(*pair) for pair in pairs]
    delta = max(
        _change(*both)
        for pair, count in zip(pairs, shared, strict=True)
        for both in list(zip(*map(_alternatives, pair), strict=False))[: count + 1]
    )
    gaps = [
        [_gap(each) for each in _alternatives(expected)[: count + 1]]
        for (expected, _), count in zip(pairs, shared, strict=True)
    ]
    ends = [
        own[-1]
        for own, (expected, found) in zip(gaps, pairs, strict=True)
        if expected.token_ids != found.token_ids
    ]
    near = sum(gap < 2 * delta for gap in ends)
    return Identity(
        prompts=len(pairs),
        tokens=sum(shared),
        verified=sum(found.stats.drafted for _, found in pairs),
        accepted=sum(found.stats.accepted for _, found in pairs),
        delta=delta,
        smallest_gap=min(gap for own in gaps for gap in own),
        near_ties=near,
        differences=len(ends) - near,
    )


def _shared(expected: Result, found: Result) -> int:
    """How many ids both begin with."""
    pairs = zip(expected.token_ids, found.token_ids, strict=False)
    same = [one == other for one, other in pairs]
    return same.index(False) if False in same else len(same)


def _alternatives(result: Result) -> list[list[Alternative]]:
    return [] if result.log_probs is None else result.log_probs.alternatives


def _gap(likeliest: list[Alternative]) -> float:
    return likeliest[0].raw - likeliest[1].raw


def _change(one: list[Alternative], other: list[Alternative]) -> float:
    """The largest change of a log-probability, over the ids that both name."""
    known = {each.id: each.raw for each in other}
    return max((abs(a.raw - known[a.id]) for a in one if a.id in known), default=0.0)
