"""Where a job runs: the devices, and which process does and writes what."""

import dataclasses
import os
from collections.abc import Callable, Set
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxspec.batch.journal import Journal
from jaxspec.errors import UserError
from jaxspec.job import Job
from jaxspec.sharding import COPIED, Partition, Rules, make_mesh
from jaxspec.tpu.chips import refuse_part_of_slice

T = TypeVar("T")
_FAILED = 2
_LONGEST_WAIT_MS = 7 * 24 * 3600 * 1000
_FORCED = "xla_force_host_platform_device_count"


@dataclasses.dataclass(frozen=True)
class Place:
    """This process's part in a job.

    Attributes:
        partition: its mesh; None: it runs on one device.
        shard: which prompts are its own: those whose index leaves this rest.
        shards: by how much the index is divided.
        writes: it keeps the records of its shard.
        is_shared: its mesh spans all processes, which do the same in step: every one
            decides by what is fetched from the mesh, so that they decide alike.
    """

    partition: Partition | None
    shard: int = 0
    shards: int = 1
    writes: bool = True
    is_shared: bool = False

    def decide(self, act: Callable[[], T]) -> T | bool:
        """What `act` gives, to the process that writes; to others whether it is true.

        Of a shared mesh the output may be in a folder that only one process sees.

        Raises:
            UserError: `act` did, there or here.
        """
        if not self.is_shared:
            return act()
        result, error = None, None
        if self.writes:
            try:
                result = act()
            except UserError as caught:
                error = caught
        code = np.int32(_FAILED if error else bool(result))
        told = int(multihost_utils.broadcast_one_to_all(code))
        if error:
            raise error
        if told == _FAILED:
            raise UserError("process 0 has refused the job; its message says why")
        return bool(told) if result is None else result

    def journal(self, open_own: Callable[[], Journal]) -> Journal:
        """The shard's journal, or one that keeps nothing if another process writes."""
        own = self.decide(open_own)
        return own if isinstance(own, Journal) else _NoJournal()

    def agreed(self, done: Set[int], count: int) -> set[int]:
        """What is done of `count` prompts, as the process that writes knows it."""
        if not self.is_shared:
            return set(done)
        mask = np.zeros(count, bool)
        mask[[index for index in done if index < count]] = True
        shared = multihost_utils.broadcast_one_to_all(mask)
        return set(np.flatnonzero(shared).tolist())

    def is_last_to_end(self) -> bool:
        """Waits for all processes; whether this one is to join what they wrote."""
        if jax.process_count() > 1:
            from orbax.checkpoint import multihost

            # Not a collective of the devices: on a CPU its first one fails after 30
            # seconds, and shares may end hours apart.
            wait = multihost.get_barrier_sync_fn()
            wait(key="jaxspec batch: all written", timeout_ms=_LONGEST_WAIT_MS)
        return jax.process_index() == 0


class _NoJournal(Journal):
    def _write(self, index: int, line: bytes) -> None:
        self.done.add(index)

    def flush(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def prepare_platform(platform: str | None, job: Job) -> None:
    """Chooses the devices before any is asked for; on a CPU as many as the mesh has."""
    if platform is None:
        return
    jax.config.update("jax_platforms", platform)
    data, model = job.mesh
    if platform == "cpu" and _FORCED not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", data * model)


def find_place(job: Job, platform: str | None) -> Place:
    """The mesh of this process, or of all.

    Raises:
        UserError: there are too few devices, or they are no TPU's.
    """
    try:
        local, everywhere = jax.local_devices(), jax.devices()
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"no devices of platform {platform}: {reason}") from None
    if job.topology and platform is None and local[0].platform != "tpu":
        raise UserError(
            f"the job is for {job.topology}, but the devices here are "
            f"{local[0].platform}'s; run it there, or rehearse with --platform cpu"
        )
    refuse_part_of_slice(job.mesh, local[0].device_kind, len(everywhere))
    size = job.mesh[0] * job.mesh[1]
    rules = COPIED if job.replicate_draft else Rules()
    if size <= len(local):
        own = None
        if size > 1:
            own = Partition(make_mesh(*job.mesh, local), draft_rules=rules)
        return Place(own, jax.process_index(), jax.process_count())
    if jax.process_count() > 1 and size != len(everywhere):
        raise UserError(
            f"mesh is {job.mesh[0]}x{job.mesh[1]}, expected at most the {len(local)} "
            f"devices of a process or all {len(everywhere)} of the job"
        )
    whole = Partition(make_mesh(*job.mesh, everywhere), draft_rules=rules)
    return Place(whole, writes=jax.process_index() == 0, is_shared=True)
