"""Text to token ids and back, whole or as a stream."""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.errors import UserError

if TYPE_CHECKING:
    from jaxspec.chat_template import ChatTemplate

Messages = Sequence[Mapping[str, Any]]

# Sixteen times the widest vocabulary in use: a larger id is a fault, and costs memory.
MAX_ID = 1 << 22

# Tokens that end an assistant's turn; instruct models sample them instead of EOS.
_TURN_END = re.compile(r"<\|(im_end|eot_id|eom_id|end_of_turn)\|>|<end_of_turn>")


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
        self._tokens = _tokens_by_id(backend, source)
        for index in unused:
            self._tokens[index] = None
        self._named_tokens = dict(named_tokens or {})
        self.vocab_size = len(self._tokens)
        self.source = source
        self.bos_id = bos_id
        self.adds_bos = adds_bos and bos_id is not None
        self.chat_template = chat_template
        self.eos_ids = frozenset(eos_ids) | _turn_ends(backend, chat_template or "")

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """Reads a Hugging Face folder: `tokenizer.json` and the configs beside it.

        Raises:
            UserError: a file is missing, does not parse, or names ids or tokens
                that the vocabulary lacks.
        """
        from jaxspec.checkpoints.tokenizer_files import read_folder

        return cls(**read_folder(Path(path)))

    @classmethod
    def from_gguf(cls, path: str | Path) -> "Tokenizer":
        """Builds the tokenizer that a GGUF file's metadata describes.

        Raises:
            UserError: the file is cut or corrupt, or its tokenizer is of a kind that
                is not supported (named in the message).
        """
        from jaxspec.checkpoints.tokenizer_gguf import read_gguf

        return cls(**read_gguf(Path(path)))

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
        try:
            ids = list(self._backend.encode(text, add_special_tokens=False).ids)
        except (TypeError, UnicodeError):
            raise UserError(
                "text is not a str of valid Unicode; pass one string, without lone "
                "surrogates"
            ) from None
        wants_bos = self.adds_bos if add_bos is None else add_bos
        if wants_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_chat(
        self, messages: Messages, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Returns the ids of the rendered chat: `encode(render_chat(...))`, one BOS."""
        return self.encode(
            self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        )

    def render_chat(
        self, messages: Messages, *, add_generation_prompt: bool = True
    ) -> str:
        """Returns the text that the model's chat template makes of `messages`.

        Each is `{"role": str, "content": str}`; `add_generation_prompt` opens the
        assistant's turn.

        Raises:
            UserError: the model has no template, the messages are malformed or
                refused by the template, or the template breaks a bound.
        """
        if self.chat_template is None:
            raise UserError(
                f"{self.source} has no chat template; encode the prompt as plain text, "
                "or use an instruct model"
            )
        return self._compiled_template.render(
            messages, add_generation_prompt=add_generation_prompt, **self._named_tokens
        )

    @functools.cached_property
    def _compiled_template(self) -> "ChatTemplate":
        from jaxspec.chat_template import ChatTemplate

        return ChatTemplate(self.chat_template or "", self.source)

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

        Only ids in use in both are compared: padding and unused entries do not count.
        """
        pairs = zip(self._tokens, other._tokens, strict=False)
        for index, (own, its) in enumerate(pairs):
            if own is not None and its is not None and own != its:
                return index, own, its
        return None

    @functools.cached_property
    def _plain_id(self) -> int:
        """The id of some token that is text by itself."""
        texts = ((index, self.decode([index])) for index in range(self.vocab_size))
        return next((i for i, t in texts if t.strip() and "\ufffd" not in t), 0)

    def stream_decoder(self, *, skip_special: bool = True) -> "StreamDecoder":
        """Returns a decoder that is fed ids as they come."""
        return StreamDecoder(self, skip_special=skip_special)


class StreamDecoder:
    """Turns ids into text piece by piece, never cutting a character.

    The pieces, joined, are what `Tokenizer.decode` gives for all ids; where a model
    writes bytes that are no text, the number of replacement marks may differ.
    """

    # UTF-8 takes up to four bytes, three of which may be there already.
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


def _tokens_by_id(backend: Any, source: str) -> list[str | None]:
    vocabulary = backend.get_vocab(with_added_tokens=True)
    largest = max(vocabulary.values(), default=-1)
    if not 0 <= largest < MAX_ID:
        raise UserError(
            f"{source}: the largest token id is {largest}, expected 0 to {MAX_ID - 1}; "
            "download it again"
        )
    tokens: list[str | None] = [None] * (largest + 1)
    for text, index in vocabulary.items():
        tokens[index] = text
    return tokens


def _turn_ends(backend: Any, template: str) -> set[int]:
    ends = {match[0] for match in _TURN_END.finditer(template)}
    return {
        index
        for index, token in backend.get_added_tokens_decoder().items()
        if token.special and token.content in ends
    }
