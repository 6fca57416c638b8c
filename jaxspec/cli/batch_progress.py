"""The progress of a batch job, on a terminal."""

import time
from collections.abc import Iterator
from typing import Any

from jaxspec.batch.inputs import Item
from jaxspec.batch.runner import Runner


def follow(
    runner: Runner, todo: list[Item], total: int, *, is_shown: bool
) -> Iterator[dict[str, Any]]:
    """Passes the records on; shows how many there are of `total`, and how fast."""
    from rich import console, progress

    where = console.Console(stderr=True)
    columns = (
        *(progress.BarColumn(), progress.MofNCompleteColumn()),
        *(progress.TimeElapsedColumn(), progress.TimeRemainingColumn()),
        progress.TextColumn("{task.description}"),
    )
    hidden = not (is_shown and where.is_terminal)
    start = time.perf_counter()
    with progress.Progress(
        *columns, console=where, disable=hidden, transient=True
    ) as bar:
        task = bar.add_task("", total=total, completed=total - len(todo))
        for record in runner.run(todo):
            yield record
            seconds = time.perf_counter() - start
            bar.update(task, advance=1, description=_described(runner, seconds))


def _described(runner: Runner, seconds: float) -> str:
    rate = f"{runner.tokens / seconds:.0f} tokens/s"
    if not runner.drafted:
        return rate
    return f"{rate}, {runner.accepted / runner.drafted:.0%} accepted"
