"""A checkpoint over a mesh: each device gets its part, read once."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints import load
from jaxspec.checkpoints.load import load_decoder, named_parameters, read_tensor
from jaxspec.checkpoints.tensors import StoredTensor
from jaxspec.sharding import COPIED, Partition
from tests.checkpoints.writers import tiny_config, write_hf_folder, write_tiny_gguf
from tests.sharding import on_devices

# Of 4 query heads and 2 kv heads; each file is of another family.
VALUES = {"folder": tiny_config("qwen2"), "gguf": tiny_config("llama")}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    paths = {
        "folder": write_hf_folder(place / "folder", VALUES["folder"], shards=3),
        "gguf": write_tiny_gguf(place / "model.gguf", VALUES["gguf"]),
    }
    return on_devices.call(loads, {name: str(path) for name, path in paths.items()})


def loads(paths):
    """Of each file over each mesh, as a target and as a copied draft."""
    return {
        f"{name} {mesh}{' draft' if draft else ''}": loaded(path, mesh, draft)
        for name, path in paths.items()
        for mesh in on_devices.MESHES
        for draft in (False, True)
    }


def loaded(path, mesh, draft):
    partition = Partition(on_devices.mesh_of(mesh), draft_rules=COPIED)
    alone = named_parameters(load_decoder(path))
    asked = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "open_checkpoint", counting(asked))
        decoder = load_decoder(path, "float32", partition, draft=draft)
    placed = partition.place(load_decoder(path), decoder.config.head_dim, draft=draft)
    placed = named_parameters(placed)
    report = {}
    for name, array in named_parameters(decoder).items():
        where = partition.parameter(
            name, array.shape, decoder.config.head_dim, draft=draft
        )
        report[name] = {
            "equal": bool(jnp.array_equal(jax.device_get(array), alone[name])),
            "as said": array.sharding == where == placed[name].sharding,
            "asked": sorted(asked[name]),
            "needed": needed(where, array.shape),
            "shape": array.shape,
        }
    return report


def counting(asked):
    """`open_checkpoint`, whose tensors note which rows they are asked for."""
    open_as_it_is = load.open_checkpoint

    def noted(name, stored):
        def rows(start, stop):
            asked.setdefault(name, []).append((start, stop))
            return stored.rows(start, stop)

        return dataclasses.replace(stored, rows=rows)

    def opened(path):
        checkpoint = open_as_it_is(path)
        tensors = {name: noted(name, each) for name, each in checkpoint.tensors.items()}
        return dataclasses.replace(checkpoint, tensors=tensors)

    return opened


def needed(where, shape):
    """The rows of each different part that a device holds."""
    parts = where.devices_indices_map(shape).values()
    different = {
        tuple(each.indices(n) for each, n in zip(part, shape, strict=True))
        for part in parts
    }
    return sorted(part[0][:2] for part in different)


CASES = [
    (file, mesh, draft)
    for file in VALUES
    for mesh in on_devices.MESHES
    for draft in ("", " draft")
]


@pytest.mark.parametrize(("file", "mesh", "draft"), CASES)
def test_parameters_are_those_of_a_load_on_one_device(report, file, mesh, draft):
    tensors = report[f"{file} {mesh}{draft}"]
    assert len(tensors) >= 20
    assert [name for name, each in tensors.items() if not each["equal"]] == []
    assert [name for name, each in tensors.items() if not each["as said"]] == []


@pytest.mark.parametrize(("file", "mesh", "draft"), CASES)
def test_each_part_is_read_once_and_nothing_else(report, file, mesh, draft):
    for name, each in report[f"{file} {mesh}{draft}"].items():
        assert each["asked"] == each["needed"], name


@pytest.mark.parametrize("file", VALUES)
def test_of_a_split_tensor_no_read_is_the_whole(report, file):
    """What the test before this one says of a projection, spelt out."""
    tensors = report[f"{file} 2x4"]
    name = "layers.0.self_attn.q_proj.weight"
    assert tensors[name]["shape"] == [32, 32]
    assert tensors[name]["asked"] == [[0, 8], [8, 16], [16, 24], [24, 32]]
    # Split along its second axis, of which a file gives no part.
    assert tensors["layers.0.self_attn.o_proj.weight"]["asked"] == [[0, 32]] * 4
    assert tensors["layers.0.self_attn.k_proj.weight"]["asked"] == [[0, 16]]
    assert report[f"{file} 2x4 draft"][name]["asked"] == [[0, 32]]


@pytest.fixture
def stored(request, monkeypatch):
    """A tensor of some shape, read in blocks of few rows, and what it was asked for."""
    shape = request.param
    monkeypatch.setattr(load, "_BLOCK_ELEMENTS", 2 * int(np.prod(shape[1:])))
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    asked = []

    def rows(start, stop):
        asked.append((start, stop))
        return values[start:stop]

    tensor = StoredTensor("stored", shape, rows)
    return SimpleNamespace(tensor=tensor, values=values, asked=asked)


PARTS = [
    (),
    (slice(0, 4),),
    (slice(4, 8),),
    (slice(3, 8),),
    (slice(None),),
    (slice(7, None),),
    (slice(2, 2),),
    (slice(None), slice(0, 3)),
    (slice(0, 5), slice(3, 6)),
    (slice(5, 8), slice(5, None)),
    (slice(None), slice(None), slice(1, 3)),
    (slice(1, 4), slice(None, 2), slice(2, None)),
]


@pytest.mark.parametrize("stored", [(8,), (8, 6), (8, 6, 4)], indirect=True)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_tensor_is_that_slice_of_it(stored, part):
    part = part[: stored.values.ndim]
    found = read_tensor(stored.tensor, jnp.float32, part)
    np.testing.assert_array_equal(found, stored.values[part])
    assert found.size == 0 or found.ctypes.data % 64 == 0
    rows = [row for start, stop in stored.asked for row in range(start, stop)]
    assert rows == list(range(8))[part[0] if part else slice(None)]
    assert all(stop - start <= 2 for start, stop in stored.asked)


@pytest.mark.parametrize("stored", [(8, 6)], indirect=True)
def test_a_part_has_the_dtype_that_is_asked_for(stored):
    part = (slice(2, 4), slice(1, 5))
    found = read_tensor(stored.tensor, jnp.bfloat16, part)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, stored.values[part].astype(jnp.bfloat16))
