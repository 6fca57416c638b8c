"""A job in a YAML file: what to run, how it drafts, and the slice it is for."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

from jaxspec.arguments import parse_tree
from jaxspec.checkpoints.fields import Fields, shown
from jaxspec.core.accept import RULES
from jaxspec.core.dynamic_tree import DynamicTree
from jaxspec.errors import UserError, refuse

_MESH = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")
_LARGEST_FILE = 2**20


@dataclasses.dataclass(frozen=True)
class Job:
    """The fields are the flags of `jaxspec batch`, with underscores.

    Attributes:
        model: whose distribution the output has.
        draft_model: a smaller model of its tokenizer; else `drafter` names one.
        batch_size: rows that run at a time, on the whole mesh.
        capacity: the most tokens of a row, prompt included.
        mesh: in how many parts rows and models are split.
        replicate_draft: the drafter lies whole on each chip.
        topology: the slice, `v5e:2x4`; None: the devices that there are.
    """

    model: str
    draft_model: str | None = None
    drafter: str | None = None
    draft_tokens: int | None = None
    tree: tuple[int, ...] | DynamicTree | None = None
    rule: str | None = None
    dtype: str = "float32"
    batch_size: int = 8
    capacity: int = 2048
    mesh: tuple[int, int] = (1, 1)
    replicate_draft: bool = False
    topology: str | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    chat: bool = False
    input: str | None = None
    output: str | None = None

    @property
    def drafting(self) -> str:
        """What drafts, in a word for messages and tables."""
        return self.draft_model or self.drafter or "prompt-lookup"


def read_job(path: str | os.PathLike[str]) -> Job:
    """The job in a YAML file.

    Raises:
        UserError: lists all that is wrong with it.
    """
    fields = Fields(_read_yaml(Path(path)), str(path))
    number = fields.integer
    job = Job(
        model=_text(fields, "model") or "",
        draft_model=_text(fields, "draft_model"),
        drafter=_text(fields, "drafter"),
        draft_tokens=number("draft_tokens", None),
        tree=_tree(fields),
        rule=fields.choice("rule", {name: name for name in RULES}, None),
        dtype=fields.choice(
            "dtype", {"float32": "float32", "bfloat16": "bfloat16"}, "float32"
        ),
        batch_size=number("batch_size", Job.batch_size),
        capacity=number("capacity", Job.capacity, low=2),
        mesh=_mesh(fields),
        replicate_draft=fields.flag("replicate_draft"),
        topology=_text(fields, "topology"),
        max_new_tokens=number("max_new_tokens", Job.max_new_tokens),
        temperature=_temperature(fields),
        seed=number("seed", 0, low=0, high=2**64 - 1),
        chat=fields.flag("chat"),
        input=_text(fields, "input"),
        output=_text(fields, "output"),
    )
    if fields.raw("model") is None:
        fields.faults.append("`model` is missing")
    if job.draft_model and job.drafter:
        fields.faults.append(
            "`draft_model` and `drafter` are both given; leave one out"
        )
    fields.refuse_unread()
    fields.finish()
    return job


def parse_mesh(text: Any) -> tuple[int, int]:
    """`DATAxMODEL`, such as 2x4.

    Raises:
        UserError: it is not of this form.
    """
    match = _MESH.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise UserError(
            f"mesh is {shown(text)}, expected DATAxMODEL, such as 1x8: in how many "
            "parts the rows and the models are split"
        )
    return int(match[1]), int(match[2])


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise UserError(f"{path}: over 1 MiB, expected a job in YAML")
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        detail = " ".join(str(error).split())
        raise UserError(f"{path}: not valid YAML ({detail})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds {shown(values)}, expected fields of a job")
    return values


def _text(fields: Fields, name: str) -> str | None:
    value = fields.raw(name)
    if value is None or (isinstance(value, str) and value):
        return value
    fields.fault(name, "a text")
    return None


def _tree(fields: Fields) -> tuple[int, ...] | DynamicTree | None:
    value = fields.raw("tree")
    if value is None:
        return None
    if isinstance(value, str):
        try:
            return parse_tree(value)
        except UserError as error:
            fields.faults.append(f"`tree`: {error}")
            return None
    if isinstance(value, list) and value and all(type(each) is int for each in value):
        return tuple(value)
    fields.fault("tree", "whole numbers by level, such as 4,2,1")
    return None


def _mesh(fields: Fields) -> tuple[int, int]:
    value = fields.raw("mesh")
    try:
        return Job.mesh if value is None else parse_mesh(value)
    except UserError as error:
        fields.faults.append(str(error))
        return Job.mesh


def _temperature(fields: Fields) -> float:
    value = fields.raw("temperature")
    if value is None:
        return Job.temperature
    if type(value) in (int, float) and 0 <= value < 1e30:
        return float(value)
    fields.fault("temperature", "a number, 0 or more")
    return Job.temperature


def refuse_without(job: Job, *names: str) -> None:
    """Refuses a job that lacks fields which a verb needs."""
    refuse(
        [
            f"{name} is missing; give it in the YAML, or as a flag where there is one"
            for name in names
            if getattr(job, name) in (None, "")
        ]
    )
