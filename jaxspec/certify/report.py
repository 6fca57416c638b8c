"""What a certificate says: results, and what failed in words."""

import dataclasses
from typing import Any

from jaxspec.certify.identity import Identity

ACCEPTABLE = 1e-4
LEAST_VERIFIED = 500
LEAST_REFUSED = 50
# What float32 rounding was seen to change a log-probability by, with room: a larger
# change is a fault, and must excuse no difference.
LARGEST_DELTA = 1e-2


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
    """The tests of one set of sampling options.

    Attributes:
        joint_p_value: of the chi-square test of all positions together.
        impossible: emitted tokens that the target rules out.
        not_plain: tokens that are not plain decoding's with the same seed, and not at a
            near tie; None unless the rule promises them.
    """

    options: str
    samples: int
    positions: list[Position]
    joint_p_value: float
    depths: list[Depth]
    impossible: int
    not_plain: int | None

    @property
    def smallest_p_value(self) -> float:
        """Of all its tests; 0 for a token that must not be."""
        if self.impossible or self.not_plain:
            return 0.0
        both = [*self.positions, *self.depths]
        return min(self.joint_p_value, *(each.p_value for each in both))

    @property
    def least_verified(self) -> int:
        """At any position."""
        return min(each.verified for each in self.positions)

    @property
    def failures(self) -> list[str]:
        """What failed, each in words."""
        faults = [
            f"position {each.position} is untested: {each.verified} drafts were "
            f"verified there, at least {LEAST_VERIFIED} are needed; raise the samples "
            "or choose prompts that repeat themselves"
            for each in self.positions
            if each.verified < LEAST_VERIFIED
        ]
        faults += [
            f"position {each.position} has not the target's distribution, "
            f"p = {each.p_value:.1e}"
            for each in self.positions
            if each.p_value <= ACCEPTABLE
        ]
        if self.joint_p_value <= ACCEPTABLE:
            faults.append(
                f"the positions together have not, p = {self.joint_p_value:.1e}"
            )
        faults += [
            f"{each.measured:.3f} of the first rounds accept {each.depth} tokens, "
            f"expected {each.expected:.3f}, p = {each.p_value:.1e}"
            for each in self.depths
            if each.p_value <= ACCEPTABLE
        ]
        if self.impossible:
            faults.append(f"{self.impossible} tokens are impossible to the target")
        if self.not_plain:
            faults.append(
                f"{self.not_plain} tokens are not those of plain decoding with the "
                "same seed, and not at a near tie"
            )
        return [f"{self.options}: {fault}" for fault in faults]


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What was tested of a target and a drafter, and what failed.

    Attributes:
        identity: of greedy decoding.
        tests: by set of sampling options, and of all of them together.
        failures: each in words; none: all passed.
    """

    target: str
    rule: str
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


def failures_of(identity: Identity, tests: list[OptionTest]) -> list[str]:
    """All that failed; the last test is that of all option sets together."""
    faults = []
    if identity.differences:
        faults.append(
            f"greedy: {identity.differences} of {identity.prompts} prompts get other "
            "ids than by plain decoding, and not at a near tie"
        )
    if identity.delta > LARGEST_DELTA:
        faults.append(
            f"greedy: a forward of k + 1 tokens changes a log-probability by "
            f"{identity.delta:.1e}, which is no rounding of float32"
        )
    if not identity.verified:
        faults.append("greedy: untested, no draft token was verified")
    refused = sum(each.verified - each.accepted for each in tests[-1].positions)
    if refused < LEAST_REFUSED:
        faults.append(
            f"refusals are untested: {refused} draft tokens were refused, at least "
            f"{LEAST_REFUSED} are needed; choose prompts that leave more open"
        )
    return faults + [fault for test in tests for fault in test.failures]
