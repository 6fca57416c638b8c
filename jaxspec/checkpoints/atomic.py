"""Writing files as a whole or not at all."""

import os
from pathlib import Path


def replace(path: Path, content: bytes) -> None:
    """Writes a file under another name first: nobody ever sees a part of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
