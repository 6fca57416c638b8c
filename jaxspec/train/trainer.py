"""The training loop over batches of training texts, resumed where it stopped."""

import dataclasses
import json
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jaxspec.checkpoints.atomic import replace
from jaxspec.errors import UserError
from jaxspec.train.batches import Batches
from jaxspec.train.checkpoints import Checkpoints
from jaxspec.train.measures import Measures
from jaxspec.train.objective import Batch
from jaxspec.train.optimizers import OPTIMIZERS

# (parameters, target, batch) -> loss, measures; a pytree.
Objective = Callable[[Any, Any, Batch], tuple[Array, Measures]]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How long and how fast a drafter learns.

    Attributes:
        steps: batches.
        method: one of `OPTIMIZERS`.
        learning_rate: at its height, after `warm_up` steps or a tenth of all; it ends
            at 0.
        clip: gradients are shortened to this norm.
        check_every: steps between checkpoints, each with measures on held-out texts.
        keep: newest checkpoints.
    """

    steps: int
    method: str = "adamw"
    learning_rate: float = 1e-3
    warm_up: int = 50
    weight_decay: float = 0.01
    clip: float = 1.0
    check_every: int = 100
    keep: int = 2

    def optimizer(self) -> optax.GradientTransformation:
        """The method with a cosine schedule."""
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, self.learning_rate, min(self.warm_up, self.steps // 10), self.steps
        )
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            OPTIMIZERS[self.method](schedule, self.weight_decay),
        )


class TrainState(NamedTuple):
    """All that changes; the position in the data is the step."""

    step: Int[Array, ""]
    parameters: Any
    optimizer: Any


class Progress(NamedTuple):
    """What a step did; `held_out` where it was measured."""

    step: int
    loss: float
    measures: Measures
    tokens_per_second: float
    held_out: Measures | None

    def to_json(self) -> dict[str, Any]:
        """One line of `metrics.jsonl`."""
        line = {
            "step": self.step,
            "loss": self.loss,
            **self.measures.to_json(),
            "tokens_per_second": self.tokens_per_second,
        }
        if self.held_out is not None:
            line["held_out"] = self.held_out.to_json()
        return line


class Trainer:
    """Trains a drafter's parameters against a frozen target, over all devices."""

    def __init__(
        self,
        objective: Objective,
        target: Any,
        batches: Batches,
        settings: Settings,
        folder: Path,
    ):
        """Batches are split over the devices; the rows must be a multiple of them."""
        count = jax.device_count()
        if batches.rows % count:
            raise UserError(
                f"a batch of {batches.rows} texts cannot be split over {count} "
                f"devices; choose a multiple of {count}"
            )
        mesh = jax.make_mesh((count,), ("data",), axis_types=(AxisType.Auto,))
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._split = NamedSharding(mesh, PartitionSpec("data"))
        # Arguments of the steps: what they closed over would become constants.
        self._given = jax.device_put((objective, target), self._whole)
        self._batches, self._settings, self._folder = batches, settings, folder
        self._optimizer = settings.optimizer()
        self._update = jax.jit(self._make_update(), donate_argnums=0)
        self._judge = jax.jit(_measured)

    def run(self, parameters: Any) -> Generator[Progress, None, TrainState]:
        """Trains on from the newest checkpoint, or from `parameters`.

        Yields:
            The progress of each step.

        Returns:
            The state of the best checkpoint.
        """
        state = TrainState(jnp.int32(0), parameters, self._optimizer.init(parameters))
        # Copied: a step writes where the state lies, and zeros may share a place.
        state = jax.tree.map(jnp.copy, jax.device_put(state, self._whole))
        checkpoints = Checkpoints(self._folder / "checkpoints", self._settings.keep)
        try:
            state = checkpoints.restore(state) or state
            metrics = Metrics(self._folder / "metrics.jsonl", int(state.step))
            for step in range(int(state.step) + 1, self._settings.steps + 1):
                state, progress = self._step(state, step)
                metrics.add(progress)
                if progress.held_out is not None:
                    best = float(progress.held_out.sampled_tokens_per_round)
                    # Copied: the next step writes where the state lies.
                    checkpoints.save(step, jax.tree.map(jnp.copy, state), best)
                yield progress
            return checkpoints.best(state)
        finally:
            checkpoints.close()

    def _step(self, state: TrainState, step: int) -> tuple[TrainState, Progress]:
        begin = time.perf_counter()
        batch = self._batches.at(step - 1)
        given = jax.device_put(batch, self._split)
        state, loss, measures = self._update(state, *self._given, given)
        loss = float(loss)
        if not np.isfinite(loss):
            raise UserError(
                f"the loss of step {step} is {loss}; lower the learning rate"
            )
        speed = batch.written.sum() / (time.perf_counter() - begin)
        checked = step % self._settings.check_every == 0 or step == self._settings.steps
        held_out = self.judge(state.parameters) if checked else None
        return state, Progress(step, loss, measures, float(speed), held_out)

    def judge(self, parameters: Any) -> Measures:
        """The mean over the held-out texts."""
        each = [
            self._judge(parameters, *self._given, jax.device_put(batch, self._split))
            for batch in self._batches.held_out()
        ]
        return jax.tree.map(lambda *values: np.mean(values, axis=0), *each)

    def _make_update(self):
        def update(state: TrainState, objective: Objective, target, batch):
            graded = jax.value_and_grad(objective, has_aux=True)
            (loss, measures), slope = graded(state.parameters, target, batch)
            change, optimizer = self._optimizer.update(
                slope, state.optimizer, state.parameters
            )
            parameters = optax.apply_updates(state.parameters, change)
            return TrainState(state.step + 1, parameters, optimizer), loss, measures

        return update


def _measured(parameters, objective: Objective, target, batch: Batch) -> Measures:
    return objective(parameters, target, batch)[1]


class Metrics:
    """One JSON object a step, in a file; those past the resumed step are done again."""

    def __init__(self, path: Path, step: int):
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        whole = [line for line in lines if line.endswith("}")]
        kept = [line for line in whole if json.loads(line)["step"] <= step]
        replace(path, "".join(f"{line}\n" for line in kept).encode())

    def add(self, progress: Progress) -> None:
        """Appends a step."""
        with self._path.open("a") as file:
            file.write(json.dumps(progress.to_json()) + "\n")
