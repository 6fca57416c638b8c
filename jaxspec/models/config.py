"""What a decoder is, as one frozen dataclass: every field changes the maths."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling (Meta's `apply_scaling`), or a plain linear one.

    Attributes:
        kind: `linear` divides every frequency by `factor`; `llama3` divides those of
            wavelengths over `original_positions / low_frequency_factor`, keeps those
            under `original_positions / high_frequency_factor`, blends between.
    """

    kind: str
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192


@dataclasses.dataclass(frozen=True)
class Rope:
    """A rotary embedding: the base and its scaling."""

    theta: float
    scaling: RopeScaling | None = None

    def inverse_frequencies(self, head_dim: int) -> tuple[float, ...]:
        """Radians per position of each rotated pair, `head_dim / 2` of them."""
        return tuple(
            self._scaled(self.theta ** (-2 * pair / head_dim))
            for pair in range(head_dim // 2)
        )

    def _scaled(self, frequency: float) -> float:
        scaling = self.scaling
        if scaling is None:
            return frequency
        if scaling.kind == "linear":
            return frequency / scaling.factor
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        turns = scaling.original_positions * frequency / (2 * math.pi)
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        return frequency * (blend + (1 - blend) / scaling.factor)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer of the llama, qwen and gemma families.

    Attributes:
        family: `llama`, `qwen2`, `qwen3` or `gemma3`; for messages only.
        max_positions: the longest context the checkpoint was made for, in tokens.
        activation: of the gated MLP, `silu` or `gelu_tanh`.
        qk_norm: RMSNorm on each head of q and k, before the rotary embedding.
        sandwich_norms: norms after attention and after the MLP too (gemma).
        tied: the head is the embedding; nothing is stored for it.
        embedding_scale: multiplies the embedding, rounded to the weights' dtype.
        query_scale: multiplies q.k; `head_dim ** -0.5` nearly always.
        windows: per layer, how many positions a query sees, itself included; None: all.
        ropes: per layer.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    query_scale: float
    windows: tuple[int | None, ...]
    ropes: tuple[Rope, ...]
    activation: str = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    tied: bool = True
    embedding_scale: float = 1.0
