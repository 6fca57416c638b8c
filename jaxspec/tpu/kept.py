"""Compilations for a TPU, kept by what was compiled.

JAX's own cache cannot read what it has written for a chip that is not there. Kept are
the text of the compiled program and what the compiler says of its memory.
"""

import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import jax

from jaxspec.checkpoints.atomic import replace
from jaxspec.checkpoints.hub import cache_folder

_SCOPE = re.compile(r'loc\("([^"]*)"\(')


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler made of a program, of one chip; sizes in bytes.

    Attributes:
        aliased_bytes: of results that lie where arguments lay.
        seconds: that the compiler took.
    """

    argument_bytes: int
    temporary_bytes: int
    output_bytes: int
    aliased_bytes: int
    seconds: float
    text: str = dataclasses.field(repr=False)


def compile_kept(lowered: jax.stages.Lowered, devices: str) -> Compiled:
    """Compiles a program for a slice, or reads what came of it before."""
    path = _file_of(lowered, devices)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        fields = json.dumps(dataclasses.asdict(_compile(lowered)))
        replace(path, gzip.compress(fields.encode(), mtime=0))
    return Compiled(**json.loads(gzip.decompress(path.read_bytes())))


def _compile(lowered: jax.stages.Lowered) -> Compiled:
    start = time.perf_counter()
    compiled: Any = lowered.compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    return Compiled(
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        seconds=seconds,
        text=compiled.as_text(),
    )


def _file_of(lowered: jax.stages.Lowered, devices: str) -> Path:
    """Named by all that the compilation depends on."""
    # Of the places in the source the scopes count, which steps are told by; not lines.
    scopes = sorted(set(_SCOPE.findall(lowered.as_text(debug_info=True))))
    versions = [importlib.metadata.version(name) for name in ("jax", "libtpu")]
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    parts = [devices, *versions, flags, *scopes, lowered.as_text()]
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return cache_folder() / "compiled" / f"{name}.json.gz"
