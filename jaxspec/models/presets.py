"""Configs of published models, without weights: to plan and compile with."""

from typing import Any

from jaxspec.errors import UserError
from jaxspec.models.config import ModelConfig, Rope, RopeScaling

# The numbers are those of the published `config.json` files, named beside each family;
# what gemma's leave out is the default of their class in `transformers`.


def preset(name: str) -> ModelConfig:
    """The config of a published model, by its name in `PRESETS`: `qwen3-0.6b`.

    Raises:
        UserError: no such name.
    """
    if name not in PRESETS:
        raise UserError(f"preset is {name!r}, expected one of {', '.join(PRESETS)}")
    return PRESETS[name]


def _config(
    family: str, sizes: tuple[int, ...], rope: Rope, **other: Any
) -> ModelConfig:
    """A config of layers, width, MLP width, heads, key heads and head width."""
    layers, width, inner, heads, kv_heads, head_dim = sizes
    ordinary = {
        "query_scale": head_dim**-0.5,
        "windows": (None,) * layers,
        "ropes": (rope,) * layers,
    }
    return ModelConfig(
        family=family,
        hidden_size=width,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        **(ordinary | other),
    )


def _llama(*sizes: int, factor: float, tied: bool) -> ModelConfig:
    """meta-llama/Llama-3.1-* and Llama-3.2-*."""
    return _config(
        "llama",
        sizes,
        Rope(500_000.0, RopeScaling("llama3", factor, 1.0, 4.0, 8192)),
        vocab_size=128_256,
        max_positions=131_072,
        norm_eps=1e-5,
        tied=tied,
    )


def _smollm2(*sizes: int) -> ModelConfig:
    """HuggingFaceTB/SmolLM2-*-Instruct."""
    return _config(
        "llama",
        sizes,
        Rope(100_000.0),
        vocab_size=49_152,
        max_positions=8192,
        norm_eps=1e-5,
        tied=True,
    )


def _qwen2(*sizes: int, tied: bool) -> ModelConfig:
    """Qwen/Qwen2.5-*-Instruct; the larger ones pad their vocabulary further."""
    return _config(
        "qwen2",
        sizes,
        Rope(1_000_000.0),
        vocab_size=151_936 if tied else 152_064,
        max_positions=32_768,
        norm_eps=1e-6,
        qkv_bias=True,
        tied=tied,
    )


def _qwen3(*sizes: int, tied: bool) -> ModelConfig:
    """Qwen/Qwen3-*."""
    return _config(
        "qwen3",
        sizes,
        Rope(1_000_000.0),
        vocab_size=151_936,
        max_positions=40_960,
        norm_eps=1e-6,
        qk_norm=True,
        tied=tied,
    )


def _gemma3(
    *sizes: int, images: bool = True, query_width: float = 256.0
) -> ModelConfig:
    """google/gemma-3-*-it, the text decoder; all but the smallest also take images."""
    layers, width, *_ = sizes
    full = Rope(1_000_000.0, RopeScaling("linear", 8.0) if images else None)
    windowed = [(layer + 1) % 6 != 0 for layer in range(layers)]
    window = 1024 if images else 512
    return _config(
        "gemma3",
        sizes,
        full,
        vocab_size=262_208 if images else 262_144,
        max_positions=131_072 if images else 32_768,
        norm_eps=1e-6,
        query_scale=query_width**-0.5,
        windows=tuple(window if each else None for each in windowed),
        ropes=tuple(Rope(10_000.0) if each else full for each in windowed),
        activation="gelu_tanh",
        qk_norm=True,
        sandwich_norms=True,
        embedding_scale=width**0.5,
    )


PRESETS: dict[str, ModelConfig] = {
    "smollm2-135m": _smollm2(30, 576, 1536, 9, 3, 64),
    "llama-3.2-1b": _llama(16, 2048, 8192, 32, 8, 64, factor=32.0, tied=True),
    "llama-3.2-3b": _llama(28, 3072, 8192, 24, 8, 128, factor=32.0, tied=True),
    "llama-3.1-8b": _llama(32, 4096, 14336, 32, 8, 128, factor=8.0, tied=False),
    "llama-3.1-70b": _llama(80, 8192, 28672, 64, 8, 128, factor=8.0, tied=False),
    "qwen2.5-0.5b": _qwen2(24, 896, 4864, 14, 2, 64, tied=True),
    "qwen2.5-1.5b": _qwen2(28, 1536, 8960, 12, 2, 128, tied=True),
    "qwen2.5-3b": _qwen2(36, 2048, 11008, 16, 2, 128, tied=True),
    "qwen2.5-7b": _qwen2(28, 3584, 18944, 28, 4, 128, tied=False),
    "qwen2.5-14b": _qwen2(48, 5120, 13824, 40, 8, 128, tied=False),
    "qwen2.5-32b": _qwen2(64, 5120, 27648, 40, 8, 128, tied=False),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, 8, 128, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, 8, 128, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, 8, 128, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, 8, 128, tied=False),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40, 8, 128, tied=False),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64, 8, 128, tied=False),
    "gemma-3-1b": _gemma3(26, 1152, 6912, 4, 1, 256, images=False),
    "gemma-3-4b": _gemma3(34, 2560, 10240, 8, 4, 256),
    "gemma-3-12b": _gemma3(48, 3840, 15360, 16, 8, 256),
    "gemma-3-27b": _gemma3(62, 5376, 21504, 32, 16, 128, query_width=168.0),
}

# What these are loaded by, where that is not the preset's own name.
REFERENCES: dict[str, str] = {
    "smollm2-135m-instruct": "smollm2-135m",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m",
    "meta-llama/Llama-3.2-1B-Instruct": "llama-3.2-1b",
    "meta-llama/Llama-3.2-3B-Instruct": "llama-3.2-3b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "meta-llama/Llama-3.1-70B-Instruct": "llama-3.1-70b",
    "Qwen/Qwen3-0.6B": "qwen3-0.6b",
    "Qwen/Qwen3-14B": "qwen3-14b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "google/gemma-3-1b-it": "gemma-3-1b",
    "google/gemma-3-27b-it": "gemma-3-27b",
}
