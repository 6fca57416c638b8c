"""Options that more than one verb has, and what they make."""

import argparse
from collections.abc import Callable
from typing import Any

from jaxspec.core.accept import RULES
from jaxspec.errors import UserError
from jaxspec.generator import Generator
from jaxspec.loading import load

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_DRAFT_TOKENS = 4
DEFAULT_RULE = "rejection"


def add_verb(
    subparsers: Any, run: Callable[[argparse.Namespace], int], name: str, **texts: str
) -> argparse.ArgumentParser:
    """Registers a verb; `texts` are its `help`, `description` and `epilog`."""
    parser = subparsers.add_parser(
        name, formatter_class=argparse.RawDescriptionHelpFormatter, **texts
    )
    parser.set_defaults(run=run)
    return parser


def add_drafting(parser: argparse.ArgumentParser) -> None:
    """The model, its drafter and k."""
    add = parser.add_argument
    add("--model", metavar="REF", default=DEFAULT_MODEL, help="(default: %(default)s)")
    drafter = parser.add_mutually_exclusive_group()
    drafter.add_argument(
        "--draft-model", metavar="REF", help="a smaller model of the same tokenizer"
    )
    drafter.add_argument(
        "--drafter",
        choices=("prompt-lookup", "none"),
        help="prompt-lookup copies from the text so far; none is plain decoding "
        "(default: prompt-lookup)",
    )
    add(
        "--draft-tokens",
        metavar="K",
        type=int,
        help=f"tokens drafted in a round (default: {DEFAULT_DRAFT_TOKENS})",
    )
    add(
        "--rule",
        choices=tuple(RULES),
        help="how drafts are accepted: rejection; block (more of them); coupled (the "
        "ids of plain decoding with the same seed); typical (LOSSY) "
        "(default: rejection)",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of weights and cache (default: %(default)s)",
    )


def make_generator(args: argparse.Namespace, **options: Any) -> Generator:
    """Loads what the options of `add_drafting` name.

    Raises:
        UserError: also for options that would have no effect.
    """
    if args.drafter == "none" and args.rule is not None:
        raise UserError("--rule has no effect with --drafter none; leave one out")
    draft_tokens = DEFAULT_DRAFT_TOKENS
    if args.draft_tokens is not None:
        draft_tokens = args.draft_tokens
        if args.drafter == "none":
            raise UserError(
                "--draft-tokens has no effect with --drafter none; leave one out"
            )
        if draft_tokens < 1:
            raise UserError(f"--draft-tokens is {draft_tokens}, expected 1 or more")
    target = load(args.model, args.dtype)
    if args.drafter == "none":
        drafter = None
    elif args.draft_model is not None:
        drafter = load(args.draft_model, args.dtype)
    else:
        drafter = "prompt-lookup"
    return Generator(
        target,
        drafter,
        draft_tokens=draft_tokens,
        rule=args.rule or DEFAULT_RULE,
        **options,
    )
