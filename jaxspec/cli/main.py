"""The `jaxspec` command: finds the verb, runs it, says what went wrong on one line."""

import argparse
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxspec.cli import batch, certify, demo, fetch, generate, plan, train
from jaxspec.errors import UserError

_EPILOG = """\
examples:
  jaxspec demo
  jaxspec generate --model smollm2-135m-instruct --drafter prompt-lookup \\
      --prompt "The capital of France is"
  jaxspec fetch --list
"""


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong on one line."""

    def error(self, message: str) -> NoReturn:
        """Exits with code 2; the usage is left to `--help`."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    parser = Parser(
        prog="jaxspec",
        description="Exact speculative decoding in JAX.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in (demo, generate, batch, plan, certify, train, fetch):
        verb.add_parser(verbs)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code, 2 for a user's mistake."""
    args = build_parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return args.run(args)
    except UserError as error:
        print(f"jaxspec: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader went away, as `head` does: nobody is left to tell.
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print("jaxspec: interrupted", file=sys.stderr)
        return 130


def _show_warning(message: Warning | str, *where: Any) -> None:
    """A warning is for the user: where in the code it was raised is not."""
    print(f"jaxspec: warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
