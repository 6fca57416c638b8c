"""`jaxspec demo`: one prompt with and without speculation, and what it gained."""

import argparse
from collections.abc import Mapping
from typing import Any

from jaxspec.cli.options import DEFAULT_MODEL, add_verb
from jaxspec.generator import Generator
from jaxspec.loading import LanguageModel, load
from jaxspec.results import Result
from jaxspec.row_options import check_options
from jaxspec.shipped import AUTO, best

# An answer that repeats its question: what prompt lookup is for.
PROMPT = """\
Repeat the following text exactly, word for word:

Ada opened the notebook. Ada wrote a program for a machine that was not built yet.
The machine was never finished. The program was right, and Ada knew it.
"""
DRAFT_TOKENS = 7
PLAIN = "plain decoding"

_EPILOG = """\
examples:
  jaxspec demo
  jaxspec demo --prompt "List the planets, then list them again." --max-new-tokens 200
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Registers the subcommand `demo`."""
    parser = add_verb(
        subparsers,
        run,
        "demo",
        help="see speculation at work on a small model",
        description="Fetches SmolLM2 (98 MB) if it is not here yet, answers a prompt "
        "with and without speculation, and shows the accepted draft tokens in colour.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("--prompt", metavar="TEXT", default=PROMPT, help="what the user says")
    add("--max-new-tokens", metavar="N", type=int, default=96, help="(default: 96)")
    return parser


def run(args: argparse.Namespace) -> int:
    """Runs `jaxspec demo`; returns the exit code.

    Raises:
        UserError: the model cannot be had, or an option is wrong.
    """
    from rich.console import Console

    check_options(1, max_new_tokens=args.max_new_tokens)
    console, notes = Console(highlight=False), Console(stderr=True)
    model = load(DEFAULT_MODEL)
    trained = best(DEFAULT_MODEL).kind
    generators = {
        PLAIN: Generator(model),
        "prompt lookup": Generator(model, "prompt-lookup", draft_tokens=DRAFT_TOKENS),
        trained: Generator(model, AUTO),
    }
    chat = [{"role": "user", "content": args.prompt}]
    options = {"max_new_tokens": args.max_new_tokens}
    with notes.status("compiling and generating ..."):
        # Once to compile; what is shown and timed is the second run.
        for generator in generators.values():
            generator.generate(chat, **options)
        results = {
            name: generator.generate(chat, **options)
            for name, generator in generators.items()
        }
    console.print(coloured(model, results[trained]))
    console.print(summary(results))
    return 0


def coloured(model: LanguageModel, result: Result) -> Any:
    """The text, accepted draft tokens in colour."""
    from rich.text import Text

    assert model.tokenizer is not None
    decoder, text = model.tokenizer.stream_decoder(), Text()
    for token, drafted in zip(result.token_ids, result.from_draft, strict=True):
        text.append(decoder.push([token]), style="bold green" if drafted else "")
    return text.append(decoder.flush())


def summary(results: Mapping[str, Result]) -> Any:
    """A table of what the runs did, that of plain decoding among them."""
    from rich.table import Table

    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    def same(result: Result) -> str:
        return "yes" if result.token_ids == results[PLAIN].token_ids else "NO"

    table = Table("", *results)
    runs = [result.stats for result in results.values()]
    rows = {
        "tokens/s": [shown(each.tokens_per_second, ".1f") for each in runs],
        "tokens per round": [shown(each.tokens_per_round, ".2f") for each in runs],
        "acceptance rate": [shown(each.acceptance_rate, ".0%") for each in runs],
        "same tokens": [same(result) for result in results.values()],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table
