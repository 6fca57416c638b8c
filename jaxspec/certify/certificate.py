"""The certificate: what was tested, with which result, and what failed."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.certify.draws import Bench, Draws
from jaxspec.certify.identity import Identity, compare_greedy
from jaxspec.certify.statistics import binomial, chi_square, uniform_scores
from jaxspec.core.accept import Rule
from jaxspec.errors import UserError, refuse
from jaxspec.generator import Generator
from jaxspec.requests import make_requests

ACCEPTABLE = 1e-4
LEAST_VERIFIED = 500
# A failure is looked at again with so many times the samples, never with another seed.
SECOND_LOOK = 10
MOST_MORE = 4
POSITIONS = 2

OPTION_SETS: dict[str, dict[str, Any]] = {
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1": {"temperature": 1.0},
    "temperature 1.3": {"temperature": 1.3},
    "top-k 20": {"temperature": 1.0, "top_k": 20},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {
        "temperature": 1.0,
        "repetition_penalty": 1.05,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
    },
}


@dataclasses.dataclass(frozen=True)
class Position:
    """A place after the prompt: how its draft tokens fared, and its p-value.

    Attributes:
        position: from 1.
        verified: draft tokens that were tested there.
        accepted: those that were accepted.
        p_value: of the chi-square test of all tokens drawn there.
    """

    position: int
    verified: int
    accepted: int
    p_value: float


@dataclasses.dataclass(frozen=True)
class Depth:
    """How often the first round accepted so many draft tokens, and how often it should.

    Attributes:
        depth: from 1.
        drafted: rounds with a valid draft token at the depth.
        expected: the mean probability that it is reached, given the drafts.
        measured: the share of rounds that reached it.
    """

    depth: int
    drafted: int
    expected: float | None
    measured: float | None
    p_value: float


@dataclasses.dataclass(frozen=True)
class OptionTest:
    """The tests of one set of sampling options."""

    options: str
    samples: int
    positions: list[Position]
    joint_p_value: float
    depths: list[Depth]
    not_plain: int | None
    failures: list[str]


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What was tested of a target and a drafter, and what failed.

    Attributes:
        identity: of greedy decoding.
        tests: by set of sampling options.
        failures: each in words; none: all passed.
    """

    target: str
    rule: str
    dtype: str
    jax: str
    identity: Identity
    tests: list[OptionTest]
    failures: list[str]

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """All of it as one JSON object."""
        return dataclasses.asdict(self) | {"passed": self.passed}


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
    """Tests the exactness of a generator through its own compiled programs.

    Greedy ids against plain decoding; sampled tokens against the target's distribution
    by chi-square, position by position and two together; acceptance against theory.

    Args:
        generator: target, drafter, k and rule as they are to be used.
        greedy_prompts: for the greedy comparison.
        prompts: continued many times; prompts that repeat themselves give prompt
            lookup something to find.
        samples: continuations by each option set.
        max_new_tokens: of the greedy comparison.
        batch_size: continuations at a time.
        seed: of the first continuation.
        on_progress: told the share that is done, from 0 to 1.

    Raises:
        UserError: the generator drafts nothing or its rule is lossy by design, or an
            argument is out of range.
    """
    check_request(generator.rule, samples, batch_size)
    if not generator.drafter.nodes:
        raise UserError("there is nothing to certify without a drafter; name one")
    ids = [each.ids for each in make_requests(generator.target, prompts)]
    if any(len(prompt) < 2 for prompt in ids):
        raise UserError("a prompt to be continued has one token, expected two or more")
    steps = len(greedy_prompts) + -(-samples * len(OPTION_SETS) // batch_size)
    done = 0

    def step() -> None:
        nonlocal done
        done = done + 1
        on_progress(min(done / steps, 1.0))

    identity = compare_greedy(generator, greedy_prompts, max_new_tokens, step)
    bench = Bench(generator, ids, min(POSITIONS, generator.drafter.nodes), batch_size)

    def examine(sets: Mapping[str, Any], count: int) -> dict[str, OptionTest]:
        drawn = bench.draw(sets, count, seed, step)
        return {name: _test(name, drawn[name], seed, identity.delta) for name in sets}

    tests = examine(OPTION_SETS, samples)
    if again := _second_looks(tests, samples):
        tests |= examine(
            {name: OPTION_SETS[name] for name in again}, max(again.values())
        )
    failures = _greedy_failures(identity) + [
        f"{name}: {failure}"
        for name, test in tests.items()
        for failure in test.failures
    ]
    return Certificate(
        target=generator.target.reference,
        rule=generator.rule.name,
        dtype=str(generator.target.decoder.dtype),
        jax=jax.__version__,
        identity=identity,
        tests=list(tests.values()),
        failures=failures,
    )


def check_request(rule: Rule, samples: int, batch_size: int) -> None:
    """Refuses what needs no model to be refused.

    Raises:
        UserError: the rule is lossy by design, or a number is out of range.
    """
    if not rule.lossless:
        raise UserError(
            f"rule {rule.name} does not keep the target's distribution, so there is "
            "nothing to certify; choose another rule"
        )
    values = {"samples": (samples, LEAST_VERIFIED), "batch_size": (batch_size, 1)}
    refuse(
        [
            f"{name} is {value!r}, expected a whole number from {least} on"
            for name, (value, least) in values.items()
            if not isinstance(value, int) or value < least
        ]
    )


def _second_looks(tests: Mapping[str, OptionTest], samples: int) -> dict[str, int]:
    """The option sets to be drawn again from the same seeds on, and how often.

    What failed, and what had somewhat too few verified drafts.
    """
    looks = {}
    for name, test in tests.items():
        least = min(each.verified for each in test.positions)
        # With some room, for the share varies.
        needed = int(1.2 * samples * LEAST_VERIFIED / max(least, 1))
        if any("p =" in failure for failure in test.failures):
            looks[name] = SECOND_LOOK * samples
        elif least < LEAST_VERIFIED and needed <= MOST_MORE * samples:
            looks[name] = needed
    return looks


def _greedy_failures(identity: Identity) -> list[str]:
    failures = []
    if identity.differences:
        failures.append(
            f"greedy: {identity.differences} of {identity.prompts} prompts get other "
            "ids than by plain decoding, and not at a near tie"
        )
    if not identity.verified:
        failures.append("greedy: untested, no draft token was verified")
    return failures


def _test(name: str, draws: Draws, seed: int, delta: float) -> OptionTest:
    scores = uniform_scores(draws, seed)
    positions = [
        Position(
            place + 1,
            int(draws.verified[:, place].sum()),
            int(draws.accepted[:, place].sum()),
            chi_square(scores[:, place : place + 1]),
        )
        for place in range(scores.shape[1])
    ]
    joint = chi_square(scores)
    depths = [_depth(draws, place) for place in range(scores.shape[1])]
    shared, not_plain = draws.followed.shared, None
    if shared is not None:
        differs = draws.tokens != shared.plain
        not_plain = int((differs & (shared.gap > 2 * delta)).sum())
    impossible = int((draws.followed.prob == 0).sum())
    failures = [*_position_failures(positions, joint), *_depth_failures(depths)]
    if impossible:
        failures.append(f"{impossible} tokens are impossible to the target, p = 0")
    if not_plain:
        failures.append(
            f"{not_plain} tokens are not those of plain decoding with the same seed, "
            "and not at a near tie"
        )
    return OptionTest(name, len(scores), positions, joint, depths, not_plain, failures)


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


def _position_failures(positions: list[Position], joint: float) -> list[str]:
    failures = [
        f"position {each.position} is untested: {each.verified} drafts were verified "
        f"there, at least {LEAST_VERIFIED} are needed; raise the samples or choose "
        "prompts that repeat themselves"
        for each in positions
        if each.verified < LEAST_VERIFIED
    ]
    failures += [
        f"position {each.position} has not the target's distribution, "
        f"p = {each.p_value:.1e}"
        for each in positions
        if each.p_value <= ACCEPTABLE
    ]
    if joint <= ACCEPTABLE:
        failures.append(f"the positions together have not, p = {joint:.1e}")
    return failures


def _depth_failures(depths: list[Depth]) -> list[str]:
    return [
        f"{each.measured:.3f} of the first rounds accept {each.depth} tokens, expected "
        f"{each.expected:.3f}, p = {each.p_value:.1e}"
        for each in depths
        if each.p_value <= ACCEPTABLE
    ]
