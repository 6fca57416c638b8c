"""The model types of `config.json` and what each fixes or lets a file leave out.

Names and defaults are those of the `transformers` configuration classes (4 and 5).
"""

import dataclasses
from collections.abc import Mapping

HARMLESS = (
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "attention_dropout",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "label2id",
    "model_type",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "sep_token_id",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
)
# What an image model adds round the text decoder; images are not an input here.
HARMLESS_OF_IMAGE_MODELS = (
    "boi_token_id",
    "boi_token_index",
    "eoi_token_id",
    "eoi_token_index",
    "image_token_id",
    "image_token_index",
    "mm_tokens_per_image",
    "vision_config",
)
# Fields that change the maths where they hold anything but these values.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "pretraining_tp": (1,),
    "pruned_heads": ({},),
    "quantization_config": (),
    "rope_interleaved": (False,),
    "tie_encoder_decoder": (False,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
}
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


# Caps of `c * tanh(x / c)`, by the name of the field.
ATTENTION_SOFT_CAP, LOGIT_SOFT_CAP = "attn_logit_softcapping", "final_logit_softcapping"


@dataclasses.dataclass(frozen=True)
class Family:
    """What a model type fixes, and the defaults that its files may leave out.

    Attributes:
        windows: a key of `hf_windows.RULES`: which layers have a window.
        attention_bias: of q, k and v alone, whatever the file says; None: the file says
            it, and means the output's too.
        gemma: norms stored less one, four of them a block, a scaled embedding, and the
            queries' scale in a field of its own.
        local_theta: windowed layers have a rope of their own, with this default base.
        soft_caps: those that the family's class applies, with the default of each.
        repeated: fields that a file may repeat under an older name, by that name.
    """

    name: str
    architectures: tuple[str, ...]
    windows: str = "none"
    activation_field: str = "hidden_act"
    activation: str = "silu"
    attention_bias: bool | None = None
    qk_norm: bool = False
    gemma: bool = False
    tied: bool = False
    norm_eps: float = 1e-6
    theta: float = 10_000.0
    local_theta: float | None = None
    soft_caps: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    repeated: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, int] = dataclasses.field(default_factory=dict)


LLAMA = Family("llama", ("LlamaForCausalLM", "LlamaModel"))
MISTRAL = Family(
    "mistral",
    ("MistralForCausalLM", "MistralModel"),
    windows="all",
    attention_bias=False,
)
QWEN2 = Family(
    "qwen2",
    ("Qwen2ForCausalLM", "Qwen2Model"),
    windows="late",
    attention_bias=True,
)
QWEN3 = Family(
    "qwen3", ("Qwen3ForCausalLM", "Qwen3Model"), windows="late", qk_norm=True
)
GEMMA2 = Family(
    "gemma2",
    ("Gemma2ForCausalLM", "Gemma2Model"),
    windows="alternate",
    activation_field="hidden_activation",
    activation="gelu_tanh",
    gemma=True,
    tied=True,
    soft_caps={ATTENTION_SOFT_CAP: 50.0, LOGIT_SOFT_CAP: 30.0},
    repeated={
        "hidden_act": "hidden_activation",
        "sliding_window_size": "sliding_window",
    },
)
GEMMA3 = Family(
    "gemma3",
    ("Gemma3ForCausalLM", "Gemma3TextModel", "Gemma3ForConditionalGeneration"),
    windows="pattern",
    activation_field="hidden_activation",
    activation="gelu_tanh",
    qk_norm=True,
    gemma=True,
    tied=True,
    theta=1_000_000.0,
    local_theta=10_000.0,
    # Its class stores the other cap and never applies it.
    soft_caps={LOGIT_SOFT_CAP: None},
    # The image models of this family write only what differs from these.
    defaults={
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
)
FAMILIES = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma3_text": GEMMA3,
    # The image model's class applies no cap.
    "gemma3": dataclasses.replace(GEMMA3, soft_caps={}),
    "gemma2": GEMMA2,
    "mistral": MISTRAL,
}
