"""What a download asks of the disk: a hash, the bytes so far, and room."""

import contextlib
import hashlib
import os
import pathlib
import shutil

from jaxspec.errors import UserError


def sha256(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
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
    """Raises a `UserError` if fewer than `needed` bytes are free in `folder`."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"too little disk: {needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free "
            f"in {str(folder)!r}; make room or set JAXSPEC_CACHE"
        )


def content_sha256(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a model file, or of all that a model's folder holds."""
    if path.is_file():
        return sha256(path)
    whole = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            name = file.relative_to(path).as_posix()
            whole.update(f"{name}\0{sha256(file)}\n".encode())
    return whole.hexdigest()
