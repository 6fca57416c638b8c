"""`jaxspec generate`: continues prompts."""

import argparse
import json
import pathlib
from typing import Any

from jaxspec.cli.options import add_drafting, add_verb, make_generator
from jaxspec.errors import UserError, refuse
from jaxspec.generator import check_batch_size
from jaxspec.progress import watching
from jaxspec.requests import Prompt, check_options
from jaxspec.results import Result

_EPILOG = """\
A prompt file has one JSON object a line: {"prompt": TEXT}, {"prompt": [IDS]} or
{"messages": [{"role": "user", "content": TEXT}, ...]}.

With --json each prompt gives one object on a line of its own: prompt, text,
token_ids, finish_reason (eos or length) and stats; nothing else is on stdout.

examples:
  jaxspec generate --prompt "The capital of France is" --max-new-tokens 16
  jaxspec generate --chat --prompt "Write a haiku." --temperature 0.8 --top-p 0.95
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
    add("--temperature", metavar="T", type=float, default=0.0, help="0: greedy")
    add("--top-p", metavar="P", type=float, help="keep the likeliest that reach P")
    add("--top-k", metavar="K", type=int, help="keep the K likeliest; 0 keeps all")
    add("--min-p", metavar="P", type=float, help="keep those P times the likeliest")
    add("--seed", metavar="S", type=int, default=0, help="prompt i gets S + i")
    add("--batch-size", metavar="B", type=int, help="prompts at a time (default: all)")
    add("--capacity", metavar="N", type=int, help="the most tokens of a row")
    add("--json", action="store_true", help="one JSON object a prompt")
    return parser


def run(args: argparse.Namespace) -> int:
    """Runs `jaxspec generate`; returns the exit code.

    Raises:
        UserError: a prompt or an option is wrong, or the model cannot be had.
    """
    prompts = _read_prompts(args)
    options = {
        name: getattr(args, name)
        for name in ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
    }
    # What needs no model is refused before one is fetched.
    check_options(len(prompts), **options)
    check_batch_size(args.batch_size)
    generator = make_generator(args, capacity=args.capacity)
    results = generator.iterate(prompts, batch_size=args.batch_size, **options)
    shown = 0
    with watching("prompts", lambda: shown, len(prompts), in_bytes=False):
        for result in results:
            _show(result, args.json)
            shown += 1
    return 0


def _show(result: Result, as_json: bool) -> None:
    """On stdout, at once: the reader may be another program."""
    line = json.dumps(result.to_json()) if as_json else result.text
    print(line, flush=True)


def _read_prompts(args: argparse.Namespace) -> list[Prompt]:
    if args.prompt is not None:
        return [_as_chat(args.prompt) if args.chat else args.prompt]
    path = pathlib.Path(args.prompts)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(f"{path}: {reason}; expected a JSONL file of prompts") from None
    faults: list[str] = []
    prompts = [
        _parse_line(line, f"{path} line {number}", args.chat, faults)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    refuse(faults)
    if not prompts:
        raise UserError(f"{path}: no prompts; expected one JSON object a line")
    return prompts


def _parse_line(line: str, where: str, chat: bool, faults: list[str]) -> Prompt:
    """The prompt of a line; a fault is noted with the line's number."""
    try:
        record = json.loads(line)
    except ValueError as error:
        faults.append(f"{where}: not JSON ({error})")
        return ""
    if isinstance(record, dict):
        prompt, messages = record.get("prompt"), record.get("messages")
        if isinstance(prompt, str):
            return _as_chat(prompt) if chat else prompt
        for given in (prompt, messages):
            if isinstance(given, list):
                return given
    faults.append(f'{where}: expected an object with "prompt" or "messages"')
    return ""


def _as_chat(text: str) -> Prompt:
    return [{"role": "user", "content": text}]
