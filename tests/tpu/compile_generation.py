"""Compiles the programs of many generations for a TPU, on a machine that has none.

Run as `python -m tests.tpu.compile_generation JOB.yaml`, in a process of its own
that has `ENVIRONMENT` set: it loads libtpu. It prints one JSON object: what came out of
each compilation, by name.
"""

import dataclasses
import json
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxspec.batching import (
    LARGEST_CHUNK,
    chunks,
    pack,
    pack_eos,
    pack_sampling,
    pack_sequences,
)
from jaxspec.checkpoints.hub import fetch
from jaxspec.checkpoints.load import open_checkpoint
from jaxspec.core.dynamic_tree import DynamicTree
from jaxspec.core.report import Reporting
from jaxspec.core.topology import Topology
from jaxspec.decoding.state import DecodingState, Options, Prompts
from jaxspec.drafters.eagle import Eagle
from jaxspec.drafters.eagle_head import (
    Eagle3Config,
    Eagle3Head,
    EagleConfig,
    EagleHead,
)
from jaxspec.drafters.medusa import Heads, Medusa
from jaxspec.generator import Generator
from jaxspec.job import read_job
from jaxspec.loading import LanguageModel
from jaxspec.models.config import ModelConfig, Rope
from jaxspec.models.decoder import Decoder
from jaxspec.programs import Program
from jaxspec.requests import Request, make_request
from jaxspec.row_options import OPTIONS
from jaxspec.tpu import aot
from jaxspec.tpu.aot import slice_devices
from jaxspec.tpu.hlo import host_traffic, parse
from jaxspec.tpu.traffic import Traffic
from tests.hlo import copies

# A loop right in a round's body: with a drafter that runs no model, only a commit's.
COMMIT = re.compile(
    r' while\(.*op_name="jit\(decode\)/while/body/(?!cond|draft|verify)[^"]*"'
)
TREE = (2, 2, 1)
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
    # A ring of 128 and the largest chunk, against the capacity of 256 and that chunk.
    windows=(None, 128),
    ropes=(Rope(10000.0),) * 2,
)


@dataclasses.dataclass(frozen=True)
class Slice:
    """A chip, and the generation that is compiled for it."""

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
        (device,) = slice_devices(self.topology)
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

    def generator_of(
        self, target: LanguageModel, drafter, rule: str = "rejection", tree=None
    ) -> Generator:
        """A generator with the numbers of the file, of a tree or of the drafter."""
        made = not isinstance(drafter, LanguageModel | str)
        return Generator(
            target,
            drafter,
            draft_tokens=None if made or tree else self.draft_tokens,
            tree=tree,
            rule=rule,
            capacity=self.capacity,
        )


def programs(setup: Slice, generator: Generator, **asked: Any) -> dict[str, dict]:
    """Compiles what `Generator` would dispatch, with these options present."""
    first, later, rounds = generator.programs
    model, drafter = generator.target.decoder, generator.drafter
    short, long = (prompts(setup, tokens) for tokens in (1, setup.capacity - 1))
    vocabulary = model.vocab_size
    batch = [request(1, **asked)] * setup.batch_size
    options = Options(
        pack_sampling(batch, setup.batch_size, vocabulary),
        pack_eos([0], setup.batch_size),
        pack_sequences([each.stop_sequences for each in batch], setup.batch_size),
        generator.rule,
        Reporting(2) if asked else None,
    )

    def fresh(model, drafter, prompts):
        return DecodingState.init(model, drafter, prompts, options, LARGEST_CHUNK)

    state = jax.eval_shape(fresh, model, drafter, long)
    calls = {
        "first chunk": (first, short, (next(chunks(short))[0], options, np.bool_(1))),
        "later chunk": (later, state, (next(chunks(long))[0], options, np.bool_(1))),
        "rounds": (rounds, state, (options, np.int32(1))),
    }
    reports = {}
    for name, (program, given, rest) in calls.items():
        static = () if program is rounds else (LARGEST_CHUNK,)
        arrays = (model, drafter, given, *rest)
        compiled = compile_for(setup.sharding, program, arrays, static)
        caches = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 6]
        reports[name] = report(compiled, program) | {
            "parameter_bytes": size(model) + size(drafter),
            "cache_bytes": 0 if program is first else size(caches),
            "cache_copies": sum(copies(compiled.as_text(), leaf) for leaf in caches),
        }
    return reports


def prompts(setup: Slice, tokens: int) -> Prompts:
    """A batch of prompts of `tokens` tokens."""
    return pack([request(tokens)] * setup.batch_size, setup.batch_size, setup.capacity)


def request(tokens: int, **asked: Any) -> Request:
    """A row with the truncations, and what else is asked."""
    defaults = {name: option.default for name, option in OPTIONS.items()}
    kept = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.05}
    return make_request("", [0] * tokens, defaults | kept | asked)


EVERYTHING: dict[str, Any] = {
    "min_new_tokens": 1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {1: -1.0},
    "banned_sequences": [[1, 2]],
    "stop_sequences": [[3, 4]],
}


def compile_for(sharding, program: Program, arrays: Any, static: tuple = ()) -> Any:
    """Compiles for the shapes of `arrays`, on the chip of the sharding."""

    def place(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return program.compile(*jax.tree.map(place, arrays), *static)


def report(compiled, program: Program) -> dict:
    """What the compiler says of a program, in bytes and seconds."""
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


def size(tree: Any) -> int:
    """Bytes of all leaves."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def printing_loop(count):
    """The negative control: a loop that calls back to the host."""

    def body(done):
        jax.debug.print("{}", done)
        return done + 1

    return lax.while_loop(lambda done: done < count, body, jnp.int32(0))


def multiplying_loop(values, weights, count):
    """Known traffic: weights too large for the chip's own memory, once a round."""

    def body(carry):
        values, done = carry
        return jnp.tanh(values @ weights), done + 1

    start = (values, jnp.int32(0))
    return lax.while_loop(lambda carry: carry[1] < count, body, start)[0]


def known_traffic(setup: Slice) -> dict:
    """What is counted of `multiplying_loop`."""
    size, rows = 8192, 16
    program = Program(multiplying_loop)
    values = jax.ShapeDtypeStruct((rows, size), jnp.bfloat16)
    weights = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
    arrays = (values, weights, jax.ShapeDtypeStruct((), jnp.int32))
    compiled = compile_for(setup.sharding, program, arrays)
    steps = Traffic(parse(compiled.as_text()), 1).of_round()
    return {
        "hbm": sum(cost.hbm for cost in steps.values()),
        "flops": sum(cost.flops for cost in steps.values()),
        "weight_bytes": 2 * size**2,
        "expected_flops": 2 * rows * size**2,
    }


def over_four_chips(draft: ModelConfig) -> dict:
    """What `compile_for` says of a pair whose rows and models are split in two."""
    options = {"batch": 4, "capacity": 256, "mesh": (2, 2), "draft_tokens": 2}
    compiled = aot.compile_for("v5e:2x2", TINY, draft, **options)
    return {
        "modules": compiled.modules,
        "host_traffic": compiled.host_traffic,
        "peak_bytes": compiled.peak_bytes,
        "flops": compiled.round_flops,
        "bytes": compiled.round_bytes,
        "collectives": compiled.round_collectives,
    }


def heads(decoder: Decoder) -> Medusa:
    """Medusa heads of shapes only."""
    topology, width = Topology.branching(TREE), decoder.config.hidden_size
    weights = (topology.depth, 1, width, width)
    shapes = jax.ShapeDtypeStruct(weights, decoder.dtype)
    biases = jax.ShapeDtypeStruct(weights[:3], decoder.dtype)
    return Medusa(Heads(shapes, biases), topology)  # pyright: ignore


def eagle(setup: Slice, config: Any, made: type, topology: Any) -> Eagle:
    """An EAGLE head of shapes only, for a TPU."""

    def make():
        return made(config, dtype=setup.dtype, platform="tpu", rngs=nnx.Rngs(0))

    return Eagle(nnx.eval_shape(make), topology)


def main(path: str) -> None:
    """Prints the reports of a generation with the job's model, of others, a control."""
    job = read_job(path)
    setup = Slice(
        target=job.model,
        drafter="prompt-lookup",
        draft_tokens=4,
        dtype=job.dtype,
        batch_size=job.batch_size,
        capacity=job.capacity,
        topology=job.topology or "",
    )
    small = dataclasses.replace(setup, capacity=256)
    draft = dataclasses.replace(
        TINY, num_layers=1, windows=(None,), ropes=TINY.ropes[:1]
    )
    models = small.model("target", TINY), small.model("draft", draft)
    pair = small.generator_of(*models)
    others = {rule: small.generator_of(*models, rule) for rule in ("block", "coupled")}
    trees = {
        "draft model, tree": small.generator_of(*models, tree=TREE),
        "early exit, tree": small.generator_of(models[0], "early-exit:1", tree=TREE),
        "medusa, tree": small.generator_of(models[0], heads(models[0].decoder)),
        **{
            name: small.generator_of(models[0], eagle(small, *parts))
            for name, parts in {
                "eagle, tree": (
                    EagleConfig(draft),
                    EagleHead,
                    Topology.branching(TREE),
                ),
                "eagle3, dynamic tree": (
                    Eagle3Config(draft, (0, 0, 1), TINY.hidden_size),
                    Eagle3Head,
                    DynamicTree(3, 2, 7),
                ),
            }.items()
        },
    }
    control = Program(printing_loop)
    reports = {
        "slice": programs(setup, setup.generator()),
        "draft model": programs(small, pair),
        **{
            f"every option, {rule}": programs(small, generator, **EVERYTHING)
            for rule, generator in others.items()
        },
        **{name: programs(small, generator) for name, generator in trees.items()},
        "printing": report(
            compile_for(setup.sharding, control, (np.int32(3),)), control
        ),
    }
    reports["known traffic"] = known_traffic(setup)
    reports["over four chips"] = over_four_chips(draft)
    print(json.dumps(reports))


if __name__ == "__main__":
    main(sys.argv[1])
