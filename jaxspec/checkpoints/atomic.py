"""Writing files as a whole or not at all."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


def replace(path: Path, content: bytes) -> None:
    """Writes a file under another name first: nobody ever sees a part of it."""
    with _partial(path, content) as partial:
        partial.replace(path)


def create(path: Path, content: bytes) -> None:
    """Writes a file as `replace` does, but leaves one alone that is there already.

    Of several that create it at once one succeeds, and all find what that one wrote.
    """
    with _partial(path, content) as partial:
        try:
            os.link(partial, path)
        except OSError:
            # It is there already, or the file system has no hard links.
            if not path.exists():
                partial.replace(path)


@contextlib.contextmanager
def _partial(path: Path, content: bytes) -> Iterator[Path]:
    """The content under a name that is nobody else's, gone at the end."""
    # Two machines that share a folder may have the same process ids.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield partial
    finally:
        partial.unlink(missing_ok=True)
