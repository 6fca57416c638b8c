import math

import pytest

from jaxspec.checkpoints.hf_config import parse_config
from jaxspec.checkpoints.load import expected_shapes, open_checkpoint
from jaxspec.errors import UserError
from jaxspec.models.config import Rope
from tests.checkpoints.writers import tiny_config, write_tiny_gguf

ATTENTION, LOGITS = "attn_logit_softcapping", "final_logit_softcapping"
NULL = object()


def parse(family, **changes):
    """A change to `NULL` writes null; one to None removes the field."""
    values = tiny_config(family, **changes)
    values = {name: None if v is NULL else v for name, v in values.items()}
    return parse_config(values, "config.json")


def test_gemma2_as_the_hub_has_it():
    # gemma-2-9b, with the fields that repeat others.
    config = parse_config(
        {
            "architectures": ["Gemma2ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_logit_softcapping": 50.0,
            "bos_token_id": 2,
            "cache_implementation": "hybrid",
            "eos_token_id": 1,
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 3584,
            "initializer_range": 0.02,
            "intermediate_size": 14336,
            "max_position_embeddings": 8192,
            "model_type": "gemma2",
            "num_attention_heads": 16,
            "num_hidden_layers": 42,
            "num_key_value_heads": 8,
            "pad_token_id": 0,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "sliding_window_size": 4096,
            "torch_dtype": "float32",
            "transformers_version": "4.42.0.dev0",
            "use_cache": True,
            "vocab_size": 256000,
        },
        "config.json",
    )
    assert config.windows == (4096, None) * 21
    assert set(config.ropes) == {Rope(1e4)}
    assert (config.attention_soft_cap, config.logit_soft_cap) == (50, 30)
    assert (config.query_scale, config.embedding_scale) == (1 / 16, 3584**0.5)
    assert config.activation == "gelu_tanh"
    assert config.tied and config.sandwich_norms and not config.qk_norm
    assert sum(map(math.prod, expected_shapes(config).values())) == 9_241_705_984


@pytest.mark.parametrize(
    ("stated", "wanted"), [(2.5, (2.5, 2.5)), (NULL, (None, None)), (None, (50, 30))]
)
def test_gemma2_caps_stated_null_or_left_to_the_class(stated, wanted):
    config = parse("gemma2", **{ATTENTION: stated, LOGITS: stated})
    assert (config.attention_soft_cap, config.logit_soft_cap) == wanted


def test_gemma2_layer_types_go_before_the_rule():
    assert parse("gemma2", num_hidden_layers=3).windows == (8, None, 8)
    listed = ["full_attention", "sliding_attention"]
    assert parse("gemma2", layer_types=listed).windows == (None, 8)
    assert parse("gemma2", sliding_window=None).windows == (4096, None)


def test_gemma2_scales_queries_by_a_field_of_its_own():
    assert parse("gemma2", query_pre_attn_scalar=144).query_scale == 1 / 12


def test_gemma3_caps_its_logits_and_nothing_else():
    config = parse("gemma3", **{LOGITS: 30.0, ATTENTION: NULL})
    assert (config.attention_soft_cap, config.logit_soft_cap) == (None, 30)
    assert parse("gemma3").logit_soft_cap is None


def test_an_image_model_of_gemma3_applies_no_cap():
    text = tiny_config("gemma3", **{LOGITS: 30.0})
    values = {"model_type": "gemma3", "text_config": text}
    with pytest.raises(UserError, match=LOGITS):
        parse_config(values, "config.json")


@pytest.mark.parametrize(
    ("window", "wanted"), [(8, (8, 8)), (NULL, (None, None)), (None, (4096, 4096))]
)
def test_mistral_windows_stated_null_or_left_to_the_class(window, wanted):
    assert parse("mistral", sliding_window=window).windows == wanted


def test_mistral_head_width():
    assert parse("mistral").head_dim == 8
    assert parse("mistral", head_dim=16).head_dim == 16
    alike = ["sliding_attention"] * 2
    assert parse("mistral", layer_types=alike) == parse("mistral")


@pytest.mark.parametrize(
    ("family", "changes", "culprit"),
    [
        ("gemma2", {ATTENTION: -50.0}, f"{ATTENTION}` is -50"),
        ("gemma2", {LOGITS: 0.0}, f"{LOGITS}` is 0"),
        ("gemma2", {LOGITS: "30"}, f"{LOGITS}` is '30'"),
        ("gemma2", {"hidden_act": "silu"}, "hidden_act` is 'silu'"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation` is 'relu'"),
        ("gemma2", {"sliding_window_size": 16}, "sliding_window_size` is 16"),
        ("gemma2", {"sliding_window": NULL}, "sliding_window` is None"),
        ("gemma2", {"sliding_window_pattern": 2}, "unknown field `sliding_window_p"),
        ("gemma2", {"rope_local_base_freq": 1e4}, "rope_local_base_freq"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar` is 0"),
        ("gemma3", {ATTENTION: 50.0}, f"{ATTENTION}` is 50"),
        ("gemma3", {"sliding_window": NULL}, "sliding_window` is None"),
        ("mistral", {ATTENTION: 50.0}, f"{ATTENTION}` is 50"),
        ("mistral", {LOGITS: 30.0}, f"{LOGITS}` is 30"),
        ("mistral", {"sliding_window": 0}, "sliding_window` is 0"),
        ("mistral", {"attention_bias": True}, "attention_bias` is True"),
        ("mistral", {"mlp_bias": True}, "mlp_bias` is True"),
        ("mistral", {"use_sliding_window": True}, "unknown field `use_sliding"),
        (
            "mistral",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types` is .* expected all layers alike",
        ),
        (
            "mistral",
            {"sliding_window": NULL, "layer_types": ["sliding_attention"] * 2},
            "layer_types` is",
        ),
        ("mistral", {"architectures": ["Ministral3ForCausalLM"]}, "architectures"),
    ],
)
def test_a_field_that_would_change_the_maths_is_refused(family, changes, culprit):
    with pytest.raises(UserError, match=rf"^config\.json: .*{culprit}"):
        parse(family, **changes)


def test_a_qwen_file_that_asks_for_windows_of_no_width_has_none():
    config = parse(
        "qwen2", use_sliding_window=True, sliding_window=NULL, max_window_layers=0
    )
    assert config.windows == (None, None)


def test_gemma2_in_gguf_has_the_caps_of_the_file_or_the_architecture(tmp_path):
    values = tiny_config("gemma2", num_hidden_layers=46)
    silent = {f"gemma2.{ATTENTION}": None, f"gemma2.{LOGITS}": None}
    stated = open_checkpoint(write_tiny_gguf(tmp_path / "stated", values)).config
    file = write_tiny_gguf(tmp_path / "silent", values, changes=silent)
    config = open_checkpoint(file).config
    assert (stated.attention_soft_cap, stated.logit_soft_cap) == (5, 3)
    assert (config.attention_soft_cap, config.logit_soft_cap) == (50, 30)
    assert config.windows[:3] == (8, None, 8)
    # 46 layers: the 27B, whose queries are scaled by width / heads.
    assert config.query_scale == 8**-0.5
    assert set(config.ropes) == {Rope(1e4)}
