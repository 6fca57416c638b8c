"""Run as a process: loads a synthetic model and prints its peak memory over its size.

`python -m tests.checkpoints.memory_probe FOLDER hf|gguf DTYPE load|hoard`; `hoard`
keeps a second copy of every tensor, to show that the probe would notice.
"""

import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np

from jaxspec.checkpoints.hf_config import parse_config
from jaxspec.checkpoints.load import expected_shapes, load_parameters, open_checkpoint
from tests.checkpoints import writers

# 76 million parameters, three quarters of them in two large tensors: 300 MB in float32.
_SIZES = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "vocab_size": 60_000,
    "tie_word_embeddings": False,
}


def anonymous_bytes() -> int:
    """RssAnon of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not report RssAnon")


def write(folder: Path, layout: str) -> Path:
    """Writes the model with blocks of equal bytes, which costs no time."""
    values = writers.tiny_config("llama", **_SIZES)
    shapes = expected_shapes(parse_config(values, "config.json"))
    names = {name: writers.hf_name(name) for name in shapes}
    if layout == "hf":
        tensors = {names[n]: np.ones(shape, np.float32) for n, shape in shapes.items()}
        return writers.write_hf_folder(
            folder, values, dtype="bfloat16", tensors=tensors
        )
    tensors = {names[n]: np.empty(shape, np.uint8) for n, shape in shapes.items()}
    stored = {}
    for name, tensor in writers.gguf_tensors(values, tensors).items():
        if tensor.ndim == 1:
            stored[name] = writers.plain(tensor)
        else:
            blocks = bytes.fromhex("003c") + bytes(range(32))
            stored[name] = writers.Stored(tensor.shape, 8, blocks * (tensor.size // 32))
    return writers.write_gguf(
        folder / "model.gguf", writers.gguf_metadata(values), stored
    )


def main() -> None:
    """Writes in a child, so that what writing leaves behind is not counted."""
    folder, layout, dtype, mode = sys.argv[1:]
    if mode == "write":
        write(Path(folder), layout)
        return
    command = [sys.executable, "-m", "tests.checkpoints.memory_probe", folder, layout]
    subprocess.run([*command, dtype, "write"], check=True)
    path = Path(folder) / "model.gguf" if layout == "gguf" else Path(folder)
    jax.numpy.zeros(8).block_until_ready()
    before = anonymous_bytes()
    peak, done = before, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    hoard = []

    def place(name: str, shape, read) -> jax.Array:
        array = read(())
        if mode == "hoard":
            hoard.append(array.copy())
        return jax.device_put(array, may_alias=True)

    default = None if mode == "load" else place
    parameters = load_parameters(open_checkpoint(path), dtype, default)
    jax.block_until_ready(parameters)
    peak = max(peak, anonymous_bytes())
    done.set()
    watcher.join()
    size = sum(array.nbytes for array in parameters.values())
    assert size > 140e6, "too small to measure"
    print(f"size {size} peak {peak - before} ratio {(peak - before) / size:.3f}")


if __name__ == "__main__":
    main()
