"""Writes `tokenizer_ids.json`: the ids that transformers gives for the real models.

Run in the repository's root, with the [parity] extra:

    python -m tests.golden.make_tokenizer_ids

Files already at hand can be named: `... smollm2-135m-instruct=FILE.gguf`.
"""

import json
import re
import sys
from pathlib import Path

from tests import models_on_disk

CAUTION = (
    "Made from the GGUF files, mended where a note says so. The tokenizer.json files "
    "of the original models were not at hand. The texts whose ids depend on a mend "
    "(digits for smollm2, decomposed accents for qwen2) are no independent evidence."
)
OUTPUT = Path(__file__).with_name("tokenizer_ids.json")

TEXTS = {
    "code": "def f(x, *, n=10):\n    if x >= 0x1F:\n\t\treturn x**2 / 3.14  # it's\n",
    "accents": "Ünïcödé façade, naïve café; cafe\u0301 A\u030angstro\u0308m Straße ½",
    "scripts": "你好, 世界。日本語のテキスト 한국어 текст नमस्ते العربية ไทย 𠜎𡿨",
    "emoji": "👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 e🧑🏿‍🚀!",
    "spaces": "a  b   c    d" + " " * 17 + "e" + " " * 40 + "f \t\t g  ",
    "lines": "\n\nx\n\n\n  y \r\n\r\n z" + "\n" * 9 + "   \n  w\n",
    "digits": "0 12 345 67890 3,141.59 2024-11-30 x2y3 ١٢٣ ²³",
    "quotes": "I'll say: “don't” — he'd've DON'T, we're 'S...?!!",
    "special": "a<|im_start|>user\nhi<|im_end|> <bos><start_of_turn>x<end_of_turn>"
    "<|endoftext|><h1>t</h1><unused3> <tool_call>{}</tool_call>",
    "marks": "▁a▁▁b <0x0A> Ġx Ċ\u00a0y\u200bz\ufeff\u0000.",
    "empty": "",
}

CHATS = {
    "one turn": [{"role": "user", "content": "Write `f(x)`; it's for naïve 12-bit x."}],
    "system and turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi  there 👍🏽"},
        {"role": "assistant", "content": "Hello!\n"},
        {"role": "user", "content": "And <|im_end|> in the text?"},
    ],
}


def _as_original(tokenizer, short_name: str) -> str:
    """Mends what transformers' GGUF conversion leaves out; returns a note on it.

    The mends restore what the original models do, as far as it is public knowledge:
    their tokenizer.json files were not at hand, so none of this is checked by them.
    """
    from tokenizers import normalizers, pre_tokenizers

    backend = tokenizer.backend_tokenizer
    if short_name.startswith("smollm2"):
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        return (
            "mended: transformers ignores the pre-tokenizer 'smollm' that the file "
            "names (digits one by one, then the GPT-2 byte-level split)"
        )
    if short_name.startswith("qwen2"):
        backend.normalizer = normalizers.NFC()
        return "mended: transformers leaves out Qwen2's NFC normalizer"
    return "as transformers converts it: merges in the order of the vocabulary"


def golden_ids(short_name: str, file: Path) -> dict:
    """The note, the ids of `TEXTS` and those of `CHATS` for one model."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    note = _as_original(tokenizer, short_name)
    chats = {}
    if tokenizer.chat_template:
        for name, messages in CHATS.items():
            chats[name] = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
    texts = {name: tokenizer(text).input_ids for name, text in TEXTS.items()}
    return {"note": note, "texts": texts, "chats": chats}


def main() -> None:
    import transformers

    names = ("smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct")
    names += ("qwen2.5-coder-1.5b-instruct", "gemma-3-270m")
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    models = {}
    for name in names:
        file = Path(given[name]) if name in given else models_on_disk.path(name)
        models[name] = golden_ids(name, file)
    golden = {
        "made_by": "python -m tests.golden.make_tokenizer_ids",
        "caution": CAUTION,
        "transformers": transformers.__version__,
        "texts": TEXTS,
        "chats": CHATS,
        "models": models,
    }
    text = json.dumps(golden, ensure_ascii=True, indent=1)
    # One line a list of ids keeps the file readable and its differences small.
    packed = re.sub(r"\[\s+([-\d,\s]+?)\s+\]", _one_line, text)
    OUTPUT.write_text(packed + "\n", encoding="utf-8")


def _one_line(numbers: "re.Match[str]") -> str:
    return "[" + re.sub(r"\s+", " ", numbers[1]) + "]"


if __name__ == "__main__":
    main()
