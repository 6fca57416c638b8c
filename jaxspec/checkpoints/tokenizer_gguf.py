"""Builds the tokenizer that the metadata of a GGUF file describes."""

import collections
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from jaxspec.checkpoints.fields import shown
from jaxspec.checkpoints.gguf_header import LazyArray, read_header
from jaxspec.checkpoints.tokenizer_files import package_faults
from jaxspec.errors import UserError, refuse

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
# What a chat template calls a token, and what the file calls its id.
_NAMED = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
# Types of the tokens.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5

# The split of each named pre-tokenizer, before the byte-level alphabet is applied.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"qwen2": _WORDS % r"\p{N}", "llama-bpe": _WORDS % r"\p{N}{1,3}"}
_PRE_TOKENIZERS = ("gpt-2", "llama-bpe", "qwen2", "smollm")


def read_gguf(path: Path) -> dict[str, Any]:
    """Returns the arguments of `Tokenizer`; raises as `Tokenizer.from_gguf` does."""
    fields = _fields(path)
    refuse(_faults(fields), str(path))
    tokens, types = fields["tokens"], fields["token_type"]
    is_bytes = fields["model"] == "gpt2"
    with package_faults(path):
        backend = _byte_level(fields) if is_bytes else _sentencepiece(fields)
        _add_tokens(backend, fields)
    # What llama.cpp does with a file that does not say.
    adds_bos = not is_bytes or fields["pre"] == "llama-bpe"
    eos = [fields.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    named = {name: fields.get(f"{key}_token_id") for name, key in _NAMED.items()}
    return {
        "backend": backend,
        "source": str(path),
        "bos_id": named["bos"],
        "eos_ids": [index for index in eos if index is not None],
        "adds_bos": bool(fields.get("add_bos_token", adds_bos)),
        "chat_template": fields.get(_TEMPLATE),
        "unused": [index for index, kind in enumerate(types) if kind == _UNUSED],
        "named_tokens": {
            f"{name}_token": tokens[i] for name, i in named.items() if i is not None
        },
    }


def _fields(path: Path) -> dict[str, Any]:
    """The tokenizer's metadata, without the common prefix of the keys."""
    fields = {}
    for key, value in read_header(path).metadata.items():
        if key.startswith((_PREFIX, _TEMPLATE)):
            try:
                value = value.read() if isinstance(value, LazyArray) else value
            except UserError as error:
                raise UserError(f"{path}: {key}: {error}") from None
            fields[key.removeprefix(_PREFIX)] = value
    tokens = fields.get("tokens")
    if fields.get("model") == "llama" and _is_list(tokens, str):
        # GGUF writers turn the space mark into a space in user-defined tokens; the
        # model sees text in which every space is the mark.
        fields["tokens"] = [t if t.strip(" ") else "▁" * len(t) for t in tokens]
    return fields


def _faults(fields: dict[str, Any]) -> list[str]:
    """What keeps the fields from being used; token types that lack are filled in."""
    tokens = fields.get("tokens")
    if not _is_list(tokens, str) or not tokens:
        return [f"{_PREFIX}tokens is missing or not a list of texts"]
    size, faults = len(tokens), []
    twice = [t for t, count in collections.Counter(tokens).items() if count > 1]
    if twice:
        faults.append(f"token {shown(twice[0])} occurs twice in {_PREFIX}tokens")
    types = fields.setdefault("token_type", [_NORMAL] * size)
    if not _is_list(types, int) or len(types) != size:
        faults.append(f"{_PREFIX}token_type does not match the tokens")
    for name in ("bos", "eos", "eot", "eom", "padding", "unknown"):
        value = fields.get(f"{name}_token_id", 0)
        if type(value) is not int or not 0 <= value < size:
            faults.append(f"{_PREFIX}{name}_token_id {shown(value)} is not an id")
    if not isinstance(fields.get(_TEMPLATE, ""), str):
        faults.append(f"{_TEMPLATE} is not a text")
    return faults + _model_faults(fields, size)


def _model_faults(fields: Mapping[str, Any], size: int) -> list[str]:
    model, faults = fields.get("model"), []
    if model == "gpt2":
        if fields.get("pre") not in _PRE_TOKENIZERS:
            found, known = shown(fields.get("pre")), ", ".join(_PRE_TOKENIZERS)
            faults.append(f"{_PREFIX}pre is {found}, expected one of {known}")
        merges = fields.get("merges")
        if not _is_list(merges, str) or any(m.count(" ") != 1 for m in merges):
            faults.append(f"{_PREFIX}merges is missing or not a list of pairs")
    elif model == "llama":
        scores = fields.get("scores")
        if not _is_list(scores, float) or len(scores) != size:
            faults.append(f"{_PREFIX}scores does not match the tokens")
    else:
        faults.append(f"{_PREFIX}model is {shown(model)}, expected 'gpt2' or 'llama'")
    return faults


def _is_list(value: Any, kind: type) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and all(type(entry) is kind for entry in value)


def _byte_level(fields: Mapping[str, Any]) -> Any:
    """Byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM have it."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    pre = fields["pre"]
    vocab = {token: index for index, token in enumerate(fields["tokens"])}
    pairs = [tuple(merge.split(" ")) for merge in fields["merges"]]
    # Llama 3's tokenizer takes a word that is a token whole, whatever the merges say.
    backend = Tokenizer(models.BPE(vocab, pairs, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(name: str) -> Any:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    whole = ByteLevel(add_prefix_space=False, use_regex=name not in _SPLITS)
    if name == "smollm":
        return Sequence([Digits(individual_digits=True), whole])
    if name in _SPLITS:
        return Sequence([Split(Regex(_SPLITS[name]), behavior="isolated"), whole])
    return whole


def _sentencepiece(fields: Mapping[str, Any]) -> Any:
    """SentencePiece BPE with byte fallback; the merges come from the scores."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, unknown = fields["tokens"], fields.get("unknown_token_id")
    model = models.BPE(
        {token: index for index, token in enumerate(tokens)},
        _merges_from_scores(tokens, fields["token_type"], fields["scores"]),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    mark = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get("add_space_prefix", True):
        mark = normalizers.Sequence([normalizers.Prepend("▁"), mark])
        steps.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = mark
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(
    tokens: list[str], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """Every split of a token into two tokens, ranked as SentencePiece joins them.

    User-defined tokens come first whatever their score (SentencePiece never splits
    them); then the better score; then the smaller id; then the shorter left part.
    """
    rank = {
        token: (kind != _USER_DEFINED, -score, index)
        for index, (token, kind, score) in enumerate(
            zip(tokens, types, scores, strict=True)
        )
        if kind in (_NORMAL, _USER_DEFINED)
    }
    return [
        (token[:cut], token[cut:])
        for token in sorted(rank, key=rank.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in rank and token[cut:] in rank
    ]


def _add_tokens(backend: Any, fields: Mapping[str, Any]) -> None:
    """Keeps control and user-defined tokens whole wherever they stand in a text."""
    from tokenizers import AddedToken

    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(fields["tokens"], fields["token_type"], strict=True)
        if kind == _CONTROL or (kind == _USER_DEFINED and token.strip("▁"))
    ]
    backend.add_tokens(added)
