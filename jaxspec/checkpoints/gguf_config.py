"""GGUF metadata to `ModelConfig`, per architecture.

The keys are those of the GGUF specification; what an architecture fixes without a key
(gemma's window patterns and soft caps) is what llama.cpp computes.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.checkpoints.fields import Fields
from jaxspec.checkpoints.gguf_header import GgufHeader, LazyArray
from jaxspec.checkpoints.gguf_rope import read_local_rope, read_rope
from jaxspec.checkpoints.hf_config import LARGEST_POSITION, shape_faults
from jaxspec.models.config import ModelConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
_GEMMA = ("gemma2", "gemma3")
# Of each so many layers the last has no window.
_PATTERNS = {"gemma2": 2, "gemma3": 6}
# The sizes whose queries are scaled by width / heads, not by the head width: the 27Bs.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def parse_metadata(header: GgufHeader, rope_factors: np.ndarray | None) -> ModelConfig:
    """The decoder that a GGUF file describes.

    Args:
        header: of the file.
        rope_factors: `rope_freqs.weight` if the file has it: what each rotary frequency
            is divided by.

    Raises:
        UserError: one line with every key that is missing, out of range, unknown, or
            known and not supported.
    """
    arch = _architecture(header)
    fields = Fields(_own_keys(header.metadata, arch), f"{header.path} ({arch}.*)")
    _refuse_unsupported(fields)
    sizes = _sizes(fields, header)
    windows = _windows(fields, arch, sizes["num_layers"])
    rope = read_rope(fields, sizes["head_dim"], rope_factors)
    local_rope = read_local_rope(fields, arch, rope)
    sizes["max_positions"] = max(sizes["max_positions"], rope.positions)
    config = ModelConfig(
        family=arch,
        **sizes,
        **_biases(header, arch),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", high=1.0),
        query_scale=_query_width(arch, sizes) ** -0.5,
        windows=windows,
        ropes=tuple(rope if width is None else local_rope for width in windows),
        activation="gelu_tanh" if arch in _GEMMA else "silu",
        qk_norm=arch in ("qwen3", "gemma3"),
        sandwich_norms=arch in _GEMMA,
        tied="output.weight" not in header.tensors,
        embedding_scale=sizes["hidden_size"] ** 0.5 if arch in _GEMMA else 1.0,
        attention_soft_cap=_soft_cap(fields, arch, "attn_logit_softcapping", 50.0),
        logit_soft_cap=_soft_cap(fields, arch, "final_logit_softcapping", 30.0),
    )
    fields.refuse_unread()
    if not fields.faults:
        fields.faults.extend(shape_faults(config))
    fields.finish()
    return config


def _architecture(header: GgufHeader) -> str:
    general = Fields(header.metadata, header.path)
    general.only("general.type", "model")
    general.only("split.count", 0, 1)
    arch = general.choice(
        "general.architecture", {name: name for name in ARCHITECTURES}
    )
    general.finish()
    return arch


def _own_keys(metadata: Mapping[str, Any], arch: str) -> dict[str, Any]:
    prefix = f"{arch}."
    return {
        key.removeprefix(prefix): value
        for key, value in metadata.items()
        if key.startswith(prefix)
    }


def _refuse_unsupported(fields: Fields) -> None:
    fields.only("attention.causal", True)
    fields.only("expert_count", 0)
    fields.only("expert_used_count", 0)
    # Both writers of llama files order the rows of q and k the same way.
    fields.only("tensor_data_layout", "Meta AI original pth")


def _sizes(fields: Fields, header: GgufHeader) -> dict[str, int]:
    hidden = fields.integer("embedding_length", high=2**20)
    heads = fields.integer("attention.head_count", high=2**12)
    if (
        not fields.faults
        and hidden % heads
        and fields.raw("attention.key_length") is None
    ):
        fields.fault("embedding_length", f"a multiple of the {heads} heads")
    head_dim = fields.integer(
        "attention.key_length", max(1, hidden // heads), high=2**12
    )
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(name, head_dim) != head_dim:
            fields.fault(name, f"the head width, {head_dim}")
    return {
        "vocab_size": fields.integer("vocab_size", _vocabulary(header), high=2**24),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length", high=2**22),
        "num_layers": fields.integer("block_count", high=2**10),
        "num_heads": heads,
        "num_kv_heads": fields.integer("attention.head_count_kv", heads, high=2**12),
        "head_dim": head_dim,
        "max_positions": fields.integer("context_length", high=LARGEST_POSITION),
    }


def _vocabulary(header: GgufHeader) -> int:
    """The number of tokens, where no key states it; the embedding must agree."""
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, LazyArray):
        return tokens.count
    embedding = header.tensors.get("token_embd.weight")
    return embedding.shape[0] if embedding else 1


def _query_width(arch: str, sizes: dict[str, int]) -> float:
    if sizes["num_layers"] == _LAYERS_OF_27B.get(arch):
        return sizes["hidden_size"] / sizes["num_heads"]
    return sizes["head_dim"]


def _biases(header: GgufHeader, arch: str) -> dict[str, bool]:
    """Which projections have biases: files of one architecture differ in it."""

    def stored(name: str) -> bool:
        return f"blk.0.{name}.bias" in header.tensors

    return {
        "qkv_bias": arch == "qwen2" or stored("attn_q"),
        "output_bias": stored("attn_output"),
        "mlp_bias": stored("ffn_gate"),
    }


def _soft_cap(fields: Fields, arch: str, name: str, default: float) -> float | None:
    if arch != "gemma2":
        fields.only(name, 0.0)
        return None
    return fields.number(name, default, high=1e6)


def _windows(fields: Fields, arch: str, layers: int) -> tuple[int | None, ...]:
    if arch not in _GEMMA:
        fields.only("attention.sliding_window", 0)
        return (None,) * layers
    width = fields.integer("attention.sliding_window")
    pattern = fields.raw("attention.sliding_window_pattern")
    if isinstance(pattern, LazyArray):
        sliding = pattern.read()
        if len(sliding) != layers or any(type(value) is not bool for value in sliding):
            fields.fault("attention.sliding_window_pattern", f"{layers} true or false")
            sliding = [False] * layers
    else:
        every = fields.integer(
            "attention.sliding_window_pattern", _PATTERNS[arch], high=2**10
        )
        sliding = [(layer + 1) % every != 0 for layer in range(layers)]
    return tuple(width if windowed else None for windowed in sliding)
