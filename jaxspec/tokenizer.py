"""Text to token ids and back: Hugging Face folders, GGUF files, chat templates.

Everything read here comes from a model's files and is checked before it is used;
chat templates are programs, so they run in a sandbox with bounds on size and work.
"""

import contextlib
import datetime
import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.errors import UserError, refuse

MAX_TEMPLATE = 64 * 1024
MAX_RENDERED = 4 * 1024 * 1024
MAX_STEPS = 1_000_000
MAX_RANGE = 100_000
# Sixteen times the widest vocabulary in use: a larger id is a fault, and costs memory.
MAX_ID = 1 << 22
MAX_FILE = 256 * 1024 * 1024

# Tokens that end an assistant's turn; instruct models sample them instead of EOS.
END_OF_TURN = (
    "<|im_end|>",
    "<end_of_turn>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_turn|>",
)

# The split of each named pre-tokenizer, before the byte-level alphabet is applied.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"qwen2": _WORDS % r"\p{N}", "llama-bpe": _WORDS % r"\p{N}{1,3}"}
_PRE_TOKENIZERS = ("gpt-2", "llama-bpe", "qwen2", "smollm")

# Token types of a GGUF vocabulary.
_GGUF_NAMED = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


class Tokenizer:
    """A model's tokenizer: ids of texts and chats, texts of ids.

    Attributes:
        vocab_size: one past the largest id the tokenizer knows; the model's logits
            may be wider (padding).
        bos_id: the id that begins a text, or None.
        eos_ids: every id that ends a generation: the union of what the generation
            config, the tokenizer and the model config name, and, for a chat model,
            the special token that ends a turn in its template.
        adds_bos: whether a plain text gets a BOS.
        chat_template: the source of the chat template, or None.
        source: the file or folder it was read from, for messages.
    """

    def __init__(
        self,
        backend: Any,
        *,
        source: str,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        adds_bos: bool = False,
        chat_template: str | None = None,
        unused: Iterable[int] = (),
        named_tokens: Mapping[str, str] | None = None,
    ):
        # A file may ask for cut, padded or random encodings: wrong for a prompt.
        backend.no_truncation()
        backend.no_padding()
        if getattr(backend.model, "dropout", None):
            backend.model.dropout = None
        self._backend = backend
        self._tokens = _tokens_by_id(backend)
        unused_ids = set(unused)
        size = len(self._tokens)
        self.vocab_size = size
        while size and (self._tokens[size - 1] is None or size - 1 in unused_ids):
            size -= 1
        self._used_size = size
        self.source = source
        self.bos_id = bos_id
        self.adds_bos = adds_bos and bos_id is not None
        self.chat_template = chat_template
        self._named_tokens = dict(named_tokens or {})
        self.eos_ids = frozenset(eos_ids) | {
            index
            for index, entry in backend.get_added_tokens_decoder().items()
            if entry.special
            and entry.content in END_OF_TURN
            and entry.content in (chat_template or "")
        }

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """Reads a Hugging Face folder: `tokenizer.json` and the configs beside it.

        Raises:
            UserError: a file is missing, does not parse, or names ids or tokens
                that the vocabulary lacks.
        """
        return _from_folder(cls, Path(path))

    @classmethod
    def from_gguf(cls, path: str | Path) -> "Tokenizer":
        """Builds the tokenizer that a GGUF file's metadata describes.

        Raises:
            UserError: the file is cut or corrupt, or its tokenizer is of a kind that
                is not supported (named in the message).
        """
        return _from_gguf(cls, Path(path))

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Returns the ids of `text`; special tokens in it stay whole.

        Args:
            text: any text; empty gives `[bos]` or `[]`.
            add_bos: None follows the model. A text that begins with BOS gets no second.

        Raises:
            UserError: `text` is not valid Unicode text, or a BOS is asked of a
                tokenizer that has none.
        """
        if add_bos and self.bos_id is None:
            raise UserError(
                f"add_bos=True: the tokenizer of {self.source} has no BOS token; "
                "leave add_bos at None"
            )
        if not isinstance(text, str):
            kind = type(text).__name__
            raise UserError(f"text is of type {kind}, expected str; pass one string")
        try:
            ids = list(self._backend.encode(text, add_special_tokens=False).ids)
        except (TypeError, UnicodeError) as error:
            raise UserError(
                f"text is not valid Unicode ({error}); remove lone surrogates"
            ) from None
        wants_bos = self.adds_bos if add_bos is None else add_bos
        if wants_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Returns the ids of the rendered chat: `encode(render_chat(...))`, one BOS."""
        rendered = self.render_chat(
            messages, add_generation_prompt=add_generation_prompt
        )
        return self.encode(rendered)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Returns the text that the model's chat template makes of `messages`.

        Args:
            messages: a list of `{"role": str, "content": str}`.
            add_generation_prompt: whether to open the assistant's turn.

        Raises:
            UserError: the model has no template, the messages are malformed or
                refused by the template, or the template breaks a bound.
        """
        if self.chat_template is None:
            raise UserError(
                f"{self.source} has no chat template; encode the prompt as plain text, "
                "or use an instruct model"
            )
        _check_messages(messages)
        variables = {
            **self._named_tokens,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        return self._compiled_template(variables)

    @functools.cached_property
    def _compiled_template(self) -> Any:
        return _compile_template(self.chat_template or "", self.source)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Returns the text of `ids`; ids past the vocabulary (padding) have none."""
        known = [int(i) for i in ids if 0 <= int(i) < self.vocab_size]
        return self._backend.decode(known, skip_special_tokens=skip_special)

    def token(self, token_id: int) -> str:
        """Returns the vocabulary's spelling of one id, for messages."""
        known = 0 <= token_id < self.vocab_size
        text = self._tokens[token_id] if known else None
        return f"<no token {token_id}>" if text is None else text

    def first_difference(self, other: "Tokenizer") -> tuple[int, str, str] | None:
        """Returns the first id whose token differs, and both tokens; None if equal.

        Only ids in use in both are compared: padding and unused entries at the end of
        either vocabulary do not count.
        """
        size = min(self._used_size, other._used_size)
        if self._tokens[:size] == other._tokens[:size]:
            return None
        for index in range(size):
            if self._tokens[index] != other._tokens[index]:
                return index, self.token(index), other.token(index)
        return None

    @functools.cached_property
    def _plain_id(self) -> int:
        """The id of some token that is text by itself."""
        for index in range(self.vocab_size):
            text = self.decode([index])
            if text.strip() and "\ufffd" not in text:
                return index
        return 0

    def stream_decoder(self, *, skip_special: bool = True) -> "StreamDecoder":
        """Returns a decoder that is fed ids as they come."""
        return StreamDecoder(self, skip_special=skip_special)


class StreamDecoder:
    """Turns ids into text piece by piece, never cutting a character.

    The pieces, joined, are what `Tokenizer.decode` gives for all ids; where a model
    writes bytes that are no text, the number of replacement marks may differ.
    """

    # The most replacement marks that an unfinished character can leave: UTF-8 takes
    # up to four bytes, three of which may be there already.
    _UNFINISHED = 3

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True):
        self._decode = functools.partial(tokenizer.decode, skip_special=skip_special)
        # Decoders treat the start of a text apart, so later text follows this token.
        self._context = [tokenizer._plain_id]
        self._context_size = len(self._decode(self._context))
        self._window: list[int] = []
        self._emitted = 0

    def push(self, ids: Iterable[int]) -> str:
        """Returns the text that `ids` complete; the rest waits for the next call."""
        return "".join([self._push_one(int(token)) for token in ids])

    def flush(self) -> str:
        """Returns what is still held back (a character never finished) and resets."""
        piece = self._decode(self._window)[self._emitted :]
        self._window, self._emitted = [], 0
        return piece

    def _push_one(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        marks = len(text) - len(text.rstrip("\ufffd"))
        piece = text[self._emitted : len(text) - min(marks, self._UNFINISHED)]
        self._emitted += len(piece)
        if text and not marks:
            self._window, self._emitted = list(self._context), self._context_size
        return piece


def _tokens_by_id(backend: Any) -> list[str | None]:
    vocabulary = backend.get_vocab(with_added_tokens=True)
    tokens: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for text, index in vocabulary.items():
        tokens[index] = text
    return tokens


# --- Hugging Face folders ---


def _from_folder(kind: type[Tokenizer], folder: Path) -> Tokenizer:
    backend = _backend_from_json(folder / "tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json")
    vocab = backend.get_vocab()
    faults: list[str] = []
    named = {
        name: _named_token(config.get(name), name, vocab, faults)
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
    }
    named = {name: text for name, text in named.items() if text is not None}
    bos, eos = _ids_of_the_configs(folder, max(vocab.values()) + 1, faults)
    template = _folder_template(folder, config, faults)
    with _faults_of_the_package(folder / "tokenizer.json"):
        prefix = _added_prefix(backend, vocab, faults)
    refuse(faults, str(folder))
    own = {name: [vocab[text]] for name, text in named.items()}
    adds_bos = config.get("add_bos_token")
    return kind(
        backend,
        source=str(folder),
        bos_id=next(iter([*prefix, *own.get("bos_token", []), *bos]), None),
        eos_ids=[*own.get("eos_token", []), *eos],
        adds_bos=adds_bos if isinstance(adds_bos, bool) else bool(prefix),
        chat_template=template,
        named_tokens=named,
    )


def _ids_of_the_configs(
    folder: Path, size: int, faults: list[str]
) -> tuple[list[int], list[int]]:
    """The BOS and EOS ids that the model's configs name."""
    model = _read_json(folder / "config.json")
    inner = model.get("text_config")
    places = {
        "generation_config.json": _read_json(folder / "generation_config.json"),
        "config.json": model,
        "config.json: text_config": inner if isinstance(inner, dict) else {},
    }
    bos, eos = (
        [
            token
            for place, values in places.items()
            for token in _id_list(values.get(key), f"{place}: {key}", size, faults)
        ]
        for key in ("bos_token_id", "eos_token_id")
    )
    return bos, eos


def _backend_from_json(path: Path) -> Any:
    import tokenizers

    text = _read_text(path)
    _check_tokenizer_json(_parse_json(text, path), path)
    with _faults_of_the_package(path):
        return tokenizers.Tokenizer.from_str(text)


@contextlib.contextmanager
def _faults_of_the_package(path: Path) -> Iterator[None]:
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
        raise UserError(
            f"{path}: not a usable tokenizer ({error}); download it again"
        ) from None


def _check_tokenizer_json(data: Mapping[str, Any], path: Path) -> None:
    faults = []
    model = data.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(model, dict):
        faults.append("has no 'model' object")
    elif not isinstance(vocab, dict | list) or not vocab:
        faults.append("model has no 'vocab'")
    elif model.get("type") == "BPE" and not isinstance(model.get("merges"), list):
        faults.append("model has no 'merges' list")
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    added = data.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(a, dict) for a in added):
        faults.append("'added_tokens' is not a list of objects")
    else:
        ids += [entry.get("id") for entry in added]
    wrong = [i for i in ids if type(i) is not int or not 0 <= i < MAX_ID]
    if wrong:
        faults.append(f"token id {wrong[0]!r} is outside 0..{MAX_ID - 1}")
    merges = model.get("merges") if isinstance(model, dict) and not faults else None
    # With a prefix on inner pieces, joining is more than putting side by side.
    prefixed = isinstance(model, dict) and model.get("continuing_subword_prefix")
    if isinstance(merges, list) and isinstance(vocab, dict) and not prefixed:
        faults += _merge_faults(merges, vocab)
    refuse(faults, str(path))


def _merge_faults(merges: Iterable[Any], vocab: Mapping[str, int]) -> list[str]:
    """The first merge that is no pair of known tokens with a known result."""
    for line, merge in enumerate(merges):
        if isinstance(merge, str) and merge.startswith("#version"):
            continue
        pair = merge.split(" ") if isinstance(merge, str) else merge
        whole = isinstance(pair, list | tuple) and len(pair) == 2
        if not whole or not all(isinstance(part, str) for part in pair):
            return [f"merge {line} ({merge!r}) is not a pair of tokens"]
        for token in (*pair, pair[0] + pair[1]):
            if token not in vocab:
                return [f"merge {line} names {token!r}, which is not in the vocabulary"]
    return []


def _read_json(path: Path) -> dict[str, Any]:
    """The object in an optional JSON file; empty if there is no such file."""
    return _parse_json(_read_text(path), path) if path.is_file() else {}


def _parse_json(text: str, path: Path) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: not valid JSON ({error}); download it again"
        ) from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds no JSON object; download it again")
    return data


def _read_text(path: Path) -> str:
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected a Hugging Face model folder")
    if path.stat().st_size > MAX_FILE:
        raise UserError(f"{path}: larger than {MAX_FILE} bytes; download it again")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}); download it again"
        ) from None


def _named_token(
    value: Any, name: str, vocab: Mapping[str, int], faults: list[str]
) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    if text is None:
        return None
    if not isinstance(text, str) or text not in vocab:
        faults.append(
            f"tokenizer_config.json: {name} {text!r} is not in the vocabulary"
        )
        return None
    return text


def _id_list(value: Any, where: str, size: int, faults: list[str]) -> list[int]:
    values = [] if value is None else value if isinstance(value, list) else [value]
    wrong = [v for v in values if type(v) is not int or not 0 <= v < size]
    if wrong:
        faults.append(f"{where} {wrong[0]!r} is not an id of the {size} tokens")
    return [v for v in values if v not in wrong]


def _added_prefix(
    backend: Any, vocab: Mapping[str, int], faults: list[str]
) -> list[int]:
    """The ids that the tokenizer's own post-processor puts before a text."""
    texts = itertools.chain("a", vocab)
    text = next((t for t in texts if backend.encode(t, add_special_tokens=False)), "")
    plain = backend.encode(text, add_special_tokens=False).ids
    whole = backend.encode(text, add_special_tokens=True).ids
    starts = range(len(whole) - len(plain) + 1)
    start = next((i for i in starts if whole[i : i + len(plain)] == plain), 2)
    if start > 1:
        faults.append(
            f"tokenizer.json puts {whole} for {plain}: expected at most one BOS before "
            "a text; this kind of post-processor is not supported"
        )
    return whole[:start]


def _folder_template(
    folder: Path, config: Mapping[str, Any], faults: list[str]
) -> str | None:
    template = config.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        template = _read_text(folder / "chat_template.jinja")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        default = [e.get("template") for e in named if e.get("name") == "default"]
        template = default[0] if default else None
    if template is not None and not isinstance(template, str):
        faults.append("tokenizer_config.json: chat_template is not a text")
        return None
    return template


# --- GGUF files ---


def _from_gguf(kind: type[Tokenizer], path: Path) -> Tokenizer:
    fields = _tokenizer_fields(path)
    tokens, types = _gguf_vocabulary(fields, path)
    faults: list[str] = []

    def ids(name: str) -> list[int]:
        key = f"tokenizer.ggml.{name}_token_id"
        return _id_list(fields.get(key), key, len(tokens), faults)

    eos = ids("eos") + ids("eot") + ids("eom")
    named = {name: ids(key) for name, key in _GGUF_NAMED.items()}
    template = fields.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        faults.append("tokenizer.chat_template is not a text")
    refuse(faults, str(path))
    is_bytes = fields["tokenizer.ggml.model"] == "gpt2"
    build = _byte_level_backend if is_bytes else _sentencepiece_backend
    with _faults_of_the_package(path):
        backend = build(fields, types, path)
    # What llama.cpp does with a file that does not say.
    by_default = not is_bytes or fields.get("tokenizer.ggml.pre") == "llama-bpe"
    return kind(
        backend,
        source=str(path),
        bos_id=named["bos"][0] if named["bos"] else None,
        eos_ids=eos,
        adds_bos=bool(fields.get("tokenizer.ggml.add_bos_token", by_default)),
        chat_template=template,
        unused=[i for i, t in enumerate(types) if t == _UNUSED],
        named_tokens={f"{n}_token": tokens[i[0]] for n, i in named.items() if i},
    )


def _gguf_vocabulary(
    fields: Mapping[str, Any], path: Path
) -> tuple[list[str], list[int]]:
    """The tokens, all different, and their types."""
    tokens = fields.get("tokenizer.ggml.tokens", [])
    types = fields.get("tokenizer.ggml.token_type")
    model = fields.get("tokenizer.ggml.model")
    faults = []
    if model not in ("gpt2", "llama"):
        faults.append(f"tokenizer.ggml.model is {model!r}, expected 'gpt2' or 'llama'")
    if not _is_list(tokens, str) or not 0 < len(tokens) <= MAX_ID:
        refuse([*faults, "tokenizer.ggml.tokens is missing or no texts"], str(path))
    if types is None:
        types = [_NORMAL] * len(tokens)
    if not _is_list(types, int) or len(types) != len(tokens):
        faults.append("tokenizer.ggml.token_type does not match the tokens")
    ids = {token: index for index, token in enumerate(tokens)}
    twice = next((t for i, t in enumerate(tokens) if ids[t] != i), None)
    if twice is not None:
        faults.append(f"token {twice!r} occurs twice in tokenizer.ggml.tokens")
    refuse(faults, str(path))
    return tokens, types


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(v) is kind for v in value)


def _byte_level_backend(fields: Mapping[str, Any], types: list[int], path: Path) -> Any:
    """Byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM have it."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = fields.get("tokenizer.ggml.merges")
    pre = fields.get("tokenizer.ggml.pre")
    vocab = {token: index for index, token in enumerate(tokens)}
    faults = []
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        faults.append(f"tokenizer.ggml.pre is {pre!r}, expected one of {known}")
    if isinstance(merges, list):
        faults += _merge_faults(merges, vocab)
    else:
        faults.append("tokenizer.ggml.merges is missing or not a list")
    refuse(faults, str(path))
    pairs = [tuple(merge.split(" ")) for merge in merges or []]
    # Llama 3's tokenizer takes a word that is a token whole, whatever the merges say.
    model = models.BPE(vocab, pairs, ignore_merges=pre == "llama-bpe")
    backend = Backend(model)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(str(pre))
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, tokens, types)
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


def _sentencepiece_backend(
    fields: Mapping[str, Any], types: list[int], path: Path
) -> Any:
    """SentencePiece BPE with byte fallback; the merges come from the scores."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    # GGUF writers turn the space mark into a space in user-defined tokens; the model
    # sees text in which every space is the mark.
    tokens = [
        "▁" * len(token) if token and not token.strip(" ") else token
        for token in fields["tokenizer.ggml.tokens"]
    ]
    scores = fields.get("tokenizer.ggml.scores")
    vocab = {token: index for index, token in enumerate(tokens)}
    if not isinstance(scores, list) or list(map(type, scores)) != [float] * len(tokens):
        raise UserError(f"{path}: tokenizer.ggml.scores does not match the tokens")
    if len(vocab) < len(tokens):
        raise UserError(f"{path}: a run of spaces occurs twice among the tokens")
    unknown = fields.get("tokenizer.ggml.unknown_token_id")
    model = models.BPE(
        vocab,
        _merges_from_scores(tokens, types, scores),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Backend(model)
    mark = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        mark = normalizers.Sequence([normalizers.Prepend("▁"), mark])
        steps.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = mark
    backend.decoder = decoders.Sequence(steps)
    _add_tokens(backend, tokens, types)
    return backend


def _merges_from_scores(
    tokens: list[str], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """Every split of a token into two tokens, ranked as SentencePiece joins them.

    User-defined tokens come first whatever their score (SentencePiece never splits
    them); then the better score; then the smaller id; then the shorter left part.
    """
    mergeable = {
        token: (kind != _USER_DEFINED, -score, index)
        for index, (token, kind, score) in enumerate(
            zip(tokens, types, scores, strict=True)
        )
        if kind in (_NORMAL, _USER_DEFINED)
    }
    merges = []
    for token in sorted(mergeable, key=mergeable.__getitem__):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                merges.append((left, right))
    return merges


def _add_tokens(backend: Any, tokens: list[str], types: list[int]) -> None:
    from tokenizers import AddedToken

    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, types, strict=True)
        if kind == _CONTROL or (kind == _USER_DEFINED and token.strip("▁"))
    ]
    backend.add_tokens(added)


def _tokenizer_fields(path: Path) -> dict[str, Any]:
    from jaxspec.checkpoints.gguf_header import LazyArray, read_header

    fields = {}
    for key, value in read_header(path).metadata.items():
        if key.startswith("tokenizer."):
            try:
                fields[key] = value.read() if isinstance(value, LazyArray) else value
            except UserError as error:
                raise UserError(f"{path}: {key}: {error}") from None
    return fields


# --- Chat templates ---


def _check_messages(messages: Any) -> None:
    expected = 'expected a list of {"role": str, "content": str}'
    if not isinstance(messages, list | tuple) or not messages:
        raise UserError(f"messages is no list with entries; {expected}")
    faults = [
        f"message {index}: {key!r} is missing or not a text"
        if isinstance(message, Mapping)
        else f"message {index} is of type {type(message).__name__}"
        for index, message in enumerate(messages)
        for key in ("role", "content")
        if not isinstance(message, Mapping) or not isinstance(message.get(key), str)
    ]
    refuse(list(dict.fromkeys(faults)), expected)


def _compile_template(source: str, where: str) -> Any:
    """Returns `render(variables) -> str` for a template, run within bounds."""
    advice = "use the template of the original model"
    if len(source) > MAX_TEMPLATE:
        raise UserError(
            f"{where}: the chat template has {len(source)} characters, more than "
            f"{MAX_TEMPLATE}; {advice}"
        )
    environment = _chat_environment()
    try:
        template = environment.compile_bounded(source)
    # A template can raise whatever an expression can: it is the file's code.
    except Exception as error:
        raise UserError(
            f"{where}: the chat template does not compile: {error}; {advice}"
        ) from None

    def render(variables: Mapping[str, Any]) -> str:
        environment.steps_left = MAX_STEPS
        try:
            return _joined_within(template.generate(**variables), MAX_RENDERED)
        except Exception as error:
            raise UserError(
                f"{where}: the chat template refused the messages or failed: {error}; "
                f"check roles and their order, or {advice}"
            ) from None

    return render


def _joined_within(pieces: Iterable[str], limit: int) -> str:
    parts, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > limit:
            raise OverflowError(f"a text of more than {limit} characters")
        parts.append(piece)
    return "".join(parts)


@functools.cache
def _sandbox_class() -> Any:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return type("ChatSandbox", (_Bounds, ImmutableSandboxedEnvironment), {})


def _chat_environment() -> Any:
    from jinja2 import pass_context

    environment = _sandbox_class()(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
    )
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        range=_bounded_range,
    )
    del environment.globals["lipsum"]
    for name in _GROWING_FILTERS:
        environment.filters[name] = _guarded(name, environment.filters[name])
    environment.filters["tojson"] = _to_json
    # With the context passed, jinja2 does not run these two while compiling.
    environment.filters["_counted"] = pass_context(_counted)
    environment.filters["_joined"] = pass_context(_joined)
    return environment


class _Bounds:
    """What the chat sandbox adds to jinja2's: bounds on work and on sizes.

    jinja2's sandbox keeps a template from Python's internals, but lets it loop
    without end and build texts without limit.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    steps_left = MAX_STEPS

    def compile_bounded(self: Any, source: str) -> Any:
        """Compiles `source`, its loops counted and its joined texts measured."""
        from jinja2 import nodes

        tree = self.parse(_GENERATION_TAG.sub(_plain_block, source))
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None)
        for concat in list(tree.find_all(nodes.Concat)):
            parts = nodes.List(concat.nodes)
            concat.nodes = [nodes.Filter(parts, "_joined", [], [], None, None)]
        tree.set_environment(self)
        return self.from_string(tree)

    def unsafe_undefined(self: Any, obj: Any, attribute: str) -> Any:
        from jinja2.exceptions import SecurityError

        raise SecurityError(f"access to {attribute!r} of {type(obj).__name__} object")

    def call_binop(self: Any, context: Any, operator: str, left: Any, right: Any):
        sized = [side for side in (left, right) if hasattr(side, "__len__")]
        if operator == "%" and isinstance(left, str):
            _refuse_wide_format(left)
        elif operator == "**":
            _refuse_huge([left, right * MAX_RENDERED // 64])
        elif operator == "*" and sized:
            numbers = [side for side in (left, right) if isinstance(side, int)]
            _refuse_huge([len(sized[0]) * number for number in numbers])
        elif operator == "+" and len(sized) == 2:
            _refuse_huge([len(left) + len(right)])
        return super().call_binop(context, operator, left, right)  # type: ignore

    def call(self: Any, context: Any, function: Any, /, *args: Any, **kwargs: Any):
        self.take_step()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            args = _checked_growth(function.__name__, (owner, *args), kwargs)[1:]
        return super().call(context, function, *args, **kwargs)  # type: ignore

    def wrap_str_format(self: Any, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)  # type: ignore
        if wrapped is not None:
            _refuse_wide_format(value.__self__)
        return wrapped

    def take_step(self: Any) -> None:
        """Counts one loop step or call."""
        self.steps_left -= 1
        if self.steps_left < 0:
            raise OverflowError(f"more than {MAX_STEPS} loop steps and calls")


# Marks for training in some templates: plain blocks here, as they keep the text.
_GENERATION_TAG = re.compile(r"(\{%[-+]?\s*)(end)?generation(?=\s*[-+]?%\})")
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(?:\d{6}|\*)|\{[^{}]*:[^{}]*(?:\d{6}|\{)")
_GROWING_FILTERS = ("batch", "center", "format", "indent", "join", "replace", "slice")


def _plain_block(tag: re.Match[str]) -> str:
    return tag[1] + ("endif" if tag[2] else "if true")


def _strftime_now(layout: str) -> str:
    _refuse_wide_format(layout)
    return datetime.datetime.now().strftime(layout)


def _raise_exception(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)


def _bounded_range(*args: int) -> range:
    if len(numbers := range(*args)) > MAX_RANGE:
        raise OverflowError(f"a range of more than {MAX_RANGE} numbers")
    return numbers


def _counted(context: Any, items: Iterable[Any]) -> Iterable[Any]:
    for item in items:
        context.environment.take_step()
        yield item


def _joined(_: Any, parts: Iterable[Any]) -> str:
    return _joined_within(map(str, parts), MAX_RENDERED)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    _refuse_huge([indent])
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _guarded(name: str, function: Any) -> Any:
    # Some filters get jinja2's context first; the subject is what follows it.
    first = int(hasattr(function, "jinja_pass_arg"))

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        checked = _checked_growth(name, args[first:], kwargs)
        return function(*args[:first], *checked, **kwargs)

    return guarded


def _checked_growth(name: str, values: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Refuses a text method or filter whose result may be huge; returns `values`."""
    _refuse_huge([*values, *named.values()])
    values = list(values)
    subject, others = values[0], values[1:]
    if name == "format":
        _refuse_wide_format(str(subject))
    elif name == "replace" and len(others) >= 2:
        old, new = map(str, others[:2])
        _refuse_huge([str(subject).count(old) * len(new)])
    elif name == "join" and (others or not isinstance(subject, str)):
        # The method's subject is the separator, the filter's is the list.
        at = 1 if isinstance(subject, str) else 0
        values[at] = list(values[at])
        separators = [v for i, v in enumerate(values) if i != at and isinstance(v, str)]
        width = max(map(len, separators), default=0)
        _refuse_huge([sum(len(str(v)) + width for v in values[at])])
    return values


def _refuse_huge(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_RENDERED:
            raise OverflowError(f"a number above {MAX_RENDERED}")


def _refuse_wide_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise OverflowError("a format that widens its values so far")
