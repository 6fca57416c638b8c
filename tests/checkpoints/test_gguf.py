import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints import hub
from jaxspec.checkpoints.gguf import canonical_name, decode_rows, stored_row_order
from jaxspec.checkpoints.gguf_header import read_header
from jaxspec.checkpoints.load import expected_shapes, load_parameters, open_checkpoint
from jaxspec.models.config import Rope, RopeScaling
from tests.checkpoints.block_formats import FORMATS, decode, random_blocks
from tests.checkpoints.gguf_loads import assert_refused, load, tiny_parts
from tests.checkpoints.writers import (
    GGUF_FAMILIES,
    Stored,
    gguf_metadata,
    gguf_tensors,
    interleaved,
    plain,
    random_tensors,
    tiny_config,
    write_gguf,
    write_hf_folder,
    write_tiny_gguf,
)

LLAMA3 = RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_a_gguf_file_equals_the_folder_it_was_made_from(tmp_path, family, tied):
    values = tiny_config(family, tie_word_embeddings=tied)
    folder = open_checkpoint(write_hf_folder(tmp_path / "hf", values))
    file = open_checkpoint(write_tiny_gguf(tmp_path / "m.gguf", values))
    assert file.config.tied is tied
    assert file.config == changed_rounding(folder.config, file.config)
    expected = load_parameters(folder)
    parameters = load_parameters(file)
    assert parameters.keys() == expected.keys()
    for name, array in parameters.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def changed_rounding(config, file):
    """Metadata numbers are float32, those of JSON are not."""
    assert file.norm_eps == pytest.approx(config.norm_eps)
    return type(config)(**{**vars(config), "norm_eps": file.norm_eps})


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bl45_every_bias_follows_its_rows(tmp_path, family):
    values = tiny_config(family, attention_bias=True)
    expected = load(write_hf_folder(tmp_path / "hf", values))
    parameters = load(write_tiny_gguf(tmp_path / "m.gguf", values))
    assert "layers.1.self_attn.o_proj.bias" in parameters
    for name, array in parameters.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.mark.parametrize("heads", [4, 2])
def test_bl45_rows_of_each_head_come_back_in_order(heads):
    stored = np.concatenate(
        [8 * head + np.array([0, 4, 1, 5, 2, 6, 3, 7]) for head in range(heads)]
    )
    np.testing.assert_array_equal(interleaved(np.arange(8 * heads), heads), stored)
    np.testing.assert_array_equal(
        stored[stored_row_order(heads, 8)], np.arange(8 * heads)
    )


def test_bl45_the_number_of_key_heads_matters():
    rows = interleaved(np.arange(32), 2)
    right, wrong = stored_row_order(2, 16), stored_row_order(4, 8)
    np.testing.assert_array_equal(rows[right], np.arange(32))
    assert (rows[wrong] != np.arange(32)).any()


def test_bl47_q6_k_block_of_zero_bits_is_all_minus_32():
    block = bytearray(210)
    block[192:208] = bytes([1]) * 16
    block[208:] = np.float16(1).tobytes()
    values = decode_rows(np.frombuffer(block, np.uint8)[None], "Q6_K")
    assert values.shape == (1, 256)
    assert (values == -32).all()


@pytest.mark.parametrize("name", FORMATS)
def test_bl47_random_blocks_equal_a_second_decoder(name):
    raw = random_blocks(name, rows=5, columns=512, seed=FORMATS[name][0])
    values, wanted = decode_rows(raw, name), decode(name, raw)
    assert len(np.unique(values)) > 100
    np.testing.assert_allclose(values, wanted, rtol=1e-5, atol=1e-4)


def quantised_file(path, type_name, type_id=None):
    """A llama of width 256 whose matrices hold random blocks of one type."""
    values = tiny_config("llama", hidden_size=256, intermediate_size=256)
    tensors = gguf_tensors(values, random_tensors(values))
    known_id, _, _, _ = FORMATS[type_name]
    stored, raw = {}, {}
    for seed, (name, tensor) in enumerate(tensors.items()):
        if tensor.ndim == 1:
            stored[name] = plain(tensor)
            continue
        raw[name] = random_blocks(type_name, *tensor.shape, seed)
        number = known_id if type_id is None else type_id
        stored[name] = Stored(tensor.shape, number, raw[name].tobytes())
    return write_gguf(path, gguf_metadata(values), stored), raw


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bl47_a_quantised_file_loads_and_its_query_rows_are_put_in_order(
    tmp_path, name, dtype, monkeypatch
):
    # Blocks of three rows: a tensor is then read in many pieces, the last one short.
    monkeypatch.setattr("jaxspec.checkpoints.load._BLOCK_ELEMENTS", 3 * 256)
    path, raw = quantised_file(tmp_path / "m.gguf", name)
    parameters = load(path, dtype)
    for stored, heads in (("attn_q", 4), ("attn_k", 2), ("attn_v", None)):
        rows = decode(name, raw[f"blk.1.{stored}.weight"])
        if heads:
            shaped = rows.reshape(heads, -1, 2, 256)
            rows = np.concatenate([shaped[:, :, 0], shaped[:, :, 1]], axis=1)
        part = stored.removeprefix("attn_")
        loaded = parameters[f"layers.1.self_attn.{part}_proj.weight"]
        wanted = jnp.asarray(rows.reshape(-1, 256), jnp.float32)
        np.testing.assert_allclose(
            loaded.astype(jnp.float32),
            wanted,
            rtol=1e-5 if dtype == "float32" else 2**-8,
            atol=1e-4,
        )


@pytest.mark.parametrize("type_id", [4, 5, 9, 10, 20, 24, 31, 36, 99, 2**32 - 1])
def test_bl47_an_unknown_or_unsupported_type_id_is_refused(tmp_path, type_id):
    metadata, tensors = tiny_parts()
    wide = Stored((256,), type_id, bytes(2048))
    assert_refused(
        write_gguf(tmp_path / "m", metadata, tensors | {"output_norm.weight": wide}),
        rf"`output_norm.weight` is stored as .* \(id {type_id}\), expected one of F32",
    )


@pytest.mark.parametrize("per_layer", [[True, False], [False, False]])
def test_gemma_windows_may_be_listed_by_layer(tmp_path, per_layer):
    changes = {"gemma3.attention.sliding_window_pattern": per_layer}
    values = tiny_config("gemma3")
    config = open_checkpoint(write_tiny_gguf(tmp_path / "m", values, changes=changes))
    assert config.config.windows == tuple(8 if w else None for w in per_layer)


def test_bl47_type_ids_are_those_of_the_format():
    ids = {name: number for name, (number, *_) in FORMATS.items()}
    assert ids == {name: int(gguf.GGMLQuantizationType[name]) for name in FORMATS}
    assert (ids["Q4_0"], ids["Q5_0"], ids["Q5_1"], ids["Q8_0"]) == (2, 6, 7, 8)
    assert (ids["Q4_K"], ids["Q5_K"], ids["Q6_K"]) == (12, 13, 14)


@pytest.mark.parametrize("type_name", ["F16", "BF16"])
def test_half_precision_tensors_load(tmp_path, type_name):
    values = tiny_config("qwen2")
    path = write_tiny_gguf(tmp_path / "m.gguf", values, type_name)
    dtype = {"F16": "float16", "BF16": "bfloat16"}[type_name]
    expected = random_tensors(values)["model.layers.0.mlp.up_proj.weight"]
    loaded = load(path)["layers.0.mlp.up_proj.weight"]
    np.testing.assert_array_equal(loaded, expected.astype(jnp.dtype(dtype)))


def test_gemma_norms_are_not_raised_twice_and_stay_float32(tmp_path):
    metadata, tensors = tiny_parts("gemma3")
    norm = np.full(32, 1 + 2**-9, np.float32)
    path = write_gguf(
        tmp_path / "m", metadata, tensors | {"output_norm.weight": plain(norm)}
    )
    loaded = load(path, "bfloat16")["final_norm.weight"]
    assert loaded.dtype == jnp.float32
    np.testing.assert_array_equal(loaded, norm)


def test_a_file_of_the_official_writer_loads(tmp_path):
    metadata, tensors = tiny_parts("qwen3")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3")
    for key, value in metadata.items():
        if key != "general.architecture":
            add = {str: "string", int: "uint32", float: "float32", list: "array"}
            getattr(writer, f"add_{add[type(value)]}")(key, value)
    for name, stored in tensors.items():
        array = np.frombuffer(stored.data, np.float32).reshape(stored.shape)
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = load(write_gguf(tmp_path / "own.gguf", metadata, tensors))
    for name, array in load(tmp_path / "m.gguf").items():
        np.testing.assert_array_equal(array, expected[name])
    header = read_header(tmp_path / "m.gguf")
    tokens = metadata["tokenizer.ggml.tokens"]
    assert header.metadata["tokenizer.ggml.tokens"].read() == tokens


def llama3_factors(head_dim=64, theta=5e5, scaling=LLAMA3):
    plain_ones = np.array(Rope(theta).inverse_frequencies(head_dim))
    scaled = np.array(Rope(theta, scaling).inverse_frequencies(head_dim))
    return (plain_ones / scaled).astype(np.float32)


def with_factors(path, factors):
    values = tiny_config("llama", head_dim=64, rope_theta=5e5)
    tensors = gguf_tensors(values, random_tensors(values))
    stored = {name: plain(tensor) for name, tensor in tensors.items()}
    stored["rope_freqs.weight"] = plain(factors)
    return write_gguf(path, gguf_metadata(values), stored)


def test_bl38_rope_freqs_become_the_llama3_scaling(tmp_path):
    config = open_checkpoint(with_factors(tmp_path / "m", llama3_factors())).config
    assert config.ropes[0] == Rope(5e5, LLAMA3)
    ratio = 1 / llama3_factors()
    np.testing.assert_allclose(ratio[15:18], [0.60557, 0.30374, 0.10345], rtol=1e-4)
    config = open_checkpoint(with_factors(tmp_path / "1", np.ones(32))).config
    assert config.ropes[0] == Rope(5e5)


@pytest.mark.parametrize(
    "factors",
    [
        np.linspace(1, 32, 32),
        np.ones(31),
        np.full(32, 0.5),
        np.full(32, np.nan),
        llama3_factors(scaling=RopeScaling("llama3", 32.0, 1.0, 4.0, 4096)),
    ],
)
def test_bl38_other_rope_freqs_are_refused(tmp_path, factors):
    assert_refused(
        with_factors(tmp_path / "m", factors.astype(np.float32)), "rope_freqs"
    )


def test_gemma_windows_and_scaling_are_those_of_the_architecture(tmp_path):
    values = tiny_config("gemma3", num_hidden_layers=7)
    changes = {
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
        "gemma3.attention.sliding_window_pattern": None,
    }
    path = write_tiny_gguf(tmp_path / "m", values, changes=changes)
    config = open_checkpoint(path).config
    assert config.windows == (8,) * 5 + (None, 8)
    assert config.ropes[5] == Rope(1e6, RopeScaling("linear", 8.0))
    assert config.ropes[6] == Rope(1e4)
    assert config.query_scale == 0.25
    assert config.embedding_scale == 32**0.5


def test_gemma_27b_scales_queries_by_width_over_heads(tmp_path):
    values = tiny_config("gemma3", num_hidden_layers=62)
    config = open_checkpoint(write_tiny_gguf(tmp_path / "m", values)).config
    assert config.query_scale == 8**-0.5


@pytest.mark.parametrize(
    ("key", "value", "culprit"),
    [
        ("general.architecture", "mamba", "'mamba', expected one of llama, qwen2"),
        ("general.architecture", None, "`general.architecture` is missing"),
        ("general.architecture", 3, "`general.architecture` is 3"),
        ("general.type", "adapter", "'adapter'"),
        ("split.count", 2, "split.count` is 2"),
        ("llama.expert_count", 8, "expert_count` is 8"),
        ("llama.rope.scaling.type", "longrope", "rope.scaling.type` is 'longrope'"),
        ("llama.rope.scaling.type", "yarn", "rope.scaling.factor` is missing"),
        ("llama.rope.scaling.yarn_beta_fast", 8.0, "rope.scaling.yarn_beta_fast"),
        ("llama.attn_logit_softcapping", 50.0, "attn_logit_softcapping` is 50"),
        ("llama.final_logit_softcapping", 30.0, "final_logit_softcapping` is 30"),
        ("llama.rope.scaling.factor", 4.0, "rope.scaling.factor"),
        ("llama.rope.dimension_count", 4, "rope.dimension_count` is 4"),
        ("llama.attention.value_length", 16, "attention.value_length` is 16"),
        ("llama.attention.key_length", 7, "head width 7 is odd"),
        ("llama.attention.head_count", [4, 4], "attention.head_count"),
        ("llama.attention.head_count_kv", 3, "not a multiple of 3"),
        ("llama.attention.sliding_window", 64, "attention.sliding_window"),
        ("llama.attention.clamp_kqv", 1.0, "unknown field `attention.clamp_kqv`"),
        ("llama.logit_scale", 2.0, "unknown field `logit_scale`"),
        ("llama.attention.causal", False, "attention.causal"),
        ("llama.tensor_data_layout", "other", "tensor_data_layout"),
        ("llama.block_count", 0, "block_count` is 0"),
        ("llama.block_count", 2**31, "block_count"),
        ("llama.block_count", None, "`block_count` is missing"),
        ("llama.block_count", 3, "layers.2.input_layernorm.weight` is missing"),
        ("llama.block_count", 1, "blk.1.attn_norm.weight` is not used"),
        ("llama.vocab_size", 63, r"token_embd.weight` has shape \[64, 32\]"),
        ("llama.attention.layer_norm_rms_epsilon", -1.0, "layer_norm_rms_epsilon"),
        ("llama.rope.freq_base", float("nan"), "rope.freq_base` is nan"),
        ("general.alignment", 24, "its alignment is 24"),
        ("general.alignment", 0, "its alignment is 0"),
    ],
)
def test_metadata_that_would_change_the_maths_is_refused(tmp_path, key, value, culprit):
    metadata, tensors = tiny_parts()
    metadata = {k: v for k, v in (metadata | {key: value}).items() if v is not None}
    assert_refused(write_gguf(tmp_path / "m.gguf", metadata, tensors), culprit)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "blk.0.attn_q_norm.weight"),
        ("qwen2", "blk.0.post_ffw_norm.weight"),
        ("llama", "layers.0.mlp.up_proj.weight"),
        ("llama", "blk.00.attn_q.weight"),
        ("llama", "blk.2.attn_q.weight"),
        ("qwen3", "rope_freqs.bias"),
        ("llama", "blk.0.attn_q.weight\u0661"),
    ],
)
def test_a_tensor_without_a_role_is_refused(tmp_path, family, name):
    metadata, tensors = tiny_parts(family)
    extra = {name: plain(np.zeros((32, 32)))}
    assert_refused(
        write_gguf(tmp_path / "m", metadata, tensors | extra),
        f"is not used by a {family} decoder",
    )
    assert canonical_name("blk.\u0661.attn_q.weight", "llama") is None


def test_bl41_a_missing_bias_is_refused(tmp_path):
    metadata, tensors = tiny_parts("qwen2")
    del tensors["blk.1.attn_k.bias"]
    assert_refused(
        write_gguf(tmp_path / "m", metadata, tensors),
        "layers.1.self_attn.k_proj.bias` is missing",
    )


def test_all_faults_come_in_one_error(tmp_path):
    metadata, tensors = tiny_parts()
    del tensors["output_norm.weight"]
    tensors["blk.0.ffn_up.weight"] = plain(np.zeros((2, 3)))
    tensors["blk.0.ffn_down.weight"] = Stored((32, 64), 24, bytes(2048))
    tensors["surprise"] = plain(np.zeros(3))
    message = assert_refused(write_gguf(tmp_path / "m", metadata, tensors), "surprise")
    for culprit in ("final_norm.weight", "ffn_up.weight` has shape [2, 3]", "I8"):
        assert culprit in message


def test_smollm2_is_what_its_table_says():
    checkpoint = open_checkpoint(hub.fetch("smollm2-135m-instruct"))
    config = checkpoint.config
    assert (config.family, config.num_layers, config.hidden_size) == ("llama", 30, 576)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.tied, config.max_positions) == (49152, True, 8192)
    assert set(config.ropes) == {Rope(100_000.0)}
    parameters = load_parameters(checkpoint, "bfloat16")
    assert {n: p.shape for n, p in parameters.items()} == expected_shapes(config)
    assert sum(p.size for p in parameters.values()) == 134_515_008
