"""Jobs of the real command, each in a process of its own, on a small model."""

import contextlib
import json
import random
import time

import numpy as np

from tests.checkpoints.writers import random_tensors, tiny_config, write_hf_folder
from tests.tokenizers_made import CHATML, write_folder
from tests.two_processes import starting

# Nothing here may take longer, or it hangs.
LIMIT = 240
QUICK = "--xla_backend_optimization_level=0"
FOUR_DEVICES = f"--xla_force_host_platform_device_count=4 {QUICK}"


def write_model(folder, noise=0.0):
    """A tiny random llama with a tokenizer, as a Hugging Face folder.

    One with noise is that without it, a little disturbed: as a draft often right.
    """
    values = tiny_config("llama", vocab_size=512, num_hidden_layers=1)
    rng = np.random.default_rng(1)
    tensors = {
        name: weight + np.float32(noise) * rng.standard_normal(weight.shape, "f4")
        for name, weight in random_tensors(values).items()
    }
    write_hf_folder(folder, values, tensors=tensors)
    return str(write_folder(folder, jinja=CHATML))


def write_prompts(path, count, seed=0, lengths=(1, 5, 12, 20, 30)):
    """Prompts of random ids, one a line."""
    chance = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            ids = [chance.randrange(5, 400) for _ in range(chance.choice(lengths))]
            file.write(json.dumps({"prompt": ids}) + "\n")
    return path


@contextlib.contextmanager
def jobs(programs):
    """Gives a function that starts a job; what it started does not outlive this.

    Args:
        programs: a folder in which what one process compiles is kept for the next.
    """
    with starting() as start:

        def begin(*arguments, flags=QUICK):
            return start(
                *("-m", "jaxspec.cli.main", "batch", *arguments),
                XLA_FLAGS=flags,
                COLUMNS="100",
                JAX_COMPILATION_CACHE_DIR=str(programs),
                JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
            )

        yield begin


def end(process):
    """What it wrote to stdout and stderr; its exit code is in `process`."""
    return process.communicate(timeout=LIMIT)


def finished(process):
    """Both texts of a job that must have ended well."""
    out, err = end(process)
    assert process.returncode == 0, err[-3000:]
    assert "Traceback" not in err
    return out, err


def journal(output, process_id=0, processes=1):
    name = f"{output.name}.part-{process_id:05d}-of-{processes:05d}"
    return output.with_name(name)


def recorded(path):
    """How many whole records a journal has."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(path, records, process):
    """Waits until a journal is there and has so many records."""
    until = time.monotonic() + LIMIT
    while not path.exists() or recorded(path) < records:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.001)


def records_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
