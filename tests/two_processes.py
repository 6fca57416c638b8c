"""One process of a job, as a user would write it, and how a test starts it.

`python -m tests.two_processes SECONDS`, the job being in the environment, says on
stdout how it went.
"""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxspec import UserError, distributed

ROOT = pathlib.Path(__file__).parent.parent
# Nothing here may take longer, or it hangs.
HARD_LIMIT = 90
JOB = ("JAXSPEC_COORDINATOR", "JAXSPEC_NUM_PROCESSES", "JAXSPEC_PROCESS_ID")
POD = {
    "TPU_WORKER_HOSTNAMES": "10.9.9.1,10.9.9.2",
    "TPU_WORKER_ID": "1",
    "TPU_PROCESS_ADDRESSES": "10.9.9.1:8471,10.9.9.2:8471",
    "MEGASCALE_NUM_SLICES": "1",
}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def call(port, words):
    """Connects once somebody listens, says the words, and holds the line."""
    until = time.monotonic() + 30
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            connection = socket.create_connection(("127.0.0.1", port), 5)
            # Who talks on may find that nobody listens any more.
            with contextlib.suppress(ConnectionError):
                connection.sendall(words)
            return connection
        assert time.monotonic() < until
        time.sleep(0.02)


@contextlib.contextmanager
def starting():
    """Gives a function that starts Python; what it started does not outlive this."""
    with contextlib.ExitStack() as stack:

        def start(*arguments, **environment):
            kept = {name: os.environ[name] for name in {*os.environ} - {*JOB, *POD}}
            flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
            process = subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                cwd=ROOT,
                env={**kept, **flags, "JAX_PLATFORMS": "cpu", **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def join(start, port, process_id, count=2, timeout=60):
    values = (f"127.0.0.1:{port}", str(count), str(process_id))
    environment = dict(zip(JOB, values, strict=True))
    return start("-m", "tests.two_processes", timeout, **environment)


def told(process, code):
    out, err = process.communicate(timeout=HARD_LIMIT)
    assert process.returncode == code, err[-3000:]
    # Gloo tells on stdout that it is connected.
    return json.loads(out.splitlines()[-1])


def summed():
    """The sum of 0..15 spread over all devices, and that of this process's part."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    spread = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    numbers = jax.make_array_from_callback(
        (16,), spread, lambda index: np.arange(16)[index]
    )
    total = jax.jit(jnp.sum, out_shardings=whole)(numbers)
    return {
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "total": int(total),
        "own": sum(int(np.sum(part.data)) for part in numbers.addressable_shards),
    }


def main(timeout):
    started = time.monotonic()
    try:
        distributed.initialize(timeout=timeout)
    except UserError as error:
        seconds = time.monotonic() - started
        print(json.dumps({"error": str(error), "seconds": seconds, "at": time.time()}))
        return 2
    print(json.dumps(summed()))
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
