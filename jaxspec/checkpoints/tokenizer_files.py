"""Reads the tokenizer of a Hugging Face folder: `tokenizer.json` and the configs."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxspec.checkpoints.fields import shown
from jaxspec.errors import UserError, refuse

_LARGEST_FILE = 256 * 2**20
_TEMPLATE = "chat_template.jinja"


def read_folder(folder: Path) -> dict[str, Any]:
    """Returns the arguments of `Tokenizer` that a model folder describes.

    Raises:
        UserError: a file is missing, does not parse, or names ids or tokens that the
            vocabulary lacks.
    """
    backend = _backend(folder / "tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json")
    vocab = backend.get_vocab()
    faults: list[str] = []
    named = _named_tokens(config, vocab, faults)
    own = {name: [vocab[text]] for name, text in named.items()}
    configs = _model_configs(folder)
    bos, eos = (
        own.get(f"{name}_token", [])
        + _config_ids(configs, f"{name}_token_id", max(vocab.values()) + 1, faults)
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
    except UserError:
        raise
    # Faults come as bare Exception, or as a panic, which is no Exception.
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"
        if not panic and not isinstance(error, Exception):
            raise
        detail = " ".join(str(error).split())
        raise UserError(
            f"{path}: not a usable tokenizer ({detail}); download it again"
        ) from None


def _backend(path: Path) -> Any:
    import tokenizers

    text = _read_text(path)
    with package_faults(path):
        backend = tokenizers.Tokenizer.from_str(text)
        if not backend.get_vocab():
            raise ValueError("its vocabulary is empty")
    return backend


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


def _model_configs(folder: Path) -> dict[str, Mapping[str, Any]]:
    """The configs that may name the ids of BOS and EOS, by their places."""
    model = _read_json(folder / "config.json")
    text = model.get("text_config")
    return {
        "generation_config.json": _read_json(folder / "generation_config.json"),
        "config.json": model,
        "config.json: text_config": text if isinstance(text, dict) else {},
    }


def _config_ids(
    configs: Mapping[str, Mapping[str, Any]], key: str, size: int, faults: list[str]
) -> list[int]:
    ids = []
    for place, config in configs.items():
        ids += _checked_ids(config.get(key), f"{place}: {key}", size, faults)
    return ids


def _checked_ids(value: Any, where: str, size: int, faults: list[str]) -> list[int]:
    """The ids in `value`: none, one or a list; a wrong one becomes a fault."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    wrong = [v for v in values if type(v) is not int or not 0 <= v < size]
    if wrong:
        faults.append(f"{where} {shown(wrong[0])} is not an id of the {size} tokens")
    return [] if wrong else values


def _chat_template(
    folder: Path, config: Mapping[str, Any], faults: list[str]
) -> str | None:
    if (folder / _TEMPLATE).is_file():
        return _read_text(folder / _TEMPLATE)
    template = config.get("chat_template")
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        by_name = {entry.get("name"): entry.get("template") for entry in entries}
        template = by_name.get("default")
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
    if not path.is_file():
        return {}
    try:
        values = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds {shown(values)}, expected a JSON object")
    return values


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_FILE + 1)
        if len(text) > _LARGEST_FILE:
            raise UserError(f"{path}: over {_LARGEST_FILE} bytes; download it again")
        return text.decode()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text; download it again") from None
