import json
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.checkpoints.load import expected_shapes, load_parameters, open_checkpoint
from jaxspec.errors import UserError
from tests.checkpoints.writers import (
    FAMILIES,
    hf_name,
    random_tensors,
    tiny_config,
    write_hf_folder,
)

HEAD = "lm_head.weight"
KEY_BIAS = "model.layers.1.self_attn.k_proj.bias"


def load(folder, dtype="float32"):
    return load_parameters(open_checkpoint(folder), dtype)


def assert_refused(folder, culprit, dtype="float32"):
    """Loads, expects one line that names the culprit, and that nothing was placed."""
    placed = []
    with pytest.raises(UserError, match=culprit) as caught:
        load_parameters(
            open_checkpoint(folder),
            dtype,
            place=lambda name, *_: placed.append(name),
        )
    assert "\n" not in str(caught.value)
    assert placed == []
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shards", [0, 3])
def test_every_tensor_arrives_under_its_name(tmp_path, family, shards):
    values = tiny_config(family)
    tensors = random_tensors(values)
    parameters = load(write_hf_folder(tmp_path, values, shards=shards, tensors=tensors))
    assert list(parameters) == list(
        expected_shapes(open_checkpoint(tmp_path).config)
    ), "the names and their order are those of expected_shapes"
    for name, array in parameters.items():
        wanted = tensors[hf_name(name)]
        if "gemma" in family and name.endswith("norm.weight"):
            wanted = wanted + np.float32(1)
        assert array.dtype == jnp.float32
        np.testing.assert_array_equal(array, wanted, err_msg=name)


def test_bl37a_tied_without_a_head_loads(tmp_path):
    values = tiny_config("llama", tie_word_embeddings=True)
    assert HEAD not in load(write_hf_folder(tmp_path, values))


def test_bl37b_tied_with_a_redundant_head_loads_and_uses_the_embedding(tmp_path):
    values = tiny_config("llama", tie_word_embeddings=True)
    tensors = random_tensors(values)
    embedding = tensors["model.embed_tokens.weight"]
    folder = write_hf_folder(tmp_path, values, tensors=tensors | {HEAD: embedding + 1})
    parameters = load(folder)
    assert HEAD not in parameters
    np.testing.assert_array_equal(parameters["embed_tokens.weight"], embedding)


def test_bl37b_a_redundant_head_must_have_the_right_shape(tmp_path):
    values = tiny_config("llama", tie_word_embeddings=True)
    head = np.zeros((63, 32), np.float32)
    folder = write_hf_folder(
        tmp_path, values, tensors=random_tensors(values) | {HEAD: head}
    )
    assert_refused(
        folder, r"lm_head\.weight` has shape \[63, 32\], expected \[64, 32\]"
    )


def test_bl37c_untied_without_a_head_is_refused(tmp_path):
    values = tiny_config("llama", tie_word_embeddings=False)
    tensors = random_tensors(values)
    del tensors[HEAD]
    assert_refused(
        write_hf_folder(tmp_path, values, tensors=tensors),
        "tensor `lm_head.weight` is missing",
    )


def test_bl40_a_width_of_hidden_size_is_refused_where_heads_are_wider(tmp_path):
    values = tiny_config("qwen3")
    name = "model.layers.0.self_attn.q_proj.weight"
    narrow = {name: np.zeros((32, 32), np.float32)}
    folder = write_hf_folder(tmp_path, values, tensors=random_tensors(values) | narrow)
    assert_refused(folder, r"q_proj\.weight` has shape \[32, 32\], expected \[64, 32\]")


def test_bl41_biases_are_loaded_and_must_be_there(tmp_path):
    values = tiny_config("qwen2")
    tensors = random_tensors(values)
    large = {KEY_BIAS: np.full(16, 100, np.float32)}
    parameters = load(write_hf_folder(tmp_path, values, tensors=tensors | large))
    assert (parameters["layers.1.self_attn.k_proj.bias"] == 100).all()
    del tensors[KEY_BIAS]
    assert_refused(
        write_hf_folder(tmp_path, values, tensors=tensors),
        r"1.*k_proj\.bias` is missing",
    )


def test_bl41_a_tensor_that_nothing_uses_is_refused(tmp_path):
    values = tiny_config("llama")
    bias = {KEY_BIAS: np.zeros(16, np.float32)}
    folder = write_hf_folder(tmp_path, values, tensors=random_tensors(values) | bias)
    assert_refused(folder, r"k_proj\.bias` is not used by a llama decoder")


def test_bl43_a_missing_shard_is_named_before_anything_is_opened(tmp_path):
    folder = write_hf_folder(tmp_path, tiny_config("llama"), shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    (folder / "model-00001-of-00003.safetensors").write_bytes(b"never opened")
    assert_refused(folder, "model-00002-of-00003.safetensors missing")


def test_bl43_an_index_without_a_needed_tensor_is_refused(tmp_path):
    values = tiny_config("llama")
    tensors = random_tensors(values)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    folder = write_hf_folder(tmp_path, values, shards=2, tensors=tensors)
    assert_refused(folder, r"`layers.1.mlp.up_proj.weight` is missing")


def edit_index(folder, edit):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def test_bl43_an_index_at_odds_with_its_files_is_refused(tmp_path):
    folder = write_hf_folder(tmp_path, tiny_config("llama"), shards=2)
    name = "model.norm.weight"

    def move(weight_map):
        (other,) = set(weight_map.values()) - {weight_map[name]}
        weight_map[name] = other

    edit_index(folder, move)
    message = assert_refused(folder, "`model.norm.weight` is not in model-0000")
    assert "`model.norm.weight` in model-0000" in message
    assert "is not in the index" in message


@pytest.mark.parametrize(
    "file",
    ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "x.bin", 3, None],
)
def test_bl43_an_index_may_name_only_files_of_its_folder(tmp_path, file):
    folder = write_hf_folder(tmp_path, tiny_config("llama"), shards=2)
    edit_index(
        folder, lambda weight_map: weight_map.update({"model.norm.weight": file})
    )
    assert_refused(folder, "expected the name of a safetensors file in the same folder")


def test_bl44_bfloat16_is_read_bit_for_bit(tmp_path):
    values = tiny_config("llama")
    tensors = random_tensors(values)
    row = tensors["model.layers.0.mlp.up_proj.weight"][0]
    row[:3] = [1.0, -2.5, 3.0e38]
    folder = write_hf_folder(tmp_path, values, dtype="bfloat16", tensors=tensors)
    loaded = load(folder, "bfloat16")["layers.0.mlp.up_proj.weight"]
    assert loaded.dtype == jnp.bfloat16
    stored = tensors["model.layers.0.mlp.up_proj.weight"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(
        np.asarray(loaded).view(np.uint16), stored.view(np.uint16)
    )
    wide = load(folder, jnp.float32)["layers.0.mlp.up_proj.weight"]
    np.testing.assert_array_equal(wide, stored.astype(np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bl44_a_float16_file_loads_as_asked(tmp_path, dtype):
    values = tiny_config("llama")
    tensors = random_tensors(values)
    folder = write_hf_folder(tmp_path, values, dtype="float16", tensors=tensors)
    loaded = load(folder, dtype)["embed_tokens.weight"]
    stored = tensors["model.embed_tokens.weight"].astype(np.float16)
    assert loaded.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(loaded, stored.astype(loaded.dtype))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
def test_bl44_norms_stay_float32(tmp_path, family):
    values = tiny_config(family)
    tensors = random_tensors(values)
    small = np.full(32, 2**-9, np.float32)
    tensors["model.norm.weight"] = small
    folder = write_hf_folder(tmp_path, values, dtype="bfloat16", tensors=tensors)
    parameters = load(folder, "bfloat16")
    for name, array in parameters.items():
        is_norm = name.endswith("norm.weight")
        assert array.dtype == (jnp.float32 if is_norm else jnp.bfloat16), name
    # 1 + 2^-9 would be 1 in bfloat16.
    wanted = small + 1 if "gemma" in family else small
    np.testing.assert_array_equal(parameters["final_norm.weight"], wanted)


@pytest.mark.parametrize("dtype", ["float16", "int8", "float64", "nonsense", None, 3])
def test_another_dtype_is_refused(tmp_path, dtype):
    folder = write_hf_folder(tmp_path, tiny_config("llama"))
    # None means float64 to NumPy, which is not what a caller means by it.
    assert_refused(folder, "expected float32 or bfloat16", dtype)


@pytest.mark.parametrize("dtype", [np.int8, np.float64, ml_dtypes.float8_e4m3fn])
def test_a_stored_type_that_is_no_plain_float_is_refused(tmp_path, dtype):
    folder = write_hf_folder(tmp_path, tiny_config("llama"))
    stored = random_tensors(tiny_config("llama"))
    stored["model.norm.weight"] = stored["model.norm.weight"].astype(dtype)
    save_file(stored, folder / "model.safetensors")
    assert_refused(
        folder, "`model.norm.weight` holds (I8|F64|F8_E4M3), expected one of F32"
    )


def test_all_faults_come_in_one_error(tmp_path):
    values = tiny_config("llama")
    tensors = random_tensors(values)
    del tensors["model.norm.weight"]
    tensors["model.extra.weight"] = np.zeros(3, np.float32)
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
    message = assert_refused(
        write_hf_folder(tmp_path, values, tensors=tensors), "is missing"
    )
    assert "`model.extra.weight` is not used" in message
    assert "up_proj.weight` has shape [2, 2], expected [64, 32]" in message


def test_stored_rotary_frequencies_are_passed_over(tmp_path):
    values = tiny_config("llama")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    extra = {name: np.ones(4, np.float32)}
    folder = write_hf_folder(tmp_path, values, tensors=random_tensors(values) | extra)
    assert len(load(folder)) == len(random_tensors(values))


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_"])
def test_the_text_part_of_an_image_model_loads(tmp_path, prefix):
    text = tiny_config("gemma3")
    # language_model.model.norm.weight, as transformers 4 wrote it, and then
    # model.language_model.norm.weight.
    tensors = {prefix + name: tensor for name, tensor in random_tensors(text).items()}
    tensors["vision_tower.encoder.weight"] = np.zeros((2, 2), np.float32)
    tensors["model.multi_modal_projector.weight"] = np.zeros((2, 2), np.float32)
    values = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    loaded = load(write_hf_folder(tmp_path / "image", values, tensors=tensors))
    plain = load(write_hf_folder(tmp_path / "text", text))
    assert loaded.keys() == plain.keys()
    for name, array in plain.items():
        np.testing.assert_array_equal(loaded[name], array)


def test_a_vision_tower_in_a_text_model_is_refused(tmp_path):
    values = tiny_config("gemma3")
    extra = {"vision_tower.encoder.weight": np.zeros((2, 2), np.float32)}
    folder = write_hf_folder(tmp_path, values, tensors=random_tensors(values) | extra)
    assert_refused(folder, "vision_tower.encoder.weight` is not used")


def test_one_tensor_under_two_names_is_refused(tmp_path):
    values = tiny_config("llama")
    extra = {"norm.weight": np.zeros(32, np.float32)}
    folder = write_hf_folder(tmp_path, values, tensors=random_tensors(values) | extra)
    assert_refused(folder, "name one tensor")


@pytest.mark.parametrize("part", [0, 1, 7, 8, 100, 3000, -1])
@pytest.mark.parametrize("shards", [0, 2])
def test_a_truncated_file_is_refused(tmp_path, part, shards):
    folder = write_hf_folder(tmp_path, tiny_config("llama"), shards=shards)
    path = sorted(folder.glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:part])
    assert_refused(folder, f"{path.name}: truncated or not a safetensors file")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", ""),
        ("config.json", "{"),
        ("config.json", "[1]"),
        ("config.json", "\udcff"),
        ("config.json", "[" * 100_000),
        ("config.json", '{"vocab_size": ' + "9" * 5000 + "}"),
        ("model.safetensors.index.json", "null"),
        ("model.safetensors.index.json", "{}"),
        ("model.safetensors.index.json", '{"weight_map": {}}'),
    ],
)
def test_broken_json_is_refused(tmp_path, file, text):
    folder = write_hf_folder(tmp_path, tiny_config("llama"), shards=2)
    (folder / file).write_bytes(text.encode(errors="surrogateescape"))
    assert_refused(folder, rf"{file}: (not valid JSON|holds|`weight_map`)")


def test_a_folder_without_its_files_says_what_is_missing(tmp_path):
    assert_refused(
        tmp_path, r"config\.json: cannot be read \(No such file or directory\)"
    )
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama")))
    assert_refused(tmp_path, "holds neither model.safetensors nor")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    assert_refused(tmp_path, "pickled weights are never read")
    assert_refused(tmp_path / "nowhere", "no such file or folder")


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        ("float32", "gguf"),
        pytest.param("float32", "hf", marks=pytest.mark.full),
        pytest.param("bfloat16", "hf", marks=pytest.mark.full),
        pytest.param("bfloat16", "gguf", marks=pytest.mark.full),
    ],
)
def test_loading_holds_little_more_than_the_model(tmp_path, layout, dtype):
    assert probe(tmp_path, layout, dtype, "load") < 1.3


def test_the_memory_probe_sees_a_second_copy(tmp_path):
    assert probe(tmp_path, "hf", "float32", "hoard") > 1.8


def probe(folder, *arguments):
    """Peak anonymous memory of a load over the size of the loaded model."""
    command = [sys.executable, "-m", "tests.checkpoints.memory_probe", str(folder)]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[-1])
