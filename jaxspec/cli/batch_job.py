"""The job of a call of `jaxspec batch`: its file, and the flags in their place."""

import argparse
import dataclasses
from typing import Any

from jaxspec.batch.inputs import digest
from jaxspec.cli.options import DEFAULT_DRAFTER, DEFAULT_MODEL
from jaxspec.errors import UserError, refuse
from jaxspec.job import Job, read_job
from jaxspec.row_options import check_options

_FIELDS = dataclasses.fields(Job)
# Of a job, what its records do not depend on.
_ELSEWHERE = ("input", "output", "topology", "replicate_draft")


def job_of(args: argparse.Namespace) -> Job:
    """The job of the YAML file, if one is given, with the flags in its place.

    Raises:
        UserError: a number is out of range.
    """
    job = Job(DEFAULT_MODEL) if args.job is None else read_job(args.job)
    flags = {field.name: getattr(args, field.name, None) for field in _FIELDS}
    # A flag of 0 is one that is given: only those left out are None, or False.
    given = {k: v for k, v in flags.items() if v is not None and v is not False}
    if "drafter" in given or "draft_model" in given:
        # Another drafter than the file's, which may draft another shape.
        changed = {"drafter": None, "draft_model": None, "draft_tokens": None}
        job = dataclasses.replace(job, **changed, tree=None)
    if "tree" in given or "draft_tokens" in given:
        job = dataclasses.replace(job, tree=None, draft_tokens=None)
    job = dataclasses.replace(job, **given)
    if job.drafter is None and job.draft_model is None:
        job = dataclasses.replace(job, drafter=DEFAULT_DRAFTER)
    _check(job)
    return job


def _check(job: Job) -> None:
    """Refuses numbers that are out of range, before anything is read."""
    check_options(
        1,
        max_new_tokens=job.max_new_tokens,
        temperature=job.temperature,
        seed=job.seed,
    )
    refuse(
        [
            f"{name} is {getattr(job, name)}, expected {least} or more"
            for name, least in (
                ("batch_size", 1),
                ("capacity", 2),
                ("max_new_tokens", 1),
            )
            if getattr(job, name) < least
        ]
    )


def check_seeds(job: Job, prompts: int) -> None:
    """Refuses a seed from which not every prompt can have its own.

    Raises:
        UserError: the last prompt's would be too large.
    """
    if job.seed + prompts > 2**64:
        raise UserError(
            f"seed is {job.seed}, expected at most 2**64 - {prompts}: each of the "
            f"{prompts} prompts gets one more than the one before it"
        )


def pinned_values(job: Job) -> dict[str, Any]:
    """What a resumed job must have in common with the one that was stopped."""
    own = {k: v for k, v in dataclasses.asdict(job).items() if k not in _ELSEWHERE}
    return own | {"input_sha256": digest(job.input or "")}
