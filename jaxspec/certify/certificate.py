"""Runs the tests of a certificate."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.certify.draws import Bench, Draws
from jaxspec.certify.identity import compare_greedy
from jaxspec.certify.report import (
    LEAST_VERIFIED,
    Certificate,
    Depth,
    OptionTest,
    Position,
    failures_of,
)
from jaxspec.certify.statistics import binomial, chi_square, uniform_scores
from jaxspec.core.accept import Rule
from jaxspec.errors import UserError, refuse
from jaxspec.generator import Generator
from jaxspec.requests import make_requests
from jaxspec.row_options import OPTIONS, is_whole

# What is doubtful is looked at again with so many times the samples, those of the first
# look among them.
DOUBTFUL = 1e-3
SECOND_LOOK = 10
MOST_MORE = 4
POSITIONS = 2
TOGETHER = "all together"

OPTION_SETS: dict[str, dict[str, Any]] = {
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1": {"temperature": 1.0},
    "temperature 1.3": {"temperature": 1.3},
    "top-k 20": {"temperature": 1.0, "top_k": 20},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    # Negative ones: repeats are then likely, so that a path left out of account shows.
    "penalties": {
        "temperature": 1.0,
        "repetition_penalty": 1.05,
        "presence_penalty": -2.0,
        "frequency_penalty": -1.0,
    },
}


def certify(
    generator: Generator,
    greedy_prompts: Sequence[Any],
    prompts: Sequence[Any],
    *,
    samples: int = 640,
    max_new_tokens: int = 64,
    batch_size: int = 32,
    seed: int = 0,
    on_progress: Callable[[float], None] = lambda done: None,
) -> Certificate:
    """Tests the exactness of a generator through its own production loop.

    Greedy ids against plain decoding; sampled tokens against the target's distribution
    by chi-square, position by position and all together; acceptance against theory. It
    sees two tokens after each prompt, so it cannot tell noise that later rounds reuse.

    Args:
        generator: target, drafter, k and rule as they are to be used; in float32.
        greedy_prompts: for the greedy comparison.
        prompts: continued many times; prompts that repeat themselves give prompt
            lookup something to find.
        samples: continuations by each option set.
        max_new_tokens: of the greedy comparison.
        batch_size: continuations at a time.
        seed: of the first continuation.
        on_progress: told the share that is done, from 0 to 1.

    Raises:
        UserError: the generator drafts nothing, is not of float32 or its rule is lossy
            by design, or an argument is out of range.
    """
    dtype = str(generator.target.decoder.dtype)
    check_request(generator.rule, dtype, samples, max_new_tokens, batch_size, seed)
    ids = _check_prompts(generator, greedy_prompts, prompts)
    steps = len(greedy_prompts) + -(-samples * len(OPTION_SETS) // batch_size)
    done = 0

    def step() -> None:
        nonlocal done
        done = done + 1
        on_progress(min(done / steps, 1.0))

    identity = compare_greedy(generator, greedy_prompts, max_new_tokens, step)
    positions = min(POSITIONS, generator.drafter.nodes)
    bench = Bench(generator, ids, OPTION_SETS, positions, batch_size)
    drawn = bench.draw(dict.fromkeys(OPTION_SETS, samples), seed, step)
    tests = _examine(drawn, seed, identity.delta)
    while again := _second_looks(tests, samples):
        drawn |= bench.draw(again, seed, step)
        tests = _examine(drawn, seed, identity.delta)
    return Certificate(
        target=generator.target.reference,
        rule=generator.rule.name,
        jax=jax.__version__,
        identity=identity,
        tests=tests,
        failures=failures_of(identity, tests),
    )


def check_request(
    rule: Rule,
    dtype: str,
    samples: int,
    max_new_tokens: int,
    batch_size: int,
    seed: int,
) -> None:
    """Refuses what needs no model to be refused.

    Raises:
        UserError: the rule is lossy by design, or a value is out of range.
    """
    if not rule.lossless:
        raise UserError(
            f"rule {rule.name} does not keep the target's distribution, so there is "
            "nothing to certify; choose another rule"
        )
    if dtype != "float32":
        raise UserError(
            f"dtype is {dtype}, expected float32: in fewer bits a forward of k + 1 "
            "tokens differs too much from plain decoding to be tested against it"
        )
    values = {
        "samples": (samples, LEAST_VERIFIED),
        "max_new_tokens": (max_new_tokens, 1),
        "batch_size": (batch_size, 1),
    }
    faults = [
        f"{name} is {value!r}, expected a whole number from {least} on"
        for name, (value, least) in values.items()
        if not is_whole(value, least)
    ]
    # Every sample of every look has a seed of its own.
    if not faults and not (
        OPTIONS["seed"].takes(seed)
        and OPTIONS["seed"].takes(seed + SECOND_LOOK * samples * len(OPTION_SETS))
    ):
        faults.append(
            f"seed is {seed!r}, expected {OPTIONS['seed'].expected}, less "
            "the number of samples"
        )
    refuse(faults)


def _check_prompts(generator: Generator, greedy: Sequence, sampled: Sequence) -> list:
    """The ids of the prompts to be sampled."""
    if not generator.drafter.nodes:
        raise UserError("there is nothing to certify without a drafter; name one")
    if generator.drafter.nodes > generator.drafter.depth:
        raise UserError(
            "certify tests chains, but a tree is drafted; give draft_tokens instead"
        )
    if not greedy or not sampled:
        raise UserError("there are no prompts; give one of each kind at least")
    ids = [each.ids for each in make_requests(generator.target, sampled)]
    most = generator.capacity or generator.target.decoder.config.max_positions
    refuse(
        [
            f"prompt {row} has {len(own)} tokens, expected 2 to {most - POSITIONS}"
            for row, own in enumerate(ids)
            if not 2 <= len(own) <= most - POSITIONS
        ]
    )
    return ids


def _examine(drawn: Mapping[str, Draws], seed: int, delta: float) -> list[OptionTest]:
    """A test of each option set, and one of all of them.

    The scores of a right sampler are even whatever the options, so that together they
    show what is too small for one set.
    """
    tests = [
        _test(name, draws, seed, delta / min(1.0, OPTION_SETS[name]["temperature"]))
        for name, draws in drawn.items()
    ]
    coldest = min(each["temperature"] for each in OPTION_SETS.values())
    together = Draws.join(list(drawn.values()))
    return [*tests, _test(TOGETHER, together, seed, delta / coldest)]


def _second_looks(tests: Sequence[OptionTest], samples: int) -> dict[str, int]:
    """How many samples each option set needs that was not looked at twice yet."""
    everything, looks = tests[-1].smallest_p_value <= DOUBTFUL, {}
    for test in tests[:-1]:
        if test.samples >= SECOND_LOOK * samples:
            continue
        least = test.least_verified
        # With some room, for the share varies.
        needed = int(1.2 * samples * LEAST_VERIFIED / max(least, 1))
        if everything or test.smallest_p_value <= DOUBTFUL:
            looks[test.options] = SECOND_LOOK * samples
        elif least < LEAST_VERIFIED and test.samples < needed <= MOST_MORE * samples:
            looks[test.options] = needed
    return looks


def _test(name: str, draws: Draws, seed: int, delta: float) -> OptionTest:
    scores = uniform_scores(draws, seed)
    places = range(scores.shape[1])
    shared, not_plain = draws.followed.shared, None
    if shared is not None:
        differs = draws.tokens != shared.plain
        not_plain = int((differs & (shared.gap > 2 * delta)).sum())
    return OptionTest(
        options=name,
        samples=len(scores),
        positions=[
            Position(
                place + 1,
                int(draws.verified[:, place].sum()),
                int(draws.accepted[:, place].sum()),
                chi_square(scores[:, place : place + 1]),
            )
            for place in places
        ],
        joint_p_value=chi_square(scores),
        depths=[_depth(draws, place) for place in places],
        impossible=int((draws.followed.prob == 0).sum()),
        not_plain=not_plain,
    )


def _depth(draws: Draws, place: int) -> Depth:
    tested = np.asarray(draws.tested[:, place], bool)
    reach, reached = draws.reach[tested, place], draws.reached[tested, place]
    drafted = int(tested.sum())
    return Depth(
        place + 1,
        drafted,
        float(reach.mean()) if drafted else None,
        float(reached.mean()) if drafted else None,
        binomial(reached, reach),
    )
