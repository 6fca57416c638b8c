"""The decoder's forward pass once more: NumPy, float64, the whole text at once.

Written from the papers and the families' definitions, not from `jaxspec.models`: no
cache, no blocks, plain softmax over a full score matrix, complex rotations.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxspec.models.config import ModelConfig, Rope, Yarn


class Reference(NamedTuple):
    """Logits `[n, V]` and the un-normed output of each block, `[L, n, E]`."""

    logits: np.ndarray
    blocks: np.ndarray


def forward(
    config: ModelConfig, parameters: Mapping[str, np.ndarray], ids: np.ndarray
) -> Reference:
    """Runs the decoder over one text."""
    weights = {name: np.float64(value) for name, value in parameters.items()}
    hidden = weights["embed_tokens.weight"][ids] * config.embedding_scale
    blocks = []
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        own = {
            name.removeprefix(prefix): value
            for name, value in weights.items()
            if name.startswith(prefix)
        }
        hidden = _block(config, layer, own, hidden)
        blocks.append(hidden)
    normed = _norm(hidden, weights["final_norm.weight"], config.norm_eps)
    head = weights["embed_tokens.weight" if config.tied else "lm_head.weight"]
    logits = _capped(normed @ head.T, config.logit_soft_cap)
    return Reference(logits, np.stack(blocks))


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Radians per position of each rotary pair; llama3 as Meta's code has it."""
    plain = 1.0 / rope.theta ** (np.arange(0, head_dim, 2) / head_dim)
    scaling = rope.scaling
    if scaling is None:
        return plain
    if isinstance(scaling, Yarn):
        return _yarn(scaling, plain)
    if scaling.kind == "linear":
        return plain / scaling.factor
    wavelength = 2 * math.pi / plain
    low_wavelength = scaling.original_positions / scaling.low_frequency_factor
    high_wavelength = scaling.original_positions / scaling.high_frequency_factor
    smooth = scaling.original_positions / wavelength - scaling.low_frequency_factor
    smooth /= scaling.high_frequency_factor - scaling.low_frequency_factor
    blended = (1 - smooth) * plain / scaling.factor + smooth * plain
    return np.where(
        wavelength < high_wavelength,
        plain,
        np.where(wavelength > low_wavelength, plain / scaling.factor, blended),
    )


def _yarn(scaling: Yarn, plain: np.ndarray) -> np.ndarray:
    """Pairs are counted off where they turn often and seldom enough; between, linear.

    A pair's index is a linear function of the logarithm of its turns.
    """
    pairs = np.arange(len(plain))
    slope, offset = np.polyfit(np.log(scaling.original_positions * plain), pairs, 1)
    turns = np.array([scaling.fast_turns, scaling.slow_turns])
    ends = slope * np.log(2 * math.pi * turns) + offset
    if scaling.truncate:
        ends = np.array([np.floor(ends[0]), np.ceil(ends[1])])
    ends = np.clip(ends, 0, 2 * len(plain) - 1)
    divided = np.interp(pairs, ends, [0.0, 1.0])
    return plain * (1 - divided) + plain / scaling.factor * divided


def _capped(values: np.ndarray, cap: float | None) -> np.ndarray:
    return values if cap is None else np.tanh(values / cap) * cap


def _block(config, layer, own, hidden):
    def norm(name, x):
        return _norm(x, own[f"{name}.weight"], config.norm_eps)

    mixed = _attention(config, layer, own, norm("input_layernorm", hidden))
    if config.sandwich_norms:
        hidden = hidden + norm("post_attention_layernorm", mixed)
        fed = _mlp(config, own, norm("pre_feedforward_layernorm", hidden))
        return hidden + norm("post_feedforward_layernorm", fed)
    hidden = hidden + mixed
    return hidden + _mlp(config, own, norm("post_attention_layernorm", hidden))


def _attention(config, layer, own, inputs):
    length, width = len(inputs), config.head_dim
    queries, keys, values = (
        _linear(own, f"self_attn.{part}_proj", inputs).reshape(length, -1, width)
        for part in "qkv"
    )
    if config.qk_norm:
        queries = _norm(queries, own["self_attn.q_norm.weight"], config.norm_eps)
        keys = _norm(keys, own["self_attn.k_norm.weight"], config.norm_eps)
    rope = config.ropes[layer]
    turns = np.exp(1j * np.outer(np.arange(length), frequencies(rope, width)))
    turns *= rope.attention_factor
    queries, keys = _turn(queries, turns), _turn(keys, turns)
    back = np.arange(length)[:, None] - np.arange(length)
    window = config.windows[layer]
    hidden_from = (back < 0) | (back >= (length if window is None else window))
    mixed = []
    for head in range(config.num_heads):
        shared = head * config.num_kv_heads // config.num_heads
        scores = queries[:, head] @ keys[:, shared].T * config.query_scale
        scores = _capped(scores, config.attention_soft_cap)
        scores[hidden_from] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        mixed.append(weights @ values[:, shared])
    return _linear(own, "self_attn.o_proj", np.concatenate(mixed, axis=1))


def _turn(heads, turns):
    """Multiplies pair (i, i + D/2), as a complex number, by its turn."""
    half = heads.shape[-1] // 2
    turned = (heads[..., :half] + 1j * heads[..., half:]) * turns[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _mlp(config, own, inputs):
    gate = _linear(own, "mlp.gate_proj", inputs)
    if config.activation == "silu":
        gate = gate / (1 + np.exp(-gate))
    else:
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        gate = 0.5 * gate * (1 + np.tanh(inner))
    return _linear(own, "mlp.down_proj", gate * _linear(own, "mlp.up_proj", inputs))


def _linear(own, name, inputs):
    return inputs @ own[f"{name}.weight"].T + own.get(f"{name}.bias", 0.0)


def _norm(inputs, scale, eps):
    return inputs / np.sqrt(np.mean(inputs**2, axis=-1, keepdims=True) + eps) * scale
