"""What a download needs of the disk: room, sizes, hashes, and an atomic landing."""

import contextlib
import hashlib
import os
import pathlib
import shutil

from jaxspec.checkpoints.progress import watching
from jaxspec.errors import UserError


def sha256(path: pathlib.Path, progress: bool | None = None) -> str:
    """Returns the SHA-256 of a file in hexadecimal, with a bar as in `watching`."""
    size = path.stat().st_size
    # Unbuffered: the bar's thread may ask for the position while this one reads.
    with (
        path.open("rb", buffering=0) as file,
        watching("checking", file.tell, size, progress),
    ):
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_bytes(folder: pathlib.Path) -> int:
    """Returns the bytes of all files below `folder`, 0 if it is not there."""
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            # Temporary files come and go while they are counted.
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def need_space(folder: pathlib.Path, needed: int) -> None:
    """Refuses with a `UserError` if fewer than `needed` bytes are free in `folder`."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"too little disk in {str(folder)!r}: {needed / 1e6:.0f} MB needed, "
            f"{free / 1e6:.0f} MB free; make room or set JAXSPEC_CACHE"
        )


def land(file: pathlib.Path, target: pathlib.Path) -> None:
    """Moves `file` to `target` of the same file system, whole or not at all."""
    with file.open("rb+") as opened:
        # A crash must not leave the new name with the old, unwritten bytes.
        os.fsync(opened.fileno())
    os.replace(file, target)
