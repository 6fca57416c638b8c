"""What a job's programs need on its slice, compiled in a process apart.

Run as `python -m jaxspec.tpu.compiled_job`, with a job as JSON on stdin, it compiles
and prints JSON; libtpu is loaded in that process alone.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

from jaxspec.core.dynamic_tree import DynamicTree
from jaxspec.errors import UserError
from jaxspec.job import Job
from jaxspec.models.config import ModelConfig
from jaxspec.models.presets import PRESETS, REFERENCES


def describe(reference: str) -> ModelConfig:
    """The config of a model, of which no weights are needed.

    Raises:
        UserError: it is no published model that is known here, and no file.
    """
    name = REFERENCES.get(reference, reference)
    if name in PRESETS:
        return PRESETS[name]
    from jaxspec.checkpoints.load import open_checkpoint

    if os.path.exists(reference):
        return open_checkpoint(reference).config
    known = ", ".join([*REFERENCES, *PRESETS])
    raise UserError(
        f"the shapes of {reference} are not known, expected a path or {known}"
    )


def compile_job(job: Job, live_tokens: int) -> dict[str, Any]:
    """What the compiler says of the job's programs, and of plain decoding.

    Args:
        job: with a topology.
        live_tokens: of each row, whose keys a round reads.

    Returns:
        by `speculative` and `plain`: sizes, steps and seconds, as JSON has them.

    Raises:
        UserError: libtpu is not there, or it cannot compile the job.
    """
    # The faults of a reference are told here, where they are one line.
    for reference in (job.model, job.draft_model):
        if reference is not None:
            describe(reference)
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "planning needs the TPU compiler: pip install 'jaxspec-decoding[tpu]'"
        )
    asked = {"job": dataclasses.asdict(job), "live_tokens": live_tokens}
    return json.loads(_compile_apart(asked))


def _compile_apart(asked: dict[str, Any]) -> str:
    from jaxspec.tpu.aot import ENVIRONMENT

    ended = subprocess.run(
        [sys.executable, "-m", __spec__.name if __spec__ else __name__],
        input=json.dumps(asked),
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    if ended.returncode == 2:
        raise UserError(ended.stderr.strip().splitlines()[-1])
    if ended.returncode:
        # Its warnings come first; what ended it is the last line.
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"the TPU compiler ended with {ended.returncode}: {last}")
    return ended.stdout


def _compile(job: Job, live_tokens: int) -> dict[str, Any]:
    from jaxspec.tpu.aot import setup

    drafter: Any = job.drafter or "prompt-lookup"
    if job.draft_model is not None:
        drafter = describe(job.draft_model)
    common: dict[str, Any] = {
        "batch": job.batch_size,
        "capacity": job.capacity,
        "mesh": job.mesh,
        "dtype": job.dtype,
        "live_tokens": live_tokens,
        "reference": job.model,
    }
    target, topology = describe(job.model), job.topology or ""
    speculative = setup(
        topology,
        target,
        None if drafter == "none" else drafter,
        draft_tokens=job.draft_tokens,
        tree=job.tree,
        rule=job.rule or "rejection",
        replicate_draft=job.replicate_draft,
        **common,
    )
    plain = setup(topology, target, None, **common)
    return {
        "speculative": _report(speculative)
        | {"prefill": _sizes(speculative.prefill())},
        "plain": _report(plain),
    }


def _report(made: Any) -> dict[str, Any]:
    drafter, rounds = made.generator.drafter, made.rounds()
    return _sizes(rounds) | {
        "nodes": drafter.nodes,
        "depth": drafter.depth,
        "steps": {name: vars(cost) for name, cost in rounds.steps.items()},
        "round_bytes": rounds.round_bytes,
        "floor_bytes": made.floor_bytes(),
        "state_bytes": made.state_bytes(),
    }


def _sizes(compiled: Any) -> dict[str, Any]:
    names = ("argument_bytes", "temporary_bytes", "output_bytes", "aliased_bytes")
    names += ("peak_bytes", "modules", "host_traffic", "compile_seconds")
    return {name: getattr(compiled, name) for name in names}


def main() -> int:
    """Compiles the job on stdin."""
    asked = json.load(sys.stdin)
    fields = asked["job"]
    tree = fields["tree"]
    tree = DynamicTree(**tree) if isinstance(tree, dict) else tree and tuple(tree)
    made = Job(**fields | {"mesh": tuple(fields["mesh"]), "tree": tree})
    try:
        print(json.dumps(_compile(made, asked["live_tokens"])))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
