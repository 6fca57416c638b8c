"""Runs a test module's functions where JAX has 8 devices, and what they have in common.

`python -m tests.sharding.on_devices MODULE FUNCTION [JSON ARGUMENT]...` prints what the
function returns as one JSON object. A process of its own, because the number of devices
is fixed when JAX starts.
"""

import functools
import importlib
import json
import math
import os
import re
import subprocess
import sys
import warnings

import jax
import numpy as np

from jaxspec.decoding.loop import decode, prefill
from jaxspec.drafter_names import place_drafter
from jaxspec.programs import Program
from jaxspec.sharding import make_mesh
from jaxspec.tpu.hlo import arrays_of
from tests import runs

DEVICES, HEAD_DIM = 8, 8
# Rows times models; a row has the two numbers that `make_mesh` takes.
MESHES = {"1x8": (1, 8), "2x4": (2, 4), "4x2": (4, 2), "8x1": (8, 1)}
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    # The last two compile in a third of the time. What is split how, they leave alone.
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"
    " --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false",
}
COLLECTIVE = re.compile(
    r"= (?P<made>.*?) (?:all-gather|all-reduce|all-to-all|collective-broadcast"
    r"|collective-permute|ragged-all-to-all|reduce-scatter)(?:-start)?\("
)
# Three ways to write which devices a collective brings together.
STRIDED = re.compile(
    r"replica_groups=\[(?P<shape>[\d,]+)\]<=\[(?P<grid>[\d,]+)\]"
    r"(?:T\((?P<order>[\d,]+)\))?"
)
NAMED = re.compile(r"replica_groups=mesh\[(?P<axes>[^\]]+)\] \{(?P<over>[^}]+)\}")
LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")


def call(function, *arguments):
    """What the function of a test module returns where there are 8 devices.

    It is called once, also if it fails.
    """
    words = (function.__module__, function.__name__, *map(json.dumps, arguments))
    run = finished(words)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@functools.cache
def finished(words):
    return subprocess.run(
        [sys.executable, "-m", "tests.sharding.on_devices", *words],
        capture_output=True,
        text=True,
        env=os.environ | ENVIRONMENT,
    )


def mesh_of(name):
    return make_mesh(*MESHES[name])


class Kept(Program):
    """A program that remembers the text of what it compiled last."""

    text = ""

    def compile(self, *args):
        compiled = super().compile(*args)
        self.text = compiled.as_text()
        return compiled


def programs(partition):
    """Those of a `Generator`, of prompts that are one chunk."""
    return runs.Programs(
        Kept(prefill, static=1, partition=partition),
        Kept(decode, partition=partition),
    )


def generate(partition, target, drafter, batch, made=None):
    """A generation over the mesh, by the programs of a generator."""
    target = partition.place(target, target.config.head_dim)
    drafter = place_drafter(partition, drafter)
    return runs.generate(target, drafter, batch, made or programs(partition))


def outcome(run):
    """What a row comes out with, by name, as plain lists."""
    state, shown = run.state, {"ids": run.ids}
    for name in ("length", "finish"):
        shown[name] = np.asarray(getattr(state, name)).tolist()
    for name, counted in state.statistics._asdict().items():
        shown[name] = np.asarray(counted).tolist()
    written = np.arange(run.batch.capacity) < np.asarray(state.length)[:, None]
    shown["from_draft"] = np.where(written, state.from_draft, False).tolist()
    return shown


def collectives(text):
    """The instructions that move something between devices."""
    return [line.strip() for line in text.splitlines() if COLLECTIVE.search(line)]


def largest_moved(text):
    """Entries of the largest array that a collective makes."""
    made = [COLLECTIVE.search(line)["made"] for line in collectives(text)]
    sizes = [math.prod(each.sides) for shape in made for each in arrays_of(shape)]
    return max(sizes, default=0)


def groups_of(line):
    """Which devices a collective brings together, by their places in the mesh."""
    if found := STRIDED.search(line):
        shape, grid = numbers(found["shape"]), numbers(found["grid"])
        devices = np.arange(DEVICES).reshape(grid)
        if found["order"]:
            devices = devices.transpose(numbers(found["order"]))
        return devices.reshape(shape).tolist()
    if found := NAMED.search(line):
        axes = dict(each.split("=") for each in found["axes"].split(","))
        devices = np.arange(DEVICES).reshape([int(size) for size in axes.values()])
        over = [list(axes).index(name) for name in found["over"].split(",")]
        devices = np.moveaxis(devices, over, range(-len(over), 0))
        size = math.prod(devices.shape[-len(over) :])
        return devices.reshape(-1, size).tolist()
    found = LISTED.search(line)
    assert found is not None, line
    return [numbers(group) for group in re.findall(r"\{([\d,]+)\}", found[1])]


def numbers(text):
    return [int(number) for number in text.split(",")]


def meetings_of_rows(text, model):
    """The collectives that bring different parts of the rows together."""
    return [
        line
        for line in collectives(text)
        if any(
            len({device // model for device in each}) > 1 for each in groups_of(line)
        )
    ]


def main(module, function, *arguments):
    warnings.simplefilter("error")
    assert jax.device_count() == DEVICES
    result = getattr(importlib.import_module(module), function)(
        *map(json.loads, arguments)
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
