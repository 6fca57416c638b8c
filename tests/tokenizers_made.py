"""Small tokenizers, written as a Hugging Face folder or as a GGUF file."""

import copy
import functools
import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, pre_tokenizers, processors, trainers

from tests.checkpoints.writers import write_gguf

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")
BOS, EOS, IM_START, IM_END, END_OF_TEXT = range(5)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]
GOLDEN = json.loads(
    Path(__file__).with_name("golden").joinpath("tokenizer_ids.json").read_text("utf-8")
)
TEXTS = [text for text in GOLDEN["texts"].values() if "<" not in text]


@functools.cache
def _trained() -> dict[str, Any]:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["hello world 2024 12 é 你好 hello\n" * 5], trainer)
    return json.loads(backend.to_str())


def byte_level(**model_changes: Any) -> dict[str, Any]:
    """The tokenizer.json of a byte-level BPE trained on a few words."""
    data = copy.deepcopy(_trained())
    data["model"] |= model_changes
    return data


def with_bos(*, eos: bool = False) -> dict[str, Any]:
    """`byte_level` with a post-processor that adds BOS, and EOS if asked."""
    backend = tokenizers.Tokenizer.from_str(json.dumps(byte_level()))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if eos else "<s> $A",
        special_tokens=[("<s>", BOS), ("</s>", EOS)],
    )
    return json.loads(backend.to_str())


def write_folder(
    folder: Path, tokenizer: Any = None, *, jinja: str | None = None, **files: Any
) -> Path:
    """Writes `tokenizer.json`, the template, and a JSON file for each of `files`."""
    files["tokenizer"] = byte_level() if tokenizer is None else tokenizer
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja, encoding="utf-8")
    return folder


def write_metadata(path: Path, chat_template: str | None = None, **fields: Any) -> Path:
    """Writes a GGUF file of tokenizer metadata only; a field of None is left out."""
    metadata = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    metadata["tokenizer.chat_template"] = chat_template
    return write_gguf(path, {k: v for k, v in metadata.items() if v is not None}, {})


def write_byte_level_gguf(folder: Path, extra: Any = (), **changes: Any) -> Path:
    """The GGUF twin of `byte_level`, with `extra` pairs of a token and its type."""
    model = byte_level()["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    values = {
        "model": "gpt2",
        "tokens": [*tokens, *(text for text, _ in extra)],
        "token_type": [3] * 5 + [1] * (len(tokens) - 5) + [kind for _, kind in extra],
        "merges": [" ".join(pair) for pair in model["merges"]],
        "pre": "gpt-2",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    return write_metadata(folder / "bytes.gguf", **(values | changes))


PIECES = ("▁", "a", "b", "ab", "▁a", "▁ab", "c")


def write_llama_gguf(
    folder: Path, pieces=PIECES, scores=None, *, kinds=None, **changes: Any
) -> Path:
    """A SentencePiece BPE with byte fallback; earlier pieces have better scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    ranked = [-float(i) for i in range(len(pieces))] if scores is None else scores
    values = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, 3, 3] + [6] * 256 + (kinds or [1] * len(pieces)),
        "scores": [0.0] * 259 + ranked,
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pre": "default",
    }
    return write_metadata(folder / "llama.gguf", **(values | changes))
