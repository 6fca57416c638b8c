"""Writes `logits/*.json`: what transformers computes, for tests that do without it.

Run in the repository's root, with the [parity] extra:

    python -m tests.golden.make_logits

A SmolLM2 file already at hand can be named: `... smollm2-135m-instruct=FILE.gguf`.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from tests import models_on_disk
from tests.checkpoints.writers import random_tensors, write_hf_folder
from tests.models import theirs
from tests.models.forwards import TEXT_LENGTH, TINY, random_ids, tiny_values

FOLDER = Path(__file__).with_name("logits")
TINY_FILE, SMOLLM2_FILE = FOLDER / "tiny.json", FOLDER / "smollm2.json"
SMOLLM2 = "smollm2-135m-instruct"
# The first, the window's edge, both block boundaries of the cache, and the last.
POSITIONS = (0, 1, 39, 40, 127, 128, 255, 256, TEXT_LENGTH - 1)
LARGEST = 8


def tiny_folder(folder: Path, name: str) -> str:
    """Writes a tiny model with seeded weights; returns their hash."""
    values = tiny_values(name)
    tensors = random_tensors(values)
    write_hf_folder(folder, values, tensors=tensors)
    digest = hashlib.sha256()
    for tensor in tensors.values():
        digest.update(tensor.tobytes())
    return digest.hexdigest()


def tiny_golden(name: str) -> dict:
    """The logits of a tiny model at `POSITIONS`."""
    ids = random_ids(64, TEXT_LENGTH)
    with tempfile.TemporaryDirectory() as made:
        weights = tiny_folder(Path(made), name)
        logits = theirs.logits(theirs.from_folder(Path(made)), ids, POSITIONS)
    return {"weights": weights, "logits": [_short(row) for row in logits]}


def smollm2_golden(file: Path) -> dict:
    """The largest logits of SmolLM2 at each position of 64 tokens."""
    from jaxspec.tokenizer import Tokenizer

    ids = Tokenizer.from_gguf(file).encode(theirs.TEXT)[:64]
    logits = theirs.of_gguf(file, np.array(ids))
    best = np.argsort(-logits, axis=1, kind="stable")[:, :LARGEST]
    values = np.take_along_axis(logits, best, axis=1)
    return {
        "text": theirs.TEXT,
        "ids": ids,
        "best": best.tolist(),
        "logits": [_short(row) for row in values],
        "mean": _short(logits.mean(axis=1)),
    }


def _short(row: np.ndarray) -> list[float]:
    return [float(f"{value:.7g}") for value in row]


def _write(path: Path, content: dict) -> None:
    import torch
    import transformers

    made_by = {
        "command": "python -m tests.golden.make_logits",
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
    }
    text = json.dumps({"made_by": made_by, **content}, separators=(",", ":"))
    # A row a line keeps the differences of two versions readable.
    path.write_text(text.replace("],[", "],\n[").replace(':{"', ':\n{"') + "\n")


def main() -> None:
    """Writes both files."""
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    file = Path(given[SMOLLM2]) if SMOLLM2 in given else models_on_disk.path(SMOLLM2)
    FOLDER.mkdir(exist_ok=True)
    models = {name: tiny_golden(name) for name in TINY}
    _write(TINY_FILE, {"positions": POSITIONS, "models": models})
    _write(SMOLLM2_FILE, smollm2_golden(file))


if __name__ == "__main__":
    main()
