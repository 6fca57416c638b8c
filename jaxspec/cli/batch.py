"""`jaxspec batch`: continues a file of prompts, on any slice, and loses nothing."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

from jaxspec.batch.inputs import Item, read_items
from jaxspec.batch.journal import Journal, open_journal
from jaxspec.batch.layout import Layout, hold_pin, is_merged, processes_of
from jaxspec.batch.merge import merge
from jaxspec.batch.place import Place, find_place, prepare_platform
from jaxspec.batch.runner import Runner
from jaxspec.cli.batch_job import check_seeds, job_of, pinned_values
from jaxspec.cli.batch_progress import follow, summary
from jaxspec.cli.options import (
    DEFAULT_DRAFTER,
    add_drafting,
    add_verb,
    make_generator,
)
from jaxspec.errors import UserError
from jaxspec.generator import Generator
from jaxspec.job import Job, parse_mesh, refuse_without

STOPPED = 128 + signal.SIGTERM
_EPILOG = """\
The input has one JSON object a line, as for `jaxspec generate --prompts`. The output
has one record a line, in the same order: index, prompt, text, token_ids, finish_reason
and stats; the record of a line that is wrong has an error, and the job goes on. The
exit code is 0 when all records are there, those of errors too.

A job that was stopped, however, goes on when it is started again: what is finished is
kept beside the output until all is. Over several processes each takes its share of the
prompts, unless the mesh is larger than what one of them has; then all run it together.

examples:
  jaxspec batch --input prompts.jsonl --output answers.jsonl --batch-size 16
  jaxspec batch tpu_configs/v5e-8.yaml --input gs://B/in.jsonl --output gs://B/out.jsonl
  jaxspec batch tpu_configs/v5e-8.yaml --platform cpu --model smollm2-135m-instruct \\
      --drafter auto --mesh 1x1 --input in.jsonl --output out.jsonl
  jaxspec batch JOB.yaml --merge --input in.jsonl --output out.jsonl
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Registers the subcommand `batch`."""
    parser = add_verb(
        subparsers,
        run,
        "batch",
        help="continue a file of prompts, resumed where it was stopped",
        description="Continues a file of prompts; a job that is stopped goes on later.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add(
        "job",
        metavar="JOB.yaml",
        nargs="?",
        help="flags down to --replicate-draft and the model, with _ for -, in a file",
    )
    add_drafting(parser)
    add("--input", metavar="FILE", help="JSONL, local or gs://")
    add("--output", metavar="FILE", help="JSONL, local or gs://")
    add("--chat", action="store_true", help="a text is what the user says in a chat")
    add("--max-new-tokens", metavar="N", type=int, help=_of("max_new_tokens"))
    add("--temperature", metavar="T", type=float, help=_of("temperature"))
    add("--seed", metavar="S", type=int, help=f"prompt i gets S + i; {_of('seed')}")
    add("--batch-size", metavar="B", type=int, help=f"rows; {_of('batch_size')}")
    add("--capacity", metavar="N", type=int, help=f"of a row; {_of('capacity')}")
    add(
        "--mesh",
        metavar="DATAxMODEL",
        type=_mesh,
        help="in how many parts rows and models are split (default: 1x1)",
    )
    add(
        "--replicate-draft",
        action="store_true",
        help="the drafter lies whole on each chip",
    )
    _add_processes(parser.add_argument_group("where it runs"))
    parser.set_defaults(model=None, drafter=None, dtype=None)
    return parser


def _add_processes(group: Any) -> None:
    add = group.add_argument
    add("--platform", choices=("cpu", "tpu", "gpu"), help="cpu rehearses a TPU's job")
    add("--distributed", action="store_true", help="join the processes of a TPU pod")
    add("--coordinator", metavar="HOST:PORT", help="join the processes that meet there")
    add("--num-processes", metavar="N", type=int, help="of the job")
    add("--process-id", metavar="I", type=int, help="this one, from 0")
    add(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=120.0,
        help="to wait for the other processes (default: 120)",
    )
    add("--merge", action="store_true", help="only join what all processes have done")


def _of(name: str) -> str:
    return f"(default: {getattr(Job, name)})"


def _mesh(text: str) -> tuple[int, int]:
    try:
        return parse_mesh(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Runs `jaxspec batch`; returns the exit code.

    Raises:
        UserError: a file, an option or the model is wrong, or a process stays away.
    """
    job = job_of(args)
    refuse_without(job, "input", "output")
    items = read_items(job.input or "", job.chat)
    check_seeds(job, len(items))
    pinned = pinned_values(job)
    if args.merge:
        return _join(job, args.num_processes, pinned, len(items))
    prepare_platform(args.platform, job)
    if asks_for_processes(args):
        from jaxspec.distributed import initialize

        initialize(
            args.coordinator,
            args.num_processes,
            args.process_id,
            timeout=args.timeout,
        )
    place = find_place(job, args.platform)
    if place.decide(lambda: is_merged(job.output or "", place.shards, pinned)):
        print(f"jaxspec: {job.output} is finished", file=sys.stderr)
        return 0
    return _continue(job, items, pinned, place)


def asks_for_processes(args: argparse.Namespace) -> bool:
    """Whether several processes are to be joined: never without being asked."""
    named = (args.coordinator, args.num_processes, args.process_id)
    return args.distributed or any(each is not None for each in named)


def _continue(job: Job, items: list[Item], pinned: dict[str, Any], place: Place) -> int:
    """Does what is left of this process's share."""
    output, own = (
        job.output or "",
        [item for item in items if item.index % place.shards == place.shard],
    )

    def open_own() -> Journal:
        return open_journal(output, place.shard, place.shards, pinned)

    try:
        with _stoppable():
            # Before anything is written: a model that cannot be had begins no job.
            generator = _generator(job, place)
            with place.journal(open_own) as journal:
                done = place.agreed(journal.done, len(items))
                todo = [item for item in own if item.index not in done]
                for record in _records(job, generator, todo, len(own), place):
                    journal.append(record)
    except _Stopped:
        print("jaxspec: stopped; start it again to go on", file=sys.stderr)
        return STOPPED
    return _merge(job, place.shards, len(items)) if place.is_last_to_end() else 0


def _generator(job: Job, place: Place) -> Generator:
    names = ("model", "draft_model", "drafter", "draft_tokens", "tree", "rule", "dtype")
    named = argparse.Namespace(**{name: getattr(job, name) for name in names})
    if job.draft_model is not None:
        named.drafter = DEFAULT_DRAFTER
    return make_generator(named, place.partition, capacity=job.capacity)


def _records(
    job: Job, generator: Generator, todo: list[Item], total: int, place: Place
) -> Iterator[dict[str, Any]]:
    if not todo:
        return
    runner = Runner(
        generator,
        generator.whole_rows(job.batch_size),
        job.seed,
        max_new_tokens=job.max_new_tokens,
        temperature=job.temperature,
    )
    yield from follow(runner, todo, total, is_shown=place.writes)


def _join(
    job: Job, processes: int | None, pinned: dict[str, Any], expected: int
) -> int:
    """Joins what the processes of this job have done, if it is this job's."""
    begun = processes_of(job.output or "")
    asked = begun if processes is None else processes
    hold_pin(Layout(job.output or ""), asked, pinned)
    return _merge(job, asked, expected)


def _merge(job: Job, processes: int, expected: int) -> int:
    merge(job.output or "", processes, expected)
    print(f"jaxspec: {summary(job.output or '')}", file=sys.stderr)
    return 0


class _Stopped(BaseException):
    """The job was asked to stop: no error, which others would catch and report."""


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Meanwhile SIGTERM, as of a preemption, ends the work and not the process."""

    def stop(number: int, frame: Any) -> None:
        # Once is enough: what is being written is to be finished.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
