"""BL-62: what eight devices saved is restored where there are fewer."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.sharding import make_mesh
from jaxspec.train.checkpoints import Checkpoints

STEP, SPLIT = 3, PartitionSpec("model", None)


def state(devices):
    """A split matrix, a copied vector and a number, over so many devices."""
    mesh = make_mesh(1, devices)
    rng = np.random.default_rng(0)
    leaves = {
        "split": (rng.normal(size=(16, 3)).astype(np.float32), SPLIT),
        "copied": (rng.normal(size=5).astype(np.float32), PartitionSpec()),
        "step": (np.int32(STEP), PartitionSpec()),
    }
    return {
        name: jax.device_put(leaf, NamedSharding(mesh, where))
        for name, (leaf, where) in leaves.items()
    }


def main(action, devices, folder):
    checkpoints = Checkpoints(pathlib.Path(folder), keep=1)
    made = state(int(devices))
    if action == "save":
        checkpoints.save(STEP, made, measure=1.0)
        checkpoints.close()
        return
    asked = jax.tree.map(lambda leaf: jax.device_put(0 * leaf, leaf.sharding), made)
    found = checkpoints.restore(asked)
    report = {
        name: {
            "equal": bool(np.array_equal(found[name], leaf)),
            "devices": len(found[name].sharding.device_set),
            "where asked": found[name].sharding == leaf.sharding,
        }
        for name, leaf in made.items()
    }
    print(json.dumps({"devices": jax.device_count(), "leaves": report}))


def run(action, devices, folder):
    flags = f"--xla_force_host_platform_device_count={devices}"
    ended = subprocess.run(
        [sys.executable, "-m", __name__, action, str(devices), str(folder)],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run("save", 8, folder)
    return folder


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_is_restored_where_it_is_asked_for(saved, devices):
    report = json.loads(run("restore", devices, saved).splitlines()[-1])
    assert report["devices"] == devices
    expected = {"equal": True, "devices": devices, "where asked": True}
    assert report["leaves"] == dict.fromkeys(("split", "copied", "step"), expected)


def test_one_device_reads_what_eight_have_saved(saved):
    """Its shapes, types and values, without being told where they are to lie."""
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(
        saved.absolute(), item_handlers=ocp.StandardCheckpointHandler()
    ) as manager:
        metadata = manager.item_metadata(STEP)
    assert jax.device_count() == 1
    described = {name: (leaf.shape, leaf.dtype) for name, leaf in metadata.items()}
    assert described == {
        "split": ((16, 3), np.float32),
        "copied": ((5,), np.float32),
        "step": ((), np.int32),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
