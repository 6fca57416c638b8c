"""Writes tiny models with random weights: Hugging Face folders and GGUF files."""

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxspec.checkpoints.hf_config import parse_config
from jaxspec.checkpoints.load import expected_shapes

GGUF_FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
FAMILIES = (*GGUF_FAMILIES, "mistral")
SAFETENSORS_TYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}

_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 64,
}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 10_000.0},
    "mistral": {"model_type": "mistral", "rope_theta": 10_000.0, "sliding_window": 8},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1e6, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "rope_theta": 1e6, "head_dim": 16},
    "gemma2": {
        "model_type": "gemma2",
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "rope_theta": 10_000.0,
        "sliding_window": 8,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
    },
}


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    """A small `config.json` of a family; a change to None removes the field."""
    values = _COMMON | _OWN[family] | changes
    return {name: value for name, value in values.items() if value is not None}


def random_tensors(values: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 weights as a Hugging Face folder stores them, by its names."""
    config = parse_config(values, "config.json")
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        weight = rng.standard_normal(shape, np.float32) * np.float32(0.3)
        if name.endswith("norm.weight") and "gemma" not in config.family:
            weight += 1
        tensors[hf_name(name)] = weight
    return tensors


def hf_name(canonical: str) -> str:
    """The name in a Hugging Face file of a canonical one."""
    name = canonical.replace("final_norm", "norm")
    return name if name.startswith("lm_head") else f"model.{name}"


def write_hf_folder(
    folder: Path,
    values: dict[str, Any],
    *,
    dtype: str = "float32",
    shards: int = 0,
    tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """Writes `config.json` and one safetensors file, or `shards` files and an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    tensors = random_tensors(values) if tensors is None else tensors
    stored = {n: t.astype(SAFETENSORS_TYPES[dtype]) for n, t in tensors.items()}
    if not shards:
        save_file(stored, folder / "model.safetensors")
        return folder
    names = sorted(stored)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: stored[name] for name in names[shard::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@dataclasses.dataclass
class Stored:
    """Bytes of a tensor as they go into a GGUF file, under any type id."""

    shape: tuple[int, ...]
    type_id: int
    data: bytes


TYPE_IDS = {"F32": 0, "F16": 1, "BF16": 30}
_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_ALIGNMENT = 32


def plain(array: np.ndarray, type_name: str = "F32") -> Stored:
    """An unquantised tensor."""
    data = array.astype(_DTYPES[type_name]).tobytes()
    return Stored(array.shape, TYPE_IDS[type_name], data)


def write_gguf(
    path: Path, metadata: dict[str, Any], tensors: dict[str, Stored]
) -> Path:
    """Writes a GGUF file, version 3, byte by byte: a second opinion on the format."""
    out = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        out += _text(key) + _typed(value)
    offset = 0
    for name, stored in tensors.items():
        out += _text(name) + struct.pack("<I", len(stored.shape))
        out += struct.pack(f"<{len(stored.shape)}Q", *reversed(stored.shape))
        out += struct.pack("<IQ", stored.type_id, offset)
        offset += _padded(len(stored.data))
    out += bytes(_padded(len(out)) - len(out))
    for stored in tensors.values():
        out += stored.data + bytes(_padded(len(stored.data)) - len(stored.data))
    path.write_bytes(out)
    return path


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _typed(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, list):
        kind = _typed(value[0])[:4] if value else struct.pack("<I", 8)
        body = b"".join(_typed(item)[4:] for item in value)
        return struct.pack("<I", 9) + kind + struct.pack("<Q", len(value)) + body
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<II", 4, value)


_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA_PARTS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_metadata(
    values: dict[str, Any], changes: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The keys that a converter writes for a tiny config; a change to None removes."""
    arch = values["model_type"].removesuffix("_text")
    own = {
        "block_count": values["num_hidden_layers"],
        "context_length": values["max_position_embeddings"],
        "embedding_length": values["hidden_size"],
        "feed_forward_length": values["intermediate_size"],
        "attention.head_count": values["num_attention_heads"],
        "attention.head_count_kv": values["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(values["rms_norm_eps"]),
        "rope.freq_base": float(values["rope_theta"]),
        "attention.key_length": values.get("head_dim"),
        "attention.value_length": values.get("head_dim"),
        "attn_logit_softcapping": values.get("attn_logit_softcapping"),
        "final_logit_softcapping": values.get("final_logit_softcapping"),
        "attention.sliding_window": values.get("sliding_window"),
        "attention.sliding_window_pattern": values.get("sliding_window_pattern"),
    }
    metadata = {"general.architecture": arch, "general.type": "model"}
    metadata |= {f"{arch}.{key}": value for key, value in own.items()}
    metadata["tokenizer.ggml.tokens"] = [f"t{i}" for i in range(values["vocab_size"])]
    metadata |= changes or {}
    return {key: value for key, value in metadata.items() if value is not None}


def gguf_tensors(
    values: dict[str, Any], tensors: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """What a converter makes of the weights: names, row order, gemma's norms."""
    gemma = "gemma" in values["model_type"]
    out = {}
    for name, tensor in tensors.items():
        if gemma and name.endswith("norm.weight"):
            tensor = tensor + np.float32(1)
        for part, field in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            if values["model_type"] == "llama" and f"self_attn.{part}_proj" in name:
                tensor = interleaved(tensor, values[field])
        out[_gguf_name(name, gemma)] = tensor
    return out


def interleaved(tensor: np.ndarray, heads: int) -> np.ndarray:
    """The row order of llama files: the two halves of each head in turn."""
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(tensor.shape)


def _gguf_name(name: str, gemma: bool) -> str:
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    parts = _GGUF_PARTS | (_GEMMA_PARTS if gemma else {})
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{parts[part]}.{kind}"


def write_tiny_gguf(
    path: Path,
    values: dict[str, Any],
    type_name: str = "F32",
    changes: dict[str, Any] | None = None,
) -> Path:
    """Writes the GGUF twin of `write_hf_folder(..., values)`; norms stay F32."""
    tensors = gguf_tensors(values, random_tensors(values))
    stored = {
        name: plain(tensor, type_name if tensor.ndim > 1 else "F32")
        for name, tensor in tensors.items()
    }
    return write_gguf(path, gguf_metadata(values, changes), stored)
