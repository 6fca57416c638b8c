"""Counts what XLA really compiled and executed, from its own events."""

import contextlib
import dataclasses
import pathlib
import tempfile

import jax

EXECUTION = "CommonPjRtLoadedExecutable::ExecuteHelperOnSingleDevice"
COMPILATION = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass
class Counts:
    executions: int = 0
    compilations: int = 0


@contextlib.contextmanager
def counting():
    """Yields `Counts` that are filled in at the end of the block."""
    counts = Counts()

    def on_event(name, seconds, **_):
        counts.compilations += name == COMPILATION

    jax.monitoring.register_event_duration_secs_listener(on_event)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            yield counts
        [trace] = pathlib.Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(trace)).planes
        counts.executions = sum(
            event.name == EXECUTION
            for plane in planes
            for line in plane.lines
            for event in line.events
        )
    jax.monitoring.unregister_event_duration_listener(on_event)
