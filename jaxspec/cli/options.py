"""Options that more than one verb has, and what they make."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from jaxspec.arguments import check_pairing, find_rule, find_tree, parse_tree
from jaxspec.core.accept import RULES
from jaxspec.core.dynamic_tree import DynamicTree
from jaxspec.drafter_names import DEFAULT_DRAFT_TOKENS, check_name
from jaxspec.errors import UserError
from jaxspec.generator import Generator
from jaxspec.loading import load
from jaxspec.sharding import Partition
from jaxspec.shipped import AUTO, best

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_DRAFTER = "prompt-lookup"
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
    """The model, its drafter and k; defaults may be replaced by `set_defaults`."""
    add = parser.add_argument
    add("--model", metavar="REF", default=DEFAULT_MODEL, help=_default(DEFAULT_MODEL))
    drafter = parser.add_mutually_exclusive_group()
    drafter.add_argument(
        "--draft-model", metavar="REF", help="a smaller model of the same tokenizer"
    )
    drafter.add_argument(
        "--drafter",
        metavar="NAME",
        default=DEFAULT_DRAFTER,
        help="auto is the best that comes with jaxspec for the model; prompt-lookup "
        "copies from the text so far; early-exit:N drafts with the "
        "model's own first N layers (a model not trained for it accepts little), "
        "early-exit:PATH with an adapter that was trained for it; "
        "medusa:PATH with heads that were trained for it, each for one of the next "
        "tokens; eagle:PATH with an EAGLE-1, 2 or 3 head, which reads the model's "
        "hidden states and accepts most; draft:PATH with a small model cut from the "
        "model by jaxspec train; none is plain decoding " + _default(DEFAULT_DRAFTER),
    )
    add(
        "--draft-tokens",
        metavar="K",
        type=int,
        help=f"tokens drafted in a round (default: {DEFAULT_DRAFT_TOKENS}; of medusa "
        "all heads, of auto the shape that was measured best)",
    )
    add(
        "--tree",
        metavar="TREE",
        type=_tree,
        help="draft a tree: 4,2,1 is 4 first tokens, 2 more after each, 1 after each "
        "of those; dynamic:depth=5,topk=4,nodes=16 chooses the likeliest nodes in each "
        "round (with --draft-model or eagle); with --draft-model, early-exit, medusa "
        "or eagle",
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
        help="of weights and cache " + _default("float32"),
    )


def _default(value: str) -> str:
    return f"(default: {value})"


def _tree(text: str) -> tuple[int, ...] | DynamicTree:
    try:
        return parse_tree(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def make_generator(
    args: argparse.Namespace, partition: Partition | None = None, **options: Any
) -> Generator:
    """Loads what the options of `add_drafting` name, over a mesh if there is one.

    Raises:
        UserError: also for options that would have no effect.
    """
    if args.drafter == "none" and args.rule is not None:
        raise UserError("--rule has no effect with --drafter none; leave one out")
    if args.draft_tokens is not None:
        if args.drafter == "none":
            raise UserError(
                "--draft-tokens has no effect with --drafter none; leave one out"
            )
        if args.draft_tokens < 1:
            raise UserError(
                f"--draft-tokens is {args.draft_tokens}, expected 1 or more"
            )
    if args.tree is not None:
        if args.draft_tokens is not None:
            raise UserError("--draft-tokens and --tree are both given; leave one out")
        rule = find_rule(args.rule or DEFAULT_RULE)
        check_pairing(rule, find_tree(args.tree))
    if args.drafter == "none" and args.tree is not None:
        raise UserError("--tree has no effect with --drafter none; leave one out")
    if args.drafter == AUTO:
        check_name(best(args.model).name, args.tree)
    elif args.draft_model is None and args.drafter != "none":
        check_name(args.drafter, args.tree)
    target = load(args.model, args.dtype, partition)
    if args.drafter == "none":
        drafter = None
    elif args.draft_model is not None:
        drafter = load(args.draft_model, args.dtype, partition, draft=True)
    else:
        drafter = args.drafter
    generator = Generator(
        target,
        drafter,
        draft_tokens=args.draft_tokens,
        tree=args.tree,
        rule=args.rule or DEFAULT_RULE,
        **options,
    )
    if generator.drafter.taps:
        # Two ways to count them are in use: a wrong one shows here.
        taps = ", ".join(map(str, generator.drafter.taps))
        print(
            f"jaxspec: {args.drafter} reads the outputs of blocks {taps} (of 0 to "
            f"{target.decoder.config.num_layers - 1})",
            file=sys.stderr,
        )
    return generator
