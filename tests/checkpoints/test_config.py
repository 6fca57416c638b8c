import json
import math

import jax
import numpy as np
import pytest
from flax import nnx

from jaxspec.checkpoints.hf_config import parse_config
from jaxspec.checkpoints.load import expected_shapes
from jaxspec.errors import UserError
from jaxspec.models.config import Rope, RopeScaling
from jaxspec.models.decoder import Decoder
from tests.checkpoints.writers import FAMILIES, tiny_config

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def parse(family="llama", **changes):
    return parse_config(tiny_config(family, **changes), "config.json")


def new_layout(family):
    """The same config as transformers 5 writes it."""
    values = tiny_config(family)
    full = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
    values["dtype"] = "bfloat16"
    if family != "gemma3":
        return values | {"rope_parameters": full}
    local = {"rope_type": "default", "rope_theta": values.pop("rope_local_base_freq")}
    del values["sliding_window_pattern"]
    return values | {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_old_and_new_layout_give_the_same_config(family):
    assert parse_config(new_layout(family), "new") == parse(family)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_expected_shapes_are_those_of_the_module(family, tied):
    bias = None if family in ("qwen2", "mistral") else True
    config = parse(
        family,
        tie_word_embeddings=tied,
        attention_bias=bias,
        mlp_bias=True if family == "llama" else None,
    )
    module = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    shapes = {".".join(map(str, path)): leaf.shape for path, leaf in flat}
    assert shapes == expected_shapes(config)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_bl38_llama3_scaling_changes_the_frequencies(key):
    config = parse(rope_scaling={key: "llama3", **LLAMA3}, head_dim=8)
    frequencies = config.ropes[0].inverse_frequencies(8)
    np.testing.assert_allclose(frequencies, [1, 0.0130423, 0.00125, 0.000125], 1e-5)
    plain = parse(head_dim=8).ropes[0].inverse_frequencies(8)
    np.testing.assert_allclose(plain, [1, 0.1, 0.01, 0.001])


def test_bl38_frequencies_of_llama_3_2_1b():
    scaling = LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192}
    config = parse(
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling},
        rope_theta=None,
        head_dim=64,
    )
    ratio = np.array(config.ropes[1].inverse_frequencies(64)) / np.array(
        Rope(5e5).inverse_frequencies(64)
    )
    np.testing.assert_allclose(ratio[:15], 1)
    np.testing.assert_allclose(ratio[15:18], [0.60557, 0.30374, 0.10345], rtol=1e-4)
    np.testing.assert_allclose(ratio[18:], 1 / 32)


@pytest.mark.parametrize("kind", ["ntk", "dynamic", "longrope", "su", "mrope", 3])
@pytest.mark.parametrize("layout", ["rope_scaling", "rope_parameters"])
def test_bl38_unknown_rope_type_is_refused_by_name(kind, layout):
    with pytest.raises(UserError, match=rf"rope_type` is .*{kind}"):
        parse(**{layout: {"rope_type": kind, "factor": 2.0}}, rope_theta=None)


@pytest.mark.parametrize(
    ("scaling", "culprit"),
    [
        ({"rope_type": "linear"}, "factor` is missing"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor` is missing"),
        ({"rope_type": "linear", "factor": 0.5}, "factor` is 0.5"),
        ({"rope_type": "linear", "factor": math.nan}, "factor` is nan"),
        (
            {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0},
            "high_freq_factor",
        ),
        ({"rope_type": "default", "factor": 8.0}, "unknown field `factor`"),
        ({"rope_type": "linear", "type": "llama3", "factor": 2.0}, "`type` is"),
        ({"type": "linear", "factor": 2.0, "mrope_section": [1]}, "mrope_section"),
        ("linear", "expected an object"),
    ],
)
def test_bad_rope_scaling_is_refused(scaling, culprit):
    with pytest.raises(UserError, match=culprit):
        parse(rope_scaling=scaling)


def test_the_two_rope_layouts_may_not_disagree():
    with pytest.raises(UserError, match="keep one of the two layouts"):
        parse(rope_theta=5e5, rope_parameters={"rope_theta": 1e4})
    assert parse(rope_theta=5e5, rope_parameters={"rope_theta": 5e5}).ropes[0] == Rope(
        5e5
    )


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_bl40_missing_head_dim_is_width_over_heads(family):
    assert parse(family).head_dim == 8


def test_bl40_head_dim_is_not_width_over_heads():
    config = parse("qwen3")
    shapes = expected_shapes(config)
    assert config.qk_norm
    assert shapes["layers.0.self_attn.q_proj.weight"] == (64, 32)
    assert shapes["layers.0.self_attn.k_proj.weight"] == (32, 32)
    assert shapes["layers.0.self_attn.o_proj.weight"] == (32, 64)
    assert shapes["layers.0.self_attn.q_norm.weight"] == (16,)


@pytest.mark.parametrize(
    ("family", "changes", "qkv", "output", "mlp"),
    [
        ("llama", {}, False, False, False),
        ("llama", {"attention_bias": True}, True, True, False),
        ("llama", {"mlp_bias": True}, False, False, True),
        ("qwen2", {}, True, False, False),
        ("qwen3", {"attention_bias": True}, True, True, False),
        ("gemma3", {"attention_bias": True}, True, True, False),
    ],
)
def test_bl41_biases(family, changes, qkv, output, mlp):
    config = parse(family, **changes)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (qkv, output, mlp)
    assert ("layers.1.self_attn.k_proj.bias" in expected_shapes(config)) is qkv


def test_gemma_config_of_the_270m_model():
    config = parse(
        "gemma3",
        num_hidden_layers=8,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        sliding_window_pattern=None,
        _sliding_window_pattern=6,
        use_bidirectional_attention=False,
    )
    assert config.windows == (512,) * 5 + (None,) + (512,) * 2
    assert config.ropes[4:7] == (Rope(1e4), Rope(1e6), Rope(1e4))
    assert config.query_scale == 1 / 16
    assert config.embedding_scale == math.sqrt(32)
    assert config.activation == "gelu_tanh"
    assert config.tied and config.sandwich_norms and config.qk_norm


def test_gemma_image_model_of_4b_uses_its_text_config_and_the_defaults():
    values = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }
    config = parse_config(values, "config.json")
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.vocab_size == 262208 and config.tied
    assert config.windows[:6] == (1024,) * 5 + (None,)
    assert config.ropes[0] == Rope(1e4)
    assert config.ropes[5] == Rope(1e6, RopeScaling("linear", 8.0))
    assert config.query_scale == 1 / 16


def test_configs_that_hubs_hold_are_accepted():
    smollm = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "is_llama_config": True,
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"dtype": "q4"},
        "use_cache": True,
    }
    config = parse_config(tiny_config("llama") | smollm, "config.json")
    assert config == parse("llama")
    qwen = {"sliding_window": 32768, "max_window_layers": 21, "use_mrope": False}
    config = parse_config(
        tiny_config("qwen2") | qwen | {"use_sliding_window": False}, "config.json"
    )
    assert config.windows == (None, None)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_windows_begin_after_max_window_layers(family):
    config = parse(
        family,
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=3,
    )
    assert config.windows == (None, None, None, 16)


@pytest.mark.parametrize(
    ("family", "changes", "culprit"),
    [
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp` is 2"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor` is 0.5"),
        ("llama", {"hidden_act": "relu"}, "hidden_act` is 'relu'"),
        ("llama", {"sliding_window": 128}, "sliding_window"),
        ("llama", {"auto_map": {"AutoModel": "m.M"}}, "unknown field `auto_map`"),
        ("llama", {"logit_scale": 0.1}, "unknown field `logit_scale`"),
        ("llama", {"rope_local_base_freq": 1e4}, "rope_local_base_freq"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved"),
        ("llama", {"architectures": ["LlamaForCausalLMEagle3"]}, "architectures"),
        ("llama", {"architectures": [{}]}, "architectures"),
        ("llama", {"head_dim": 7}, "head width 7 is odd"),
        ("llama", {"hidden_size": 33}, "hidden_size` is 33"),
        ("llama", {"num_key_value_heads": 3}, "not a multiple of 3"),
        ("llama", {"num_key_value_heads": 8}, "not a multiple of 8"),
        ("qwen2", {"attention_bias": False}, "attention_bias` is False"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 2}, "layer_types"),
        ("qwen3", {"query_pre_attn_scalar": 8}, "query_pre_attn_scalar"),
        ("gemma3", {"final_logit_softcapping": 0}, "final_logit_softcapping` is 0"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional"),
        ("gemma3", {"hidden_act": "silu"}, "unknown field `hidden_act`"),
        ("gemma3", {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters"),
    ],
)
def test_a_field_that_would_change_the_maths_is_refused(family, changes, culprit):
    with pytest.raises(UserError, match=rf"^config\.json: .*{culprit}"):
        parse(family, **changes)


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize(
    "value",
    [0, -4, 2**40, pytest.param(10**400, id="1e400"), 4.0, "4", True, [4], math.nan],
)
def test_a_hostile_size_is_refused(name, value):
    with pytest.raises(UserError, match=f"`{name}` is ") as caught:
        parse("llama", **{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [0, -1e-6, 2.0, math.inf, math.nan, "1e-6", True])
def test_a_hostile_epsilon_or_theta_is_refused(value):
    with pytest.raises(UserError, match="`rms_norm_eps` is "):
        parse("llama", rms_norm_eps=value)
    with pytest.raises(UserError, match="`rope_theta` is "):
        parse("llama", rope_theta=1.0 if value == 2.0 else value)


def test_a_required_field_that_is_missing_is_named():
    with pytest.raises(UserError, match="`intermediate_size` is missing"):
        parse("llama", intermediate_size=None)


@pytest.mark.parametrize("kind", [None, "mixtral", "smollm3", ["llama"], {}])
def test_another_model_type_is_refused(kind):
    values = tiny_config("llama") | {"model_type": kind}
    with pytest.raises(UserError, match="expected one of llama, qwen2, qwen3, gemma3"):
        parse_config(values, "config.json")


def test_all_faults_come_in_one_line():
    with pytest.raises(UserError) as caught:
        parse("llama", vocab_size=-1, hidden_act="relu", surprise=1, rope_theta=0)
    message = str(caught.value)
    for culprit in ("vocab_size", "hidden_act", "surprise", "rope_theta"):
        assert culprit in message
    assert "\n" not in message


def test_a_config_survives_json():
    values = json.loads(json.dumps(new_layout("gemma3")))
    assert parse_config(values, "x") == parse("gemma3")
