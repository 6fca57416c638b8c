"""`jaxspec certify`: tests that a target and a drafter keep what is promised."""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from jaxspec.certify import Certificate, certify
from jaxspec.certify.certificate import check_request
from jaxspec.certify.report import LEAST_VERIFIED, OptionTest
from jaxspec.cli.options import DEFAULT_RULE, add_drafting, add_verb, make_generator
from jaxspec.cli.prompts import read_prompts
from jaxspec.core.accept import RULES
from jaxspec.errors import UserError
from jaxspec.progress import watching
from jaxspec.requests import Prompt

# They repeat themselves, so that prompt lookup has work.
REPEATING = [
    "the cat sat on the mat and " * 6 + "the cat",
    "abc, def, ghi, " * 8 + "abc,",
    "one two three four five " * 6 + "one two",
]
PROMPTS = [
    *REPEATING,
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
    "The sun was low over the harbour when the last boat came in.",
]

_EPILOG = """\
What is tested, through the production loop, in float32:
  greedy      ids against plain decoding; a first difference is allowed only where the
              two likeliest ids lie within 2 delta, delta being the largest change of a
              log-probability between forwards of one and of k + 1 tokens
  sampled     the first tokens of many continuations against the distribution that
              plain decoding has there, by chi-square, position by position and
              together, under seven sets of options; with --rule coupled also against
              the tokens that plain decoding draws with the same seeds
  acceptance  how many draft tokens the first round accepts, against theory

With the default model it takes some five minutes on two CPU cores.

What has p <= 1e-3 is looked at again with ten times the samples, and fails at
p <= 1e-4. A position where fewer than 500 draft tokens were verified is untested, and
fails; so is a run in which fewer than 50 were refused.

With --json stdout has one object. The exit code is 0 if all passed, 1 if not.

examples:
  jaxspec certify
  jaxspec certify --rule block --samples 1000
  jaxspec certify --model qwen2.5-coder-1.5b-instruct \\
      --draft-model qwen2.5-coder-0.5b-instruct --prompts prompts.jsonl --json
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Registers the subcommand `certify`."""
    parser = add_verb(
        subparsers,
        run,
        "certify",
        help="test the exactness of your own pair",
        description="Tests that speculation changes nothing but the speed.",
        epilog=_EPILOG,
    )
    add_drafting(parser)
    add = parser.add_argument
    add("--prompts", metavar="FILE", help="a JSONL file (default: a few that repeat)")
    add(
        "--samples",
        metavar="N",
        type=int,
        default=640,
        help=f"continuations by each set of options, {LEAST_VERIFIED} at least "
        "(default: 640)",
    )
    add(
        "--max-new-tokens",
        metavar="N",
        type=int,
        default=64,
        help="of the greedy comparison (default: 64)",
    )
    add("--batch-size", metavar="B", type=int, default=32, help="(default: 32)")
    add("--seed", metavar="S", type=int, default=0, help="continuation i has S + i")
    add("--json", action="store_true", help="one JSON object")
    return parser


def run(args: argparse.Namespace) -> int:
    """Runs `jaxspec certify`; returns the exit code.

    Raises:
        UserError: an option is wrong, or the model cannot be had.
    """
    if args.drafter == "none":
        raise UserError("there is nothing to certify with --drafter none")
    if args.tree is not None:
        raise UserError("certify tests chains; give --draft-tokens instead of --tree")
    rule = RULES[args.rule or DEFAULT_RULE]
    numbers = args.samples, args.max_new_tokens, args.batch_size, args.seed
    check_request(rule, args.dtype, *numbers)
    repeating: list[Prompt] = list(REPEATING)
    prompts: list[Prompt] = list(PROMPTS)
    if args.prompts is not None:
        repeating = prompts = read_prompts(args.prompts, chat=False)
    generator = make_generator(args)
    done = 0

    def note(share: float) -> None:
        nonlocal done
        done = int(100 * share)

    with watching("certifying, %", lambda: done, 100, in_bytes=False):
        certificate = certify(
            generator,
            prompts,
            repeating,
            samples=args.samples,
            max_new_tokens=args.max_new_tokens,
            batch_size=args.batch_size,
            seed=args.seed,
            on_progress=note,
        )
    if args.json:
        print(json.dumps(certificate.to_json()))
    else:
        _print(certificate)
    return 0 if certificate.passed else 1


def _print(certificate: Certificate) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    identity = certificate.identity
    console.print(
        f"{certificate.target}, rule {certificate.rule}, float32, jax {certificate.jax}"
    )
    console.print(
        f"greedy: {identity.prompts} prompts, {identity.tokens} tokens the same, "
        f"{identity.verified} drafts verified, {identity.accepted} accepted, "
        f"{identity.differences} differences, {identity.near_ties} near ties"
    )
    console.print(
        f"delta {identity.delta:.1e}, smallest gap {identity.smallest_gap:.1e}"
    )
    console.print(_table(certificate))
    for failure in certificate.failures:
        console.print(f"FAILED {failure}", style="bold red")
    verdict = "passed" if certificate.passed else "FAILED"
    console.print(f"certificate: {verdict}", style="bold")


def _table(certificate: Certificate) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(
        *("options", "at", "verified", "accepted", "p", "reached", "expected", "p"),
        box=box.SIMPLE,
        caption="at: tokens after the prompt; reached, expected: the share of first "
        "rounds that accept so many, and its theory",
    )
    for test in certificate.tests:
        for row in _rows(test):
            table.add_row(*row)
        table.add_section()
    return table


def _rows(test: OptionTest) -> Iterator[list[str]]:
    """One for each position, and one for all of them together."""

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    names = [test.options, f"  {test.samples} samples"]
    for position, depth in zip(test.positions, test.depths, strict=True):
        yield [
            names.pop(0) if names else "",
            *map(str, (position.position, position.verified, position.accepted)),
            shown(position.p_value),
            *map(shown, (depth.measured, depth.expected, depth.p_value)),
        ]
    if len(test.positions) > 1:
        yield ["", "all", "", "", shown(test.joint_p_value), "", "", ""]
