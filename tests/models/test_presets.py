import math

import pytest

from jaxspec.checkpoints.hf_config import parse_config
from jaxspec.checkpoints.load import expected_shapes
from jaxspec.errors import UserError
from jaxspec.models.presets import PRESETS, preset

# Parameters as the hub counts them in the published files, a tied head once.
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma-3-1b": 999_885_952,
    # Those of the whole image models.
    "gemma-3-4b": 4_300_079_472,
    "gemma-3-12b": 12_187_325_040,
    "gemma-3-27b": 27_432_406_640,
}


def of_the_image_part(width):
    """Parameters of gemma 3's vision tower (SigLIP, 896 pixels) and its projector."""
    hidden, inner, layers, patch, patches = 1152, 4304, 27, 14, 64**2
    attention = 4 * (hidden * hidden + hidden)
    mlp = 2 * hidden * inner + inner + hidden
    block = attention + mlp + 2 * 2 * hidden
    embedding = 3 * patch * patch * hidden + hidden + patches * hidden
    projector = hidden * width + hidden
    return embedding + layers * block + 2 * hidden + projector


@pytest.mark.parametrize("name", PRESETS)
def test_the_parameters_are_as_many_as_published(name):
    config = preset(name)
    found = sum(map(math.prod, expected_shapes(config).values()))
    if name in ("gemma-3-4b", "gemma-3-12b", "gemma-3-27b"):
        found += of_the_image_part(config.hidden_size)
    assert found == PUBLISHED[name]


LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
QWEN2 = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "max_position_embeddings": 32768,
    "max_window_layers": 70,
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3 = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA_1B = {
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
GEMMA_27B = {
    "model_type": "gemma3",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama-3.2-1b", LLAMA),
        ("qwen2.5-32b", QWEN2),
        ("qwen3-8b", QWEN3),
        ("gemma-3-1b", GEMMA_1B),
        ("gemma-3-27b", GEMMA_27B),
    ],
)
def test_a_preset_is_what_the_published_file_parses_to(name, published):
    assert preset(name) == parse_config(published, "config.json")


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match=r"'llama-8b', expected one of .*llama-3.1-8b"):
        preset("llama-8b")
