"""A progress bar for work that tells nothing of its progress."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

PATIENCE_SECONDS = 2.0


@contextlib.contextmanager
def watching(
    title: str, measure: Callable[[], int], total: int | None, wanted: bool | None
) -> Iterator[None]:
    """Shows a bar on stderr while the work inside lasts longer than 2 seconds.

    Args:
        title: what is being done.
        measure: returns the bytes that are done; called from another thread.
        total: the bytes that there will be, None if unknown.
        wanted: whether to show it; None shows it if stderr is a terminal.
    """
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield
        return
    stop = threading.Event()
    drawing = (stop, title, measure, total)
    watcher = threading.Thread(target=_draw, args=drawing, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()


def _draw(
    stop: threading.Event, title: str, measure: Callable[[], int], total: int | None
) -> None:
    if stop.wait(PATIENCE_SECONDS):
        return
    with _bar() as bar:
        task, done = bar.add_task(title, total=total), 0
        while not stop.wait(0.25):
            # Files that are joined and then removed are counted twice, then once.
            done = max(done, measure())
            bar.update(task, completed=min(done, total or done))


def _bar() -> Any:
    from rich import console, progress

    stderr = console.Console(stderr=True)
    return progress.Progress(
        "{task.description}",
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=stderr,
        transient=stderr.is_terminal,
    )
