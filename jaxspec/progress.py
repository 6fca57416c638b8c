"""A progress bar for work that tells nothing of its progress."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

PATIENCE_SECONDS = 2.0


@contextlib.contextmanager
def watching(
    title: str,
    measure: Callable[[], int],
    total: int | None,
    wanted: bool | None = None,
    *,
    in_bytes: bool = True,
) -> Iterator[None]:
    """Shows a bar on stderr once the work inside has lasted 2 seconds.

    `measure` returns what is done, out of `total` where that is known, and is called
    from another thread; `wanted` None shows the bar if stderr is a terminal.
    """
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield
        return
    stop = threading.Event()
    watcher = threading.Thread(
        target=_draw, args=(stop, title, measure, total, in_bytes)
    )
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()


def _draw(
    stop: threading.Event,
    title: str,
    measure: Callable[[], int],
    total: int | None,
    in_bytes: bool,
) -> None:
    if stop.wait(PATIENCE_SECONDS):
        return
    done = 0
    with _bar(in_bytes) as bar:
        task = bar.add_task(title, total=total)
        while not stop.wait(0.25):
            # Temporary copies are counted as well, and then removed.
            done = max(done, measure())
            bar.update(task, completed=done if total is None else min(done, total))


def _bar(in_bytes: bool) -> Any:
    from rich import console, progress

    bar, _, left = progress.Progress.get_default_columns()[1:]
    done = (progress.MofNCompleteColumn(), progress.TimeElapsedColumn())
    if in_bytes:
        done = (progress.DownloadColumn(), progress.TransferSpeedColumn())
    where = console.Console(stderr=True)
    # What the caller prints meanwhile goes above the bar on a terminal, but stays on
    # stdout where a file or another program reads it.
    apart = {"console": where, "redirect_stdout": sys.stdout.isatty()}
    return progress.Progress(
        "{task.description}", bar, *done, left, transient=True, **apart
    )
