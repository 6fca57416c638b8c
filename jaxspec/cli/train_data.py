"""`jaxspec train data`: texts to learn from."""

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxspec.cli.options import DEFAULT_MODEL, add_verb
from jaxspec.cli.prompts import read_prompts, read_texts
from jaxspec.errors import UserError
from jaxspec.generator import Generator
from jaxspec.loading import LanguageModel, load
from jaxspec.progress import watching


def add_data(kinds: Any) -> None:
    """Registers `jaxspec train data`."""
    parser = add_verb(
        kinds,
        run_data,
        "data",
        help="let the model write texts to learn from",
        description="Lets the model write texts: answers to questions that it asks "
        "itself, or to given prompts. Or takes texts that are given.",
        epilog="examples:\n  jaxspec train data --out texts --tokens 300000\n"
        "  jaxspec train data --out own --tokens 50000 --writer draft\n",
    )
    add = parser.add_argument
    add("--model", metavar="REF", default=DEFAULT_MODEL, help="(default: %(default)s)")
    add("--out", metavar="DIR", required=True, help="where the texts go")
    add("--tokens", metavar="N", type=int, help="the least that it writes")
    add("--prompts", metavar="FILE", help="answer those of a JSONL file, all of them")
    add(
        "--texts",
        metavar="FILE",
        help='take the texts of a JSONL file, {"text": ...} or {"messages": ...} a '
        "line, as they are: of a chat the last answer is learned",
    )
    add(
        "--writer",
        metavar="DIR",
        help="let a draft of jaxspec train draft write the answers, to go on learning "
        "from what it says itself (train draft --from DIR)",
    )
    add("--chat", action="store_true", help="a prompt is what the user says in a chat")
    add(
        "--answer-tokens",
        metavar="N",
        type=int,
        default=256,
        help="the most of an answer (default: %(default)s)",
    )
    add(
        "--rows",
        metavar="N",
        type=int,
        default=16,
        help="texts at a time (default: %(default)s; a CPU gains nothing by more)",
    )
    add("--seed", metavar="S", type=int, default=0, help="(default: 0)")


def run_data(args: argparse.Namespace) -> int:
    """Runs `jaxspec train data`; returns the exit code.

    Raises:
        UserError: an option is wrong, or the folder holds other texts.
    """
    from jaxspec.checkpoints.cut_draft import cut_sha256
    from jaxspec.checkpoints.disk import content_sha256
    from jaxspec.checkpoints.hub import fetch
    from jaxspec.train.corpus import Corpus
    from jaxspec.train.given_texts import keep_texts
    from jaxspec.train.texts import Recipe, answer_prompts, write_texts

    given = [args.tokens, args.prompts, args.texts]
    if sum(each is not None for each in given) != 1:
        raise UserError("give one of --tokens, --prompts and --texts")
    if args.chat and args.prompts is None:
        raise UserError("--chat has no effect without --prompts; leave it out")
    if args.writer is not None and args.texts is not None:
        raise UserError("--writer has no effect with --texts; leave one out")
    refuse_below_one(args, ("tokens", "answer_tokens", "rows"))
    prompts = None if args.prompts is None else read_prompts(args.prompts, args.chat)
    texts = None if args.texts is None else read_texts(args.texts)
    model = load(args.model)
    writer = model if args.writer is None else load_draft(model, args.writer)
    recipe = Recipe(
        args.model,
        content_sha256(Path(fetch(args.model))),
        rows=args.rows,
        answer_tokens=args.answer_tokens,
        seed=args.seed,
        prompts=None if prompts is None else _hash(prompts),
        writer=None if args.writer is None else cut_sha256(args.writer),
        texts=None if texts is None else _hash(texts),
    )
    corpus = Corpus.create(args.out, recipe.to_json())
    if texts is not None:
        made = keep_texts(model, corpus, recipe.rows, texts)
        exhaust("texts", made, len(texts))
    elif prompts is not None:
        made = answer_prompts(Generator(writer), corpus, recipe, prompts)
        exhaust("prompts", made, len(prompts))
    else:
        asker = Generator(model)
        # One generator for both where it is one model: its programs are compiled once.
        answers = asker if writer is model else Generator(writer)
        made = write_texts(asker, answers, corpus, recipe, args.tokens)
        exhaust("tokens", made, args.tokens)
    return 0


def load_draft(target: LanguageModel, folder: str) -> LanguageModel:
    """A draft that was cut from the target, as a model that writes.

    Raises:
        UserError: the folder holds none.
    """
    from jaxspec.checkpoints.cut_draft import load_cut_model

    draft = load_cut_model(folder, target.decoder)
    return LanguageModel(folder, draft, target.tokenizer)  # pyright: ignore


def _hash(prompts: list) -> str:
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()


def refuse_below_one(args: argparse.Namespace, names: tuple[str, ...]) -> None:
    """Refuses numbers that are given and below 1."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            option = "--" + name.replace("_", "-")
            raise UserError(f"{option} is {value}, expected 1 or more")


def exhaust(title: str, made: Iterator[int], total: int) -> None:
    """Does a job of so many steps, with a bar on a terminal."""
    done = 0
    with watching(title, lambda: done, total, in_bytes=False):
        for done in made:  # noqa: B007
            pass
