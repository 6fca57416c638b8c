"""The same models as torch and transformers run them (the [parity] extra).

As a program it runs a GGUF file in a process of its own, so that its weights are gone
before ours are loaded: `python -m tests.models.theirs FILE.gguf IDS.npz LOGITS.npy`.
"""

import importlib.util
import math
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TEXT = (
    "def mean(values: list[float]) -> float:\n    # naïve, for 1 <= n <= 10\n"
    "    return sum(values) / len(values)\n\nA café in 東京 serves 3 kinds of tea 🍵. "
    "The oldest is from 1852, and it is green.\n"
)
ROOT = Path(__file__).parents[2]
# The file holds the window, the head width and the global base; the rest is the gemma3
# architecture's and must be transformers' too. A check that owes nothing to it: other
# choices predict LICENSE worse, in nats a token over 600: as here 2.47, no window 2.49,
# one base 2.51 (1e4) or 3.91 (1e6), silu 3.33, twice the query scale 3.10, norms with 1
# added again 17.9, no embedding scale 13.7.
GEMMA_270M = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ([*["sliding_attention"] * 5, "full_attention"] * 3),
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "vocab_size": 262_144,
}
GEMMA_BASES = {"full_attention": 1e6, "sliding_attention": 1e4}


def require() -> None:
    """Fails under CI where the extra is not installed, and skips elsewhere."""
    names = ("torch", "transformers", "accelerate")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        reason = f"not installed: {', '.join(missing)}; pip install .[parity]"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


def random_model(values: dict[str, Any], seed: int = 0) -> Any:
    """A model made by transformers from its config class, every parameter random."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**values)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        # Gemma stores its norms' scales less 1.
        mean = float("norm" in name and "gemma" not in values["model_type"])
        parameter.data.normal_(mean, 0.2, generator=generator)
    return model.eval()


def from_folder(folder: Path) -> Any:
    """A folder's model in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def logits(model: Any, ids: np.ndarray, positions: Any = None) -> np.ndarray:
    """Logits `[n, V]` of one text, at the given positions or at all."""
    import torch

    if positions is None:
        positions = np.arange(len(ids))
    with torch.no_grad(), warnings.catch_warnings():
        # Deprecations inside transformers are not this project's.
        warnings.simplefilter("ignore")
        kept = torch.as_tensor(positions)
        text = torch.as_tensor(ids, dtype=torch.long)[None]
        return model(text, logits_to_keep=kept, use_cache=False).logits[0].numpy()


def of_gguf(file: Path, ids: np.ndarray, positions: Any = None) -> np.ndarray:
    """`logits` of a GGUF file, computed in a process that has ended on return."""
    kept = np.arange(len(ids)) if positions is None else np.asarray(positions)
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "ids.npz", Path(folder) / "logits.npy"
        np.savez(given, ids=ids, positions=kept)
        command = [sys.executable, "-m", __name__, *map(str, (file, given, made))]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return np.load(made)


def from_gguf(file: Path) -> Any:
    """A GGUF file's model in float32, its config checked where the file is silent."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        attn_implementation="eager",
    )
    if model.config.model_type == "gemma3_text":
        _check_gemma(model)
    return model.eval()


def _check_gemma(model: Any) -> None:
    config = model.config
    found = {name: getattr(config, name) for name in GEMMA_270M}
    assert found == GEMMA_270M, found
    ropes = config.rope_parameters
    bases = {kind: ropes[kind]["rope_theta"] for kind in GEMMA_BASES}
    assert bases == GEMMA_BASES, bases
    assert {ropes[kind]["rope_type"] for kind in GEMMA_BASES} == {"default"}
    scale = float(model.model.embed_tokens.embed_scale)
    assert math.isclose(scale, math.sqrt(640), rel_tol=1e-6), scale


def main() -> None:
    """Runs the file named on the command line."""
    file, given, made = map(Path, sys.argv[1:])
    task = np.load(given)
    np.save(made, logits(from_gguf(file), task["ids"], task["positions"]))


if __name__ == "__main__":
    main()
