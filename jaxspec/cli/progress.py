"""Progress on a terminal, for work of more than two seconds."""

import contextlib
import time
from collections.abc import Callable, Iterator

PATIENCE_SECONDS = 2.0


@contextlib.contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields `advance(count)`; draws on stderr, and only if that is a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (what, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
    task = bar.add_task(what, total=total)
    begin = time.monotonic()

    def advance(count: int) -> None:
        bar.advance(task, count)
        is_long = time.monotonic() - begin > PATIENCE_SECONDS
        if console.is_terminal and is_long and not bar.live.is_started:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()
