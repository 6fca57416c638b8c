"""What a batch job says of how it goes and how it went."""

import json
import time
from collections.abc import Iterator
from typing import Any

from jaxspec.batch.inputs import Item
from jaxspec.batch.runner import Runner
from jaxspec.batch.store import as_path, reaching


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


def summary(output: str) -> str:
    """How many records a finished output has, and how many of them are errors."""
    path = as_path(output)
    with reaching(path), path.open("rb") as lines:
        reasons = [json.loads(line).get("finish_reason") for line in lines]
    errors = reasons.count("error")
    told = f", {errors} of them errors" if errors else ""
    return f"{len(reasons)} records in {output}{told}"
