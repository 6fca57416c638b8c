"""GGUF metadata to `ModelConfig`, per architecture.

The keys are those of the GGUF specification; what an architecture fixes without a key
(gemma3's window pattern and local rotary base) is what llama.cpp computes.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.checkpoints.fields import Fields, shown
from jaxspec.checkpoints.gguf_header import GgufHeader, LazyArray
from jaxspec.checkpoints.hf_config import shape_faults
from jaxspec.models.config import ModelConfig, Rope, RopeScaling

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
_GEMMA_PATTERN, _GEMMA_LOCAL_THETA = 6, 10_000.0
# The one gemma3 size whose queries are scaled by width / heads, not by the head width.
_GEMMA_27B_LAYERS = 62
_LARGEST_THETA = 1e12


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
    windows, local_theta = _windows(fields, arch, sizes["num_layers"])
    rope = _rope(fields, sizes["head_dim"], rope_factors)
    config = ModelConfig(
        family=arch,
        **sizes,
        **_biases(header, arch),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", high=1.0),
        query_scale=_query_width(arch, sizes) ** -0.5,
        windows=windows,
        ropes=tuple(rope if width is None else Rope(local_theta) for width in windows),
        activation="gelu_tanh" if arch == "gemma3" else "silu",
        qk_norm=arch in ("qwen3", "gemma3"),
        sandwich_norms=arch == "gemma3",
        tied="output.weight" not in header.tensors,
        embedding_scale=sizes["hidden_size"] ** 0.5 if arch == "gemma3" else 1.0,
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
    fields.only("attn_logit_softcapping", 0.0)
    fields.only("expert_count", 0)
    fields.only("expert_used_count", 0)
    fields.only("final_logit_softcapping", 0.0)
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
        "max_positions": fields.integer("context_length", high=2**30),
    }


def _vocabulary(header: GgufHeader) -> int:
    """The number of tokens, where no key states it; the embedding must agree."""
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, LazyArray):
        return tokens.count
    embedding = header.tensors.get("token_embd.weight")
    return embedding.shape[0] if embedding else 1


def _query_width(arch: str, sizes: dict[str, int]) -> float:
    if arch == "gemma3" and sizes["num_layers"] == _GEMMA_27B_LAYERS:
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


def _windows(
    fields: Fields, arch: str, layers: int
) -> tuple[tuple[int | None, ...], float]:
    if arch != "gemma3":
        fields.only("attention.sliding_window", 0)
        return (None,) * layers, 0.0
    width = fields.integer("attention.sliding_window")
    local_theta = fields.number(
        "rope.freq_base_swa", _GEMMA_LOCAL_THETA, low=1.0, high=_LARGEST_THETA
    )
    pattern = fields.raw("attention.sliding_window_pattern")
    if isinstance(pattern, LazyArray):
        sliding = pattern.read()
        if len(sliding) != layers or any(type(value) is not bool for value in sliding):
            fields.fault("attention.sliding_window_pattern", f"{layers} true or false")
            sliding = [False] * layers
    else:
        every = fields.integer(
            "attention.sliding_window_pattern", _GEMMA_PATTERN, high=2**10
        )
        sliding = [(layer + 1) % every != 0 for layer in range(layers)]
    return tuple(width if windowed else None for windowed in sliding), local_theta


def _rope(fields: Fields, head_dim: int, factors: np.ndarray | None) -> Rope:
    theta = fields.number("rope.freq_base", 10_000.0, low=1.0, high=_LARGEST_THETA)
    kind = fields.choice(
        "rope.scaling.type", {"none": "none", "linear": "linear"}, "none"
    )
    fields.only("rope.scale_linear", 1.0)
    fields.only("rope.scaling.attn_factor", 1.0)
    # Where the training stopped and whether the scaling was trained: no maths in it.
    fields.ignore(["rope.scaling.original_context_length", "rope.scaling.finetuned"])
    if kind == "linear":
        if factors is not None:
            fields.faults.append("it has both linear rope scaling and `rope_freqs`")
        factor = fields.number("rope.scaling.factor", low=0.999999, high=1e6)
        return Rope(theta, RopeScaling("linear", factor))
    fields.only("rope.scaling.factor", 0.0, 1.0)
    if factors is None:
        return Rope(theta)
    return _rope_from_factors(fields, Rope(theta), head_dim, factors)


def _rope_from_factors(
    fields: Fields, plain: Rope, head_dim: int, factors: np.ndarray
) -> Rope:
    """The Llama 3 scaling whose frequencies are the plain ones over `factors`.

    A GGUF file states the divisors and not the rule, so the rule is tried.
    """
    if factors.shape != (head_dim // 2,) or not np.all(factors >= 1):
        fields.faults.append(
            f"`rope_freqs.weight` is {shown(factors.tolist())}, expected "
            f"{head_dim // 2} factors of at least 1"
        )
        return plain
    if np.all(factors == 1):
        return plain
    scaled = Rope(plain.theta, RopeScaling("llama3", float(factors.max())))
    wanted = np.array(scaled.inverse_frequencies(head_dim))
    stored = np.array(plain.inverse_frequencies(head_dim)) / factors
    if not np.allclose(stored, wanted, rtol=1e-4, atol=0):
        fields.faults.append(
            "`rope_freqs.weight` is not the Llama 3 scaling (8192 positions, factors 1 "
            "and 4), the only one that is supported"
        )
    return scaled
