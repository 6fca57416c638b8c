"""`jaxspec train`: texts that a model wrote, and drafters that learn from them."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxspec.cli.options import DEFAULT_MODEL, add_verb
from jaxspec.cli.train_data import add_data, exhaust, refuse_below_one
from jaxspec.errors import UserError
from jaxspec.loading import load

_EPILOG = """\
First the model writes texts, then a drafter learns to guess them. Each command goes on
where it was interrupted, with the same result.

examples:
  jaxspec train data --out texts --tokens 300000
  jaxspec train eagle --data texts --out head --steps 2000
  jaxspec generate --drafter eagle:head --prompt "The capital of France is"
  jaxspec train early-exit --data texts --out adapter --layers 15
  jaxspec generate --drafter early-exit:adapter --prompt "1, 2, 3"
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Registers the subcommand `train`."""
    parser = subparsers.add_parser(
        "train",
        help="train a drafter",
        description="Trains drafters on what the model itself writes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    add_data(kinds)
    for kind in _HEADS:
        _add_head(kinds, kind)
    return parser


_NUMBERS = {
    "steps": (1000, "batches to learn from"),
    "batch_size": (8, "texts of a batch"),
    "longest": (512, "what a text has past so many tokens is left out"),
    "depth": (4, "guesses in a row"),
    "draft_vocabulary": (4096, "how many of the commonest ids it drafts"),
    "check_every": (100, "steps between checkpoints, and measures held out"),
}
# What it trains, and its learning rate: a few numbers of each step for a larger head.
_HEADS = {
    "eagle": ("an EAGLE-3 head, in its authors' layout", 3e-3),
    "medusa": ("Medusa heads that share the model's vocabulary head", 1e-3),
    "early-exit": ("an adapter for an exit after some of the model's layers", 1e-3),
    "draft": ("a small model cut from the model: some of its own layers", 3e-4),
}
# What a kind cannot do without, for the example of its help.
_NEEDED = {"early-exit": " --layers 15", "draft": " --layers 0,29"}


def _add_head(kinds: Any, kind: str) -> None:
    what, _ = _HEADS[kind]
    needed = _NEEDED.get(kind, "")
    parser = add_verb(
        kinds,
        run_head,
        kind,
        help=f"train {what.split(',')[0]}",
        description=f"Trains {what}, on texts of `jaxspec train data`.",
        epilog=f"example:\n  jaxspec train {kind} --data texts --out head{needed}\n",
    )
    add = parser.add_argument
    add("--model", metavar="REF", default=DEFAULT_MODEL, help="(default: %(default)s)")
    add("--data", metavar="DIR", required=True, help="of jaxspec train data")
    add("--out", metavar="DIR", required=True, help="where the head goes")
    for name, (default, text) in _NUMBERS.items():
        add(
            "--" + name.replace("_", "-"),
            metavar="N",
            type=int,
            default=default,
            help=f"{text} (default: %(default)s)",
        )
    add("--plot", action="store_true", help="draw the curves of the training")
    add(
        "--from",
        metavar="DIR",
        dest="start",
        help="go on from a trained one, with the ids commonest in these texts",
    )
    _add_shape(add, kind)
    _add_learning(add, kind)


def _add_shape(add: Any, kind: str) -> None:
    if kind == "eagle":
        add("--inner", metavar="N", type=int, help="width of its MLP (the model's)")
    if kind == "early-exit":
        add("--layers", metavar="N", type=int, required=True, help="before the exit")
    if kind == "draft":
        add(
            "--layers",
            metavar="LIST",
            type=layer_list,
            dest="cut",
            required=True,
            help="those of the model that it begins as, counted from 0, such as 0,29",
        )


def _add_learning(add: Any, kind: str) -> None:
    add("--seed", metavar="S", type=int, default=0, help="(default: 0)")
    add(
        "--loss",
        choices=("forward-kl", "reverse-kl", "total-variation"),
        default="forward-kl",
        help="between the model's distribution and its own (default: %(default)s)",
    )
    add(
        "--optimizer",
        choices=("adamw", "muon"),
        default="adamw",
        help="muon learns more of few texts, in longer steps (default: %(default)s)",
    )
    add(
        "--learning-rate",
        metavar="R",
        type=float,
        default=_HEADS[kind][1],
        help="at its height (default: %(default)s)",
    )


def layer_list(text: str) -> tuple[int, ...]:
    """Parses `--layers 0,29`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"'{text}' is no list of layers such as 0,29"
        ) from None


def run_head(args: argparse.Namespace) -> int:
    """Runs `jaxspec train` for a kind of drafter; returns the exit code.

    Raises:
        UserError: an option is wrong, or the folders are of another training.
    """
    from jaxspec.checkpoints.disk import content_sha256
    from jaxspec.checkpoints.hub import fetch
    from jaxspec.pictures import require_matplotlib
    from jaxspec.train.capture import read_states
    from jaxspec.train.corpus import Corpus
    from jaxspec.train.curves import draw_curves
    from jaxspec.train.heads import Training
    from jaxspec.train.recipe import HeadRecipe
    from jaxspec.train.trainer import Settings

    own = {name: getattr(args, name, None) for name in ("inner", "layers")}
    refuse_below_one(
        args, (*_NUMBERS, *(name for name in own if own[name] is not None))
    )
    if not 0 < args.learning_rate < 1:
        raise UserError(
            f"--learning-rate is {args.learning_rate}, expected a number from 0 to 1"
        )
    if args.plot:
        require_matplotlib()
    corpus = Corpus.open(args.data)
    path = Path(fetch(args.model))
    corpus.refuse_other(args.model, content_sha256(path))
    target = load(args.model)
    recipe = HeadRecipe(
        args.kind,
        rows=args.batch_size,
        longest=args.longest,
        depth=args.depth,
        draft_vocabulary=args.draft_vocabulary,
        cut=getattr(args, "cut", ()),
        start=args.start,
        loss=args.loss,
        seed=args.seed,
        **own,
    )
    settings = Settings(
        args.steps,
        method=args.optimizer,
        learning_rate=args.learning_rate,
        check_every=args.check_every,
    )
    folder = Path(args.out)
    training = Training.begin(target, corpus, recipe, settings, folder)
    reading = read_states(target.decoder, corpus, recipe.taps(target.decoder))
    exhaust("parts read", reading, len(corpus))
    show(training.run(), args.steps)
    if args.plot:
        print(draw_curves(folder), file=sys.stderr)
    return 0


def show(training: Iterator[Any], steps: int) -> None:
    """Follows a training: a bar on a terminal, and a line for each check."""
    from rich import console, progress

    where = console.Console(stderr=True)
    columns = (
        *(progress.BarColumn(), progress.MofNCompleteColumn()),
        *(progress.TimeElapsedColumn(), progress.TimeRemainingColumn()),
        progress.TextColumn("{task.description}"),
    )
    with progress.Progress(
        *columns, console=where, disable=not where.is_terminal, transient=True
    ) as bar:
        task = bar.add_task("", total=steps)
        for made in training:
            bar.update(task, completed=made.step, description=_described(made))
            if made.held_out is not None:
                where.print(_checked(made), highlight=False, soft_wrap=True)


def _described(made: Any) -> str:
    accuracy = " ".join(f"{value:.2f}" for value in made.measures.accuracy)
    return f"loss {made.loss:.3f}, right {accuracy}, {made.tokens_per_second:.0f} tok/s"


def _checked(made: Any) -> str:
    held_out = made.held_out
    accuracy = " ".join(f"{value:.2f}" for value in held_out.accuracy)
    return (
        f"step {made.step}: loss {made.loss:.3f}, held out: right {accuracy}, tokens "
        f"per round {held_out.greedy_tokens_per_round:.2f} greedy, "
        f"{held_out.sampled_tokens_per_round:.2f} at temperature 1"
    )
