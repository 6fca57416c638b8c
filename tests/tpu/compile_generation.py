"""Compiles the programs of a generation for a TPU, on a machine that has none.

Run as `python -m tests.tpu.compile_generation CONFIG.yaml`, in a process of its own: it
loads libtpu. It prints one JSON object: what each program is, by name.
"""

import dataclasses
import json
import os
import re
import sys
import time
from pathlib import Path

# Before jax: libtpu would look for a TPU's metadata server, and lock the machine's TPU.
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from flax import nnx
from jax import lax
from jax.experimental import topologies

from jaxspec.batching import LARGEST_CHUNK, chunks, pack, pack_eos, pack_sampling
from jaxspec.checkpoints.hub import fetch
from jaxspec.checkpoints.load import open_checkpoint
from jaxspec.decoding.state import DecodingState, Options
from jaxspec.generator import Generator
from jaxspec.loading import LanguageModel
from jaxspec.models.config import ModelConfig, Rope
from jaxspec.models.decoder import Decoder
from jaxspec.programs import Program
from jaxspec.requests import Request
from tests.hlo import host_traffic

# The round's loop over the rows that a commit writes; attention's loops are in a branch.
COMMIT = re.compile(r'while\(.*op_name="jit\(\w+\)/while/body/(?!cond)[^"]*"')
TINY = ModelConfig(
    family="llama",
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_positions=512,
    norm_eps=1e-6,
    query_scale=0.125,
    windows=(None, 128),
    ropes=(Rope(10000.0),) * 2,
)


@dataclasses.dataclass(frozen=True)
class Slice:
    """A file of `tpu_configs/`: these fields, all of them and no others."""

    target: str
    drafter: str
    draft_tokens: int
    dtype: str
    batch_size: int
    capacity: int
    topology: str

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """The one chip of the topology."""
        grid = [int(size) for size in self.topology.partition(":")[2].split("x")]
        # A host has 2 x 2 chips by default, and a smaller slice is refused.
        bounds = (*(min(size, 2) for size in grid), 1, 1)[:3]
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=self.topology, chips_per_host_bounds=bounds
        )
        (device,) = described.devices
        return jax.sharding.SingleDeviceSharding(device)

    def model(self, reference: str, config: ModelConfig) -> LanguageModel:
        """A model of shapes only, for a TPU."""

        def make():
            return Decoder(config, dtype=self.dtype, platform="tpu", rngs=nnx.Rngs(0))

        return LanguageModel(reference, nnx.eval_shape(make))

    def generator(self) -> Generator:
        """The generator that the file describes."""
        config = open_checkpoint(fetch(self.target)).config
        return self.generator_of(self.model(self.target, config), self.drafter)

    def generator_of(self, target: LanguageModel, drafter) -> Generator:
        """A generator with the numbers of the file."""
        return Generator(
            target, drafter, draft_tokens=self.draft_tokens, capacity=self.capacity
        )


def programs(setup: Slice, generator: Generator) -> dict[str, dict]:
    """Compiles what `Generator` would dispatch, with every sampling option present."""
    first, later, rounds = generator.programs
    model, drafter = generator.target.decoder, generator.drafter
    prompts, options, short, long = arguments(setup)

    def fresh(model, drafter, prompts):
        return DecodingState.init(model, drafter, prompts, LARGEST_CHUNK)

    state = jax.eval_shape(fresh, model, drafter, prompts)
    held = jax.tree.leaves((state.cache, state.drafter))
    held_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in held)
    calls = {
        "first chunk": (first, (model, drafter, prompts, short, options, np.bool_(1))),
        "later chunk": (later, (model, drafter, state, long, options, np.bool_(1))),
        "rounds": (rounds, (model, drafter, state, options, np.int32(1))),
    }
    return {
        name: {"held_bytes": held_bytes} | report(setup.sharding, program, *args)
        for name, (program, args) in calls.items()
    }


def arguments(setup: Slice):
    """Prompts, options, and the pieces of a short prompt and of the longest one."""
    requests = [
        Request("", [0] * tokens, 1, 0.8, top_k=50, top_p=0.95, min_p=0.05, seed=0)
        for tokens in (1, setup.capacity - 1)
    ]
    short, long = (
        pack([request] * setup.batch_size, setup.batch_size, setup.capacity)
        for request in requests
    )
    sampling = pack_sampling(requests[:1] * setup.batch_size, setup.batch_size)
    options = Options(sampling, pack_eos([0]))
    return long, options, next(chunks(short))[0], next(chunks(long))[0]


def report(sharding, program: Program, *args) -> dict:
    """Compiles a program for the shapes of `args`, and says what came out."""

    def place(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    static = (LARGEST_CHUNK,) * program._static
    compiled = program.compile(*jax.tree.map(place, args), *static)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    return {
        "modules": text.count("HloModule "),
        "host_traffic": host_traffic(text),
        "commit_loops": len(COMMIT.findall(text)),
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "bytes_accessed": compiled.cost_analysis()["bytes accessed"],
        "compile_seconds": round(program.compile_seconds, 1),
    }


def printing_loop(count):
    """The negative control: a loop that calls back to the host."""

    def body(done):
        jax.debug.print("{}", done)
        return done + 1

    return lax.while_loop(lambda done: done < count, body, jnp.int32(0))


def main(path: str) -> None:
    setup = Slice(**yaml.safe_load(Path(path).read_text()))
    tiny = dataclasses.replace(setup, capacity=256)
    draft = dataclasses.replace(
        TINY, num_layers=1, windows=(None,), ropes=TINY.ropes[:1]
    )
    pair = tiny.generator_of(tiny.model("target", TINY), tiny.model("draft", draft))
    print(
        json.dumps(
            {
                "slice": programs(setup, setup.generator()),
                "draft model": programs(tiny, pair),
                "printing": report(setup.sharding, Program(printing_loop), np.int32(3)),
            }
        )
    )


if __name__ == "__main__":
    start = time.perf_counter()
    main(sys.argv[1])
