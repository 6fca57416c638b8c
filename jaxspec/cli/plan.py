"""`jaxspec plan`: whether a job fits its TPU slice, and how fast it would be."""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from jaxspec.cli.options import add_verb
from jaxspec.errors import UserError
from jaxspec.job import Job, read_job, refuse_without
from jaxspec.pictures import check_picture
from jaxspec.progress import watching
from jaxspec.tpu.chips import chip_of, meshes_of
from jaxspec.tpu.compiled_job import compile_job
from jaxspec.tpu.plan import Plan, make_plan

_EPILOG = """\
The job is compiled for its slice on this machine, which needs the [tpu] extra and no
TPU. The first time takes some minutes, of a large model twenty; what was compiled is
kept. All rates are predicted from the compiled program and the chip's data sheet, not
measured.

With --json one object is printed: fits, chip, chips, hbm_bytes_per_chip,
hbm_capacity_bytes, bytes_per_round, floor_bytes_per_round, round_seconds,
tokens_per_second (by acceptance rate), plain_tokens_per_second, speedup,
best_draft_tokens, compile_seconds. The exit code is 1 if the job does not fit.

examples:
  jaxspec plan tpu_configs/v5e-8.yaml
  jaxspec plan tpu_configs/v5p-32.yaml --live-tokens 4096 --json
  jaxspec plan tpu_configs/v5e-1.yaml --plot plan.png
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Registers the subcommand `plan`."""
    parser = add_verb(
        subparsers,
        run,
        "plan",
        help="whether a job fits its TPU slice, and how fast it would be",
        description="Compiles a job for its TPU slice and predicts its speed.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("job", metavar="JOB.yaml", help="a job with a topology, as in tpu_configs/")
    add(
        "--live-tokens",
        metavar="N",
        type=int,
        help="tokens of each row in the rounds planned (default: half the capacity)",
    )
    add("--json", action="store_true", help="one JSON object")
    add("--plot", metavar="FILE", help="draw it: .png, .svg or .pdf")
    return parser


def run(args: argparse.Namespace) -> int:
    """Runs `jaxspec plan`; returns the exit code.

    Raises:
        UserError: the job is wrong, or cannot be compiled.
    """
    job = read_job(args.job)
    refuse_without(job, "topology")
    topology = job.topology or ""
    chip_of(topology)
    used = meshes_of(topology, job.mesh) * math.prod(job.mesh)
    live = job.capacity // 2 if args.live_tokens is None else args.live_tokens
    if not 1 <= live <= job.capacity:
        raise UserError(
            f"--live-tokens is {live}, expected 1 to the capacity, {job.capacity}"
        )
    if args.plot:
        check_picture(Path(args.plot))
    with watching("compiling", lambda: 0, None, in_bytes=False):
        plan = make_plan(job, compile_job(job, live))
    print(json.dumps(plan.to_json()) if args.json else described(job, plan, live))
    if used < plan.chips:
        print(f"jaxspec: {plan.chips - used} chips idle", file=sys.stderr)
    if args.plot:
        from jaxspec.tpu.picture import draw_plan

        draw_plan(job, plan, Path(args.plot))
        print(f"jaxspec: drawn to {args.plot}", file=sys.stderr)
    return 0 if plan.fits else 1


def described(job: Job, plan: Plan, live_tokens: int) -> str:
    """The plan in lines."""
    used, most = plan.hbm_bytes_per_chip / 1e9, plan.hbm_capacity_bytes / 1e9
    ratio = plan.bytes_per_round / plan.floor_bytes_per_round
    lines = [
        f"{job.model} with {job.drafting} on {job.topology}: {plan.chips} chips, mesh "
        f"{job.mesh[0]}x{job.mesh[1]}, {job.batch_size} rows of {live_tokens} tokens",
        f"memory   {used:.1f} of {most:.0f} GB a chip: "
        f"{'fits' if plan.fits else 'DOES NOT FIT'}",
        f"traffic  {plan.bytes_per_round / 1e6:.0f} MB a round and chip, {ratio:.2f} "
        f"times the floor of {plan.floor_bytes_per_round / 1e6:.0f} MB",
        f"round    {_milliseconds(plan.step_seconds)}",
        f"plain    {_milliseconds(plan.plain_step_seconds)}, "
        f"{plan.plain_tokens_per_second:.0f} tokens/s",
        "predicted from the compiled program, not measured:",
        "acceptance  tokens/s  speedup  best depth of the draft",
    ]
    lines += [
        f"{alpha:>10}  {rate:8.0f}  {plan.speedup[alpha]:7.2f}  "
        f"{plan.best_draft_tokens[alpha]:>4}"
        for alpha, rate in plan.tokens_per_second.items()
    ]
    return "\n".join(lines)


def _milliseconds(steps: dict[str, float]) -> str:
    parts = ", ".join(f"{name} {1e3 * s:.2f}" for name, s in steps.items() if s)
    return f"{1e3 * sum(steps.values()):.2f} ms ({parts})"
