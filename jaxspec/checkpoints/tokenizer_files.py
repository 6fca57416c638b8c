"""Reads the tokenizer of a Hugging Face folder: `tokenizer.json` and the configs."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxspec.checkpoints.fields import read_json, shown
from jaxspec.errors import UserError, refuse

_LARGEST_FILE = 256 * 2**20
_TEMPLATE = "chat_template.jinja"


def read_folder(folder: Path) -> dict[str, Any]:
    """Returns the arguments of `Tokenizer`; raises as `Tokenizer.from_folder` does."""
    backend = _backend(folder / "tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json")
    vocab = backend.get_vocab()
    size = max(vocab.values(), default=-1) + 1
    faults: list[str] = []
    named = _named_tokens(config, vocab, faults)
    own = {name: [vocab[text]] for name, text in named.items()}
    bos, eos = (
        own.get(f"{name}_token", [])
        + _config_ids(folder, f"{name}_token_id", size, faults)
        for name in ("bos", "eos")
    )
    template = _chat_template(folder, config, faults)
    with package_faults(folder / "tokenizer.json"):
        prefix = _added_prefix(backend, faults)
    refuse(faults, str(folder))
    adds_bos = config.get("add_bos_token")
    return {
        "backend": backend,
        "source": str(folder),
        "bos_id": next(iter(prefix + bos), None),
        "eos_ids": eos,
        "adds_bos": adds_bos if isinstance(adds_bos, bool) else bool(prefix),
        "chat_template": template,
        "named_tokens": named,
    }


@contextlib.contextmanager
def package_faults(path: Path) -> Iterator[None]:
    """Turns what the tokenizers package raises for a bad file into a `UserError`."""
    try:
        yield
    # Faults come as bare Exception, or as a panic, which is no Exception.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        detail = " ".join(str(error).split())
        raise UserError(
            f"{path}: not a usable tokenizer ({detail}); download it again"
        ) from None


def _backend(path: Path) -> Any:
    import tokenizers

    text = _read_text(path)
    with package_faults(path):
        return tokenizers.Tokenizer.from_str(text)


def _named_tokens(
    config: Mapping[str, Any], vocab: Mapping[str, int], faults: list[str]
) -> dict[str, str]:
    named = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text in vocab:
            named[name] = text
        elif text is not None:
            faults.append(
                f"tokenizer_config.json: {name} {shown(text)} is not in the vocabulary"
            )
    return named


def _config_ids(folder: Path, key: str, size: int, faults: list[str]) -> list[int]:
    """Every id that the generation config and the model config give for `key`."""
    ids = []
    for file in ("generation_config.json", "config.json"):
        value = _read_json(folder / file).get(key)
        listed = value if isinstance(value, list) else [value] * (value is not None)
        wrong = [v for v in listed if type(v) is not int or not 0 <= v < size]
        faults += [f"{file}: {key} {shown(v)} is not an id below {size}" for v in wrong]
        ids += [] if wrong else listed
    return ids


def _chat_template(
    folder: Path, config: Mapping[str, Any], faults: list[str]
) -> str | None:
    if (folder / _TEMPLATE).is_file():
        return _read_text(folder / _TEMPLATE)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = (entry for entry in template if isinstance(entry, dict))
        template = {e.get("name"): e.get("template") for e in named}.get("default")
    if template is None or isinstance(template, str):
        return template
    faults.append("tokenizer_config.json: chat_template is not a text")
    return None


def _added_prefix(backend: Any, faults: list[str]) -> list[int]:
    """The ids that the tokenizer's own post-processor puts before a text."""
    plain, whole = (
        backend.encode("a", add_special_tokens=special).ids for special in (False, True)
    )
    for count in (0, 1):
        if whole[count : count + len(plain)] == plain:
            return whole[:count]
    faults.append(
        f"tokenizer.json makes {whole} of {plain}: expected at most one BOS before a "
        "text; this kind of post-processor is not supported"
    )
    return []


def _read_json(path: Path) -> dict[str, Any]:
    """The object in an optional JSON file; empty if there is no such file."""
    return read_json(path) if path.is_file() else {}


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise ValueError(f"over {_LARGEST_FILE} bytes")
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
