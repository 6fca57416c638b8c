"""Files here and in a bucket, behind the same few verbs.

A `pathlib.Path` is a local file. Any other path, in practice an `etils.epath.Path`, is
an object of a bucket: it is there as a whole or not at all, and nothing can be added to
it. A path object is taken as it is given, so that a test may hand in an `epath.Path` of
a local folder for a bucket.
"""

import contextlib
import importlib.util
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeAlias

from jaxspec.checkpoints import atomic
from jaxspec.errors import UserError

AnyPath: TypeAlias = Any
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_OBJECT = re.compile(r"gs://[^/]+/.*[^/]")


def as_path(name: str | AnyPath) -> AnyPath:
    """The path of a name, local or `gs://BUCKET/NAME`; a path object is its own.

    Raises:
        UserError: another scheme, no name in the bucket, or a package is missing.
    """
    if not isinstance(name, str):
        return name
    if not _SCHEME.match(name):
        return pathlib.Path(name)
    if not _OBJECT.fullmatch(name):
        raise UserError(f"{name}: expected a local path or gs://BUCKET/NAME")
    # etils itself comes with other packages, and fails only when a file is opened.
    packages = ("etils", "gcsfs"), ("etils", "tensorflow")
    if not any(all(map(importlib.util.find_spec, each)) for each in packages):
        raise UserError(
            f"{name}: a package for Google Cloud Storage is missing; "
            "pip install 'jaxspec-decoding[gcs]'"
        )
    from etils import epath

    return epath.Path(name)


def is_local(path: AnyPath) -> bool:
    """Whether records can be added to this file."""
    return isinstance(path, pathlib.Path)


@contextlib.contextmanager
def reaching(path: AnyPath) -> Iterator[None]:
    """What a file system raises becomes a `UserError` that names the path."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise UserError(f"{path}: {reason}") from error
    except Exception as error:
        if is_local(path):
            raise
        # Credentials, quota, the network: each library of the cloud has its own.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path}: {reason}") from error


def replace(path: AnyPath, content: bytes) -> None:
    """Writes a small file as a whole."""
    _put(path, content, atomic.replace)


def create(path: AnyPath, content: bytes) -> None:
    """Writes a small file as a whole, if there is none; a bucket's is overwritten."""
    _put(path, content, atomic.create)


def _put(path: AnyPath, content: bytes, put: Callable[[Any, bytes], None]) -> None:
    if is_local(path):
        put(path, content)
        sync_folder(path.parent)
    else:
        path.write_bytes(content)


@contextlib.contextmanager
def writing(path: AnyPath) -> Iterator[IO[bytes]]:
    """A file that takes its name when all is written, and never if that fails.

    A bucket gets it by another name first as well: closing an object that was written
    in part, as an exception does, makes a part of it the whole.
    """
    partial = partial_of(path)
    with partial.open("wb") as file:
        yield file
        if is_local(path):
            file.flush()
            os.fsync(file.fileno())
    partial.replace(path)
    if is_local(path):
        sync_folder(path.parent)


def partial_of(path: AnyPath) -> AnyPath:
    """Where `writing` has what is not whole yet."""
    return path.with_name(f".{path.name}.partial")


def size_of(path: AnyPath) -> int | None:
    """The bytes of a file, or None if it is not there."""
    _forget_listings(path)
    if not path.exists():
        return None
    return path.stat().st_size if is_local(path) else path.stat().length


def names_in(folder: AnyPath) -> list[str]:
    """The names in a folder, sorted; none if there is no such folder."""
    _forget_listings(folder)
    # A bucket may not know a folder in which nothing is.
    with contextlib.suppress(FileNotFoundError):
        return sorted(path.name for path in folder.iterdir())
    return []


def _forget_listings(path: AnyPath) -> None:
    """Looks anew: what other processes wrote is not in a listing kept from before."""
    if is_local(path):
        return
    from etils.epath import backend

    # With tensorflow in the place of gcsfs there is no such cache.
    with contextlib.suppress(ImportError):
        backend.fsspec_backend.fs(path).invalidate_cache()


def sync_folder(folder: pathlib.Path) -> None:
    """Makes the names in a local folder outlast a power cut."""
    # Not every system can open or sync a folder; its files were synced all the same.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
