"""Compiles a generation for a TPU slice, from shapes alone, where there is no TPU.

libtpu compiles for a described topology. Load it only in a process that has
`ENVIRONMENT` set and holds no TPU.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import topologies

from jaxspec.arguments import Tree
from jaxspec.batching import LARGEST_CHUNK, chunks, pack
from jaxspec.cache import BLOCK
from jaxspec.decoding.loop import decode
from jaxspec.decoding.state import DecodingState
from jaxspec.drafter_names import make_drafter, own_module
from jaxspec.errors import UserError
from jaxspec.generator import Generator
from jaxspec.loading import LanguageModel
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.programs import Program
from jaxspec.requests import make_request
from jaxspec.row_options import OPTIONS
from jaxspec.sharding import COPIED, Partition, Rules, make_mesh
from jaxspec.tpu.floor import floor_bytes, shard_bytes
from jaxspec.tpu.hlo import host_traffic, parse
from jaxspec.tpu.kept import compile_kept
from jaxspec.tpu.traffic import Cost, Traffic

# Else libtpu looks for a metadata server, and a second process dies on its lock file.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_SIZES = ("argument_bytes", "temporary_bytes", "output_bytes", "aliased_bytes")


@dataclasses.dataclass(frozen=True)
class Compilation:
    """What the compiler says of one program, of one chip; sizes in bytes.

    Attributes:
        aliased_bytes: of results that lie where arguments lay.
        modules: programs that it became.
        host_traffic: instructions that talk to the host.
        steps: what a round moves and computes, by its steps; empty of other programs.
    """

    argument_bytes: int
    temporary_bytes: int
    output_bytes: int
    aliased_bytes: int
    modules: int
    host_traffic: list[str]
    compile_seconds: float
    steps: dict[str, Cost]

    @property
    def peak_bytes(self) -> int:
        """What it needs at once."""
        held = self.argument_bytes + self.temporary_bytes + self.output_bytes
        return held - self.aliased_bytes

    @property
    def round_bytes(self) -> float:
        """Of main memory, moved by one round."""
        return sum(cost.hbm for cost in self.steps.values())

    @property
    def round_flops(self) -> float:
        """Of the matrix products of one round."""
        return sum(cost.flops for cost in self.steps.values())

    @property
    def round_collectives(self) -> dict[str, float]:
        """Bytes that the collectives of one round result in, by kind."""
        total = Cost()
        for cost in self.steps.values():
            total.add(cost)
        return total.moved


@dataclasses.dataclass(frozen=True)
class Setup:
    """A generation on a slice, of shapes only.

    Attributes:
        batch: rows on the whole mesh.
        live_tokens: of each row, whose keys a round reads.
        topology: the slice, such as `v5e:2x4`.
    """

    generator: Generator
    batch: int
    live_tokens: int
    topology: str

    @property
    def capacity(self) -> int:
        """The most tokens of a row."""
        return self.generator.capacity or 0

    @property
    def partition(self) -> Partition:
        """The mesh."""
        partition = self.generator.target.partition
        assert partition is not None
        return partition

    def rounds(self) -> Compilation:
        """The program of all rounds, of one shape each, as `jaxspec batch` has it."""
        generator = self.generator
        state, options = self._state(self.batch), self._options(self.batch)
        models = generator.target.decoder, generator.drafter
        run = functools.partial(decode, one_token_rounds=False)
        program = Program(run, donate=(2,), partition=self.partition)
        return self._compile(program.lower(*models, state, options, np.int32(1)))

    def prefill(self) -> Compilation:
        """The program of a long piece of prompt, of a row for each part of the mesh."""
        rows, generator = self.partition.row_parts, self.generator
        prompts = pack([_request(self.capacity - 1)] * rows, rows, self.capacity)
        chunk, _ = next(chunks(prompts))
        models = generator.target.decoder, generator.drafter
        program = generator.programs[1]
        state, options = self._state(rows), self._options(rows)
        return self._compile(
            program.lower(*models, state, chunk, options, np.bool_(1), LARGEST_CHUNK),
            rounds=False,
        )

    def state_bytes(self) -> int:
        """Of the batch, on one chip."""
        state = self._state(self.batch)
        return shard_bytes(state, self.partition.state(state))

    def floor_bytes(self) -> float:
        """The least that a round moves on one chip; see `floor`."""
        models = self.generator.target.decoder, self.generator.drafter
        state = self._state(self.batch)
        return floor_bytes(*models, state, self.partition, self.live_tokens)

    def _options(self, rows: int) -> Any:
        return self.generator.pack_options([_request(1)] * rows, rows, [0], None)

    def _state(self, rows: int) -> DecodingState:
        generator, options = self.generator, self._options(rows)
        prompts = pack([_request(1)] * rows, rows, self.capacity)

        def fresh(model, drafter, prompts):
            return DecodingState.init(model, drafter, prompts, options, LARGEST_CHUNK)

        models = generator.target.decoder, generator.drafter
        return jax.eval_shape(fresh, *models, prompts)

    def _compile(self, lowered: jax.stages.Lowered, rounds: bool = True) -> Compilation:
        mesh = self.partition.mesh
        devices = (
            f"{self.topology} {mesh.shape} {[each.id for each in mesh.devices.flat]}"
        )
        compiled = compile_kept(lowered, devices)
        blocks = -(-self.live_tokens // BLOCK)
        return Compilation(
            **{name: getattr(compiled, name) for name in _SIZES},
            modules=compiled.text.count("HloModule "),
            host_traffic=host_traffic(compiled.text),
            compile_seconds=compiled.seconds,
            steps=Traffic(parse(compiled.text), blocks).of_round() if rounds else {},
        )


def compile_for(
    topology: str, target: ModelConfig, drafter: ModelConfig | str | None, **shape: Any
) -> Compilation:
    """Compiles all rounds of a generation for a slice; arguments as for `setup`."""
    return setup(topology, target, drafter, **shape).rounds()


def setup(
    topology: str,
    target: ModelConfig,
    drafter: ModelConfig | str | None,
    *,
    batch: int,
    capacity: int,
    mesh: tuple[int, int] = (1, 1),
    draft_tokens: int | None = None,
    tree: Tree | None = None,
    rule: str = "rejection",
    dtype: str = "bfloat16",
    replicate_draft: bool = False,
    live_tokens: int | None = None,
    reference: str = "target",
) -> Setup:
    """A generation on a slice, of which nothing but shapes exists.

    Args:
        topology: `v5e:2x4`; of its chips as many as the mesh has are used.
        target: its config.
        drafter: a draft model's config, the name of a drafter, or None.
        batch: rows on the whole mesh.
        capacity: the most tokens of a row.
        mesh: in how many parts rows and models are split.
        draft_tokens: k.
        tree: in place of k.
        rule: how drafts are accepted.
        dtype: of weights and caches.
        replicate_draft: the drafter lies whole on each chip.
        live_tokens: of each row, by default all of its capacity.
        reference: the target's name.

    Raises:
        UserError: the parts do not fit together.
    """
    devices = slice_devices(topology)
    # A mesh that one VM can have lies on its own chips.
    own = [each for each in devices if each.process_index == 0]
    grid = make_mesh(*mesh, own if math.prod(mesh) <= len(own) else devices)
    partition = Partition(grid, Rules(), COPIED if replicate_draft else Rules())
    decoder = _abstract(target, dtype, partition, draft=False)
    named: Any = drafter
    if isinstance(drafter, ModelConfig):
        draft = _abstract(drafter, dtype, partition, draft=True)
        named = LanguageModel("draft", draft)
    whole = LanguageModel(reference, decoder, None, partition)
    made = _of_shapes(make_drafter(whole, named, draft_tokens, tree))
    generator = Generator(whole, made, rule=rule, capacity=capacity)
    return Setup(generator, batch, live_tokens or capacity, topology)


def slice_devices(topology: str) -> list[Any]:
    """The devices of a topology such as `v5e:2x4`, none of which is here."""
    grid = [int(size) for size in topology.partition(":")[2].split("x")]
    # A host has 2 x 2 chips by default, and a smaller slice is refused.
    bounds = (*(min(size, 2) for size in grid[:2]), 1)
    try:
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=topology, chips_per_host_bounds=bounds
        )
    except Exception as error:
        # As libtpu raises it; which grids there are it does not say.
        reason = str(error).split("\n")[0]
        raise UserError(
            f"topology is {topology!r}, which libtpu does not have; expected one such "
            f"as v5e:2x4 or v5p:2x2x4 ({reason})"
        ) from None
    return list(described.devices)


def _abstract(
    config: ModelConfig, dtype: str, partition: Partition, *, draft: bool
) -> Decoder:
    """A decoder of shapes only, for a TPU, spread over the mesh."""

    def make():
        return Decoder(config, dtype=dtype, platform="tpu", rngs=nnx.Rngs(0))

    shapes = nnx.eval_shape(make)
    return partition.place(shapes, config.head_dim, draft=draft)


def _of_shapes(drafter: Any) -> Any:
    """The same drafter of shapes only, for a TPU."""
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), drafter
    )
    own = own_module(shapes)
    if own is not None:
        own.platform = "tpu"
    return shapes


def _request(tokens: int) -> Any:
    defaults = {name: option.default for name, option in OPTIONS.items()}
    return make_request("", [0] * tokens, defaults | {"temperature": 1.0})
