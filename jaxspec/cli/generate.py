"""`jaxspec generate`: continues prompts."""

import argparse
import json
import sys
from typing import Any

from jaxspec.arguments import check_call
from jaxspec.cli.options import add_drafting, add_verb, make_generator
from jaxspec.cli.prompts import read_prompts
from jaxspec.errors import UserError
from jaxspec.progress import watching
from jaxspec.prompt_records import as_chat
from jaxspec.requests import Prompt
from jaxspec.results import Result
from jaxspec.row_options import OPTIONS, check_options

_EPILOG = """\
A prompt file has one JSON object a line: {"prompt": TEXT}, {"prompt": [IDS]} or
{"messages": [{"role": "user", "content": TEXT}, ...]}.

With --json each prompt gives one object on a line of its own: prompt, text,
token_ids, finish_reason (eos, stop, length or error), stats and, with --log-probs,
log_probs; nothing else is on stdout. If a row ends in error the exit code is 1.

examples:
  jaxspec generate --prompt "The capital of France is" --max-new-tokens 16
  jaxspec generate --chat --prompt "Write a haiku." --temperature 0.8 --top-p 0.95
  jaxspec generate --prompt "1, 2, 3" --stop 20 --stop END --frequency-penalty 0.2
  jaxspec generate --prompt "Once" --temperature 1 --rule coupled --log-probs 3 --json
  jaxspec generate --model qwen2.5-coder-1.5b-instruct \\
      --draft-model qwen2.5-coder-0.5b-instruct --draft-tokens 4 \\
      --prompts prompts.jsonl --batch-size 10 --json
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Registers the subcommand `generate`."""
    parser = add_verb(
        subparsers,
        run,
        "generate",
        help="continue prompts",
        description="Continues prompts, exactly as the model alone would, but faster.",
        epilog=_EPILOG,
    )
    add_drafting(parser)
    add = parser.add_argument
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", metavar="TEXT", help="one prompt")
    given.add_argument("--prompts", metavar="FILE", help="a JSONL file of prompts")
    add("--chat", action="store_true", help="a text is what the user says in a chat")
    add("--max-new-tokens", metavar="N", type=int, default=128, help="(default: 128)")
    add("--min-new-tokens", metavar="N", type=int, help="nothing ends a row before")
    add("--seed", metavar="S", type=int, default=0, help="prompt i gets S + i")
    add("--batch-size", metavar="B", type=int, help="prompts at a time (default: all)")
    add("--capacity", metavar="N", type=int, help="the most tokens of a row")
    add("--json", action="store_true", help="one JSON object a prompt")
    add("--log-probs", metavar="N", type=int, help="report them, and N alternatives")
    _add_sampling(parser.add_argument_group("sampling"))
    _add_stopping(parser.add_argument_group("stopping"))
    return parser


def _add_sampling(group: Any) -> None:
    add = group.add_argument
    add("--temperature", metavar="T", type=float, default=0.0, help="0: greedy")
    add("--top-p", metavar="P", type=float, help="keep the likeliest that reach P")
    add("--top-k", metavar="K", type=int, help="keep the K likeliest; 0 keeps all")
    add("--min-p", metavar="P", type=float, help="keep those P times the likeliest")
    add(
        "--repetition-penalty",
        metavar="R",
        type=float,
        help="over 1: ids of prompt and output become less likely",
    )
    add(
        "--presence-penalty",
        metavar="A",
        type=float,
        help="taken from the logits of ids in the output",
    )
    add(
        "--frequency-penalty",
        metavar="A",
        type=float,
        help="the same, for each time that they stand there",
    )
    add(
        "--logit-bias",
        metavar="ID=BIAS",
        type=_bias,
        action="append",
        help="added to the logit of an id; -inf rules it out; may be repeated",
    )
    add(
        "--ban-ids",
        dest="banned_sequences",
        metavar="ID[,ID...]",
        type=_ids,
        action="append",
        help="a sequence that is never written; may be repeated",
    )


def _add_stopping(group: Any) -> None:
    add = group.add_argument
    add(
        "--stop",
        metavar="TEXT",
        action="append",
        help="the text ends before it; may be repeated",
    )
    add("--include-stop", action="store_true", help="leave the stop text in")
    add(
        "--stop-ids",
        dest="stop_sequences",
        metavar="ID[,ID...]",
        type=_ids,
        action="append",
        help="a row ends with this sequence; may be repeated",
    )


def _ids(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of ids, such as 13 or 13,198"
        ) from None


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no id and bias, such as 13=-2.5"
        ) from None


def _join(pairs: list[tuple[int, float]] | None) -> dict[int, float] | None:
    """One mapping of the biases given."""
    if pairs is None:
        return None
    joined = dict(pairs)
    if len(joined) < len(pairs):
        raise UserError("--logit-bias names an id more than once; give it one bias")
    return joined


def run(args: argparse.Namespace) -> int:
    """Runs `jaxspec generate`; returns the exit code.

    Raises:
        UserError: a prompt or an option is wrong, or the model cannot be had.
    """
    prompts = _prompts(args)
    if args.include_stop and not args.stop:
        raise UserError("--include-stop has no effect without --stop; leave it out")
    if args.log_probs is not None and not args.json:
        raise UserError("--log-probs are shown with --json only; add it")
    options = {name: getattr(args, name) for name in OPTIONS if name != "logit_bias"}
    options["logit_bias"] = _join(args.logit_bias)
    calling = {"batch_size": args.batch_size, "log_probs": args.log_probs}
    # What needs no model is refused before one is fetched.
    check_options(len(prompts), **options)
    check_call(**calling)
    generator = make_generator(args, capacity=args.capacity)
    results = generator.iterate(
        prompts, include_stop=args.include_stop, **calling, **options
    )
    shown = failed = 0
    with watching("prompts", lambda: shown, len(prompts), in_bytes=False):
        for result in results:
            _show(result, args.json)
            failed += _warn(result, shown)
            shown += 1
    return 1 if failed else 0


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    if args.prompts is not None:
        return read_prompts(args.prompts, args.chat)
    return [as_chat(args.prompt) if args.chat else args.prompt]


def _warn(result: Result, index: int) -> bool:
    """Says on stderr that a row ended in error; whether it did."""
    failed = result.finish_reason == "error"
    if failed:
        print(
            f"jaxspec: prompt {index} ended in error after {len(result.token_ids)} "
            "tokens: the target has no distribution for the next (its logits are not "
            "numbers, or the options rule every id out)",
            file=sys.stderr,
        )
    return failed


def _show(result: Result, as_json: bool) -> None:
    """On stdout, at once: the reader may be another program."""
    line = json.dumps(result.to_json()) if as_json else result.text
    print(line, flush=True)
