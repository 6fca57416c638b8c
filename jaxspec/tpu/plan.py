"""How fast a job would be on its slice, by the roofline of the chip.

Predicted from the compiled program and the data sheets, and never measured: a step of a
round takes as long as its bytes or its operations at the chip's peak, whichever is
longer, and its collectives come on top.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.core.analytics import best_draft_length, expected_tokens
from jaxspec.job import Job
from jaxspec.tpu.chips import (
    COLLECTIVE_SECONDS,
    FLOAT32_PASSES,
    Chip,
    chip_of,
    chips_of,
    meshes_of,
)

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
MOST_DRAFT_TOKENS = 12
# The rest of the memory is the compiler's and the runtime's own.
USABLE = 0.9


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to expect of a job; sizes of one chip, rates of the whole slice.

    Attributes:
        fits: all that is needed at once takes at most 0.9 of the memory.
        step_seconds: of a round, by its steps; of plain decoding too.
        tokens_per_second: by the acceptance rate of a draft token.
        speedup: over plain decoding, by the same.
        best_draft_tokens: the depth of the draft that would be fastest, by the same; 0
            is plain decoding.
    """

    fits: bool
    chip: str
    chips: int
    hbm_bytes_per_chip: int
    hbm_capacity_bytes: int
    bytes_per_round: float
    floor_bytes_per_round: float
    step_seconds: dict[str, float]
    plain_step_seconds: dict[str, float]
    tokens_per_second: dict[str, float]
    plain_tokens_per_second: float
    speedup: dict[str, float]
    best_draft_tokens: dict[str, int]
    compile_seconds: float

    @property
    def round_seconds(self) -> float:
        """Of one round."""
        return sum(self.step_seconds.values())

    def to_json(self) -> dict[str, Any]:
        """One object of `jaxspec plan --json`."""
        return dataclasses.asdict(self) | {"round_seconds": self.round_seconds}


def make_plan(job: Job, compiled: Mapping[str, Any]) -> Plan:
    """The plan of a job from what `compile_job` says of it.

    The tokens of a round are those of Leviathan et al. 2023, equation 1, for a draft of
    the same depth: in a tree the acceptance rate is that of a level.
    """
    topology = job.topology or ""
    chip = chip_of(topology)
    if job.dtype == "float32":
        chip = chip._replace(flops=chip.flops / FLOAT32_PASSES)
    speculative, plain = compiled["speculative"], compiled["plain"]
    steps, plain_steps = _steps(speculative, chip), _steps(plain, chip)
    # Each mesh runs a batch of its own.
    rows = job.batch_size * meshes_of(topology, job.mesh)
    round_seconds, plain_seconds = sum(steps.values()), sum(plain_steps.values())
    plain_rate = rows / plain_seconds
    rates = {
        str(alpha): rows
        * float(expected_tokens(alpha, speculative["depth"]))
        / round_seconds
        for alpha in ACCEPTANCES
    }
    prefill = speculative["prefill"]
    needed = max(
        speculative["peak_bytes"], prefill["peak_bytes"] + speculative["state_bytes"]
    )
    return Plan(
        fits=needed <= USABLE * chip.hbm_bytes,
        chip=topology.partition(":")[0],
        chips=chips_of(topology),
        hbm_bytes_per_chip=needed,
        hbm_capacity_bytes=int(chip.hbm_bytes),
        bytes_per_round=speculative["round_bytes"],
        floor_bytes_per_round=speculative["floor_bytes"],
        step_seconds=steps,
        plain_step_seconds=plain_steps,
        tokens_per_second=rates,
        plain_tokens_per_second=plain_rate,
        speedup={alpha: rate / plain_rate for alpha, rate in rates.items()},
        best_draft_tokens=_best(steps, plain_steps, speculative["depth"]),
        compile_seconds=sum(
            each["compile_seconds"] for each in (speculative, plain, prefill)
        ),
    )


def _steps(report: Mapping[str, Any], chip: Chip) -> dict[str, float]:
    """Seconds of each step of a round."""
    return {name: _seconds(cost, chip) for name, cost in report["steps"].items()}


def _seconds(cost: Mapping[str, Any], chip: Chip) -> float:
    # A ring sends the parts of a sum round twice, those of anything else once.
    moved = sum(
        size * (2 if kind == "all-reduce" else 1)
        for kind, size in cost["moved"].items()
    )
    own = max(cost["hbm"] / chip.hbm_bandwidth, cost["flops"] / chip.flops)
    return own + moved / chip.ici_bandwidth + cost["calls"] * COLLECTIVE_SECONDS


def _best(
    steps: Mapping[str, float], plain: Mapping[str, float], depth: int
) -> dict[str, int]:
    """The fastest depth, each level costing what one of the compiled draft's does."""
    if not depth:
        return dict.fromkeys(map(str, ACCEPTANCES), 0)
    alone = sum(plain.values())
    verify = steps["verify"] + steps["accept"]
    lengths = np.arange(MOST_DRAFT_TOKENS + 1)
    # A pass of more tokens takes longer, if only so little that it is not seen.
    costs = alone + max(verify - alone, 0.0) * lengths / depth
    # A level costs nothing where the drafter runs no model: the search needs a cost.
    level = max(steps["draft"] / depth, 1e-9)
    return {
        str(alpha): int(
            best_draft_length(np.full(MOST_DRAFT_TOKENS, alpha), level, costs).k
        )
        for alpha in ACCEPTANCES
    }
