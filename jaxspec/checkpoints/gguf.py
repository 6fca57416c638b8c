"""Opens a GGUF file: names, row order and quantised blocks, per architecture."""

import re
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxspec.checkpoints.fields import shown
from jaxspec.checkpoints.gguf_config import parse_metadata
from jaxspec.checkpoints.gguf_header import GgufHeader, TensorInfo, read_header
from jaxspec.checkpoints.tensors import Checkpoint, StoredTensor, unused_tensor
from jaxspec.errors import UserError
from jaxspec.models.config import ModelConfig

_PLAIN = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
# Those of the package's decoders that the tests compare with a second one.
_QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_ROPE_FACTORS = "rope_freqs.weight"

_TOP = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "final_norm.weight",
    "output.weight": "lm_head.weight",
}
_COMMON = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_TWO_NORMS = {"ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BLOCKS = {
    "llama": _COMMON | _TWO_NORMS,
    "qwen2": _COMMON | _TWO_NORMS,
    "qwen3": _COMMON | _TWO_NORMS | _QK_NORMS,
    "gemma2": _COMMON | _FOUR_NORMS,
    "gemma3": _COMMON | _FOUR_NORMS | _QK_NORMS,
}


def open_gguf(path: Path) -> Checkpoint:
    """Reads metadata and tensor table of a GGUF file, and no weight.

    Gemma's norms are already stored as the scale itself (one was added by the writer).

    Raises:
        UserError: truncated or corrupt, an architecture or a key that is not supported.
    """
    header = read_header(path)
    config = parse_metadata(header, _rope_factors(header))
    tensors: dict[str, StoredTensor] = {}
    faults: list[str] = []
    for info in header.tensors.values():
        if info.name == _ROPE_FACTORS:
            continue
        if not _readable(info):
            faults.append(_unreadable(info))
        name = canonical_name(info.name, config.family)
        if name is None:
            faults.append(unused_tensor(info.name, config))
            continue
        tensors[name] = StoredTensor(
            info.name, info.shape, _reader(header, info, _row_order(name, info, config))
        )
    return Checkpoint(str(path), config, tensors, tuple(faults))


def canonical_name(name: str, architecture: str) -> str | None:
    """The Hugging Face name without `model.`, or None for a name without a role."""
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"blk\.(0|[1-9]\d{0,4})\.(\w+)\.(weight|bias)", name, re.ASCII)
    part = _BLOCKS[architecture].get(match[2]) if match else None
    return f"layers.{match[1]}.{part}.{match[3]}" if match and part else None


def stored_row_order(heads: int, head_dim: int) -> np.ndarray:
    """Where llama files keep each row of q or k: `stored[order]` is the usual order.

    Their rotary embedding turns neighbouring rows together, so the writer interleaves
    the two halves of each head; `heads` is that of the tensor, fewer for k than for q.
    """
    pairs = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)


def decode_rows(raw: np.ndarray, type_name: str) -> np.ndarray:
    """Values of stored rows: `[rows, bytes]` uint8 to `[rows, columns]` of a float."""
    if type_name in _PLAIN:
        return raw.view(_PLAIN[type_name])
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return dequantize(raw, GGMLQuantizationType[type_name])


def _readable(info: TensorInfo) -> bool:
    return info.type_name in _PLAIN or info.type_name in _QUANTISED


def _unreadable(info: TensorInfo) -> str:
    return (
        f"tensor `{shown(info.name)[1:-1]}` is stored as {info.type_name} (id "
        f"{info.type_id}), expected one of {', '.join([*_PLAIN, *_QUANTISED])}"
    )


def _rope_factors(header: GgufHeader) -> np.ndarray | None:
    info = header.tensors.get(_ROPE_FACTORS)
    if info is None:
        return None
    if info.type_name != "F32" or len(info.shape) != 1:
        raise UserError(f"{header.path}: {_unreadable(info)}; here one axis of F32")
    return decode_rows(header.bytes_of(info), info.type_name)[0]


def _row_order(name: str, info: TensorInfo, config: ModelConfig) -> np.ndarray | None:
    match = re.search(r"\.self_attn\.([qk])_proj\.", name)
    if config.family != "llama" or match is None:
        return None
    heads = config.num_heads if match[1] == "q" else config.num_kv_heads
    # A tensor of another height is refused before anything is read.
    return stored_row_order(heads, config.head_dim)


def _reader(
    header: GgufHeader, info: TensorInfo, order: np.ndarray | None
) -> Callable[[int, int], np.ndarray]:
    def rows(start: int, stop: int) -> np.ndarray:
        raw = header.bytes_of(info)
        if len(info.shape) == 1:
            values = decode_rows(raw, info.type_name)[0]
            return values[start:stop] if order is None else values[order[start:stop]]
        picked = raw[start:stop] if order is None else raw[order[start:stop]]
        return decode_rows(picked, info.type_name)

    return rows
