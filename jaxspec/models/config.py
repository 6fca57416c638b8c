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

    def kept(self, theta: float, head_dim: int) -> tuple[float, ...]:
        """Per pair, how much of its plain frequency is kept, from 0 to 1."""
        if self.kind == "linear":
            return (0.0,) * (head_dim // 2)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        turns = (
            self.original_positions * frequency / (2 * math.pi)
            for frequency in plain_frequencies(theta, head_dim)
        )
        return tuple(_clip((turn - low) / (high - low)) for turn in turns)


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al. 2023, sections 3.2 to 3.4).

    Attributes:
        factor: divides the frequencies of slow pairs.
        original_positions: the context of the training before it.
        fast_turns: pairs that turn as often as this in the original context keep their
            frequency (`beta_fast`).
        slow_turns: those that turn no more than this are divided (`beta_slow`); from
            one to the other it is linear in the pair's index.
        truncate: whether the two ends are rounded outwards to whole pairs.
        attention_factor: multiplies cosine and sine, so q.k by its square.
    """

    factor: float
    original_positions: int
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def kept(self, theta: float, head_dim: int) -> tuple[float, ...]:
        """Per pair, how much of its plain frequency is kept, from 0 to 1."""
        first = self._pair_of(self.fast_turns, theta, head_dim)
        last = self._pair_of(self.slow_turns, theta, head_dim)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        # As in the authors' code: the upper bound is that of the width, not the pairs.
        first, last = max(first, 0), min(last, head_dim - 1)
        width = last - first or 0.001
        return tuple(1 - _clip((pair - first) / width) for pair in range(head_dim // 2))

    def _pair_of(self, turns: float, theta: float, head_dim: int) -> float:
        """The index, between pairs, of what turns `turns` times in the context."""
        inverse_frequency = self.original_positions / (2 * math.pi * turns)
        return head_dim * math.log(inverse_frequency) / (2 * math.log(theta))


@dataclasses.dataclass(frozen=True)
class Rope:
    """A rotary embedding: the base and its scaling."""

    theta: float
    scaling: RopeScaling | Yarn | None = None

    @property
    def attention_factor(self) -> float:
        """What cosine and sine are multiplied by."""
        return self.scaling.attention_factor if isinstance(self.scaling, Yarn) else 1.0

    @property
    def positions(self) -> int:
        """The context that YaRN was made for; 0 without it."""
        scaling = self.scaling
        if isinstance(scaling, Yarn):
            return int(scaling.factor * scaling.original_positions)
        return 0

    def inverse_frequencies(self, head_dim: int) -> tuple[float, ...]:
        """Radians per position of each rotated pair, `head_dim / 2` of them."""
        plain = plain_frequencies(self.theta, head_dim)
        if self.scaling is None:
            return plain
        factor, kept = self.scaling.factor, self.scaling.kept(self.theta, head_dim)
        return tuple(
            frequency * (part + (1 - part) / factor)
            for frequency, part in zip(plain, kept, strict=True)
        )


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """The attention factor that section 3.4 of the YaRN paper recommends.

    `weight` is one of DeepSeek's `mscale` fields; the paper's is 1.
    """
    return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0


def plain_frequencies(theta: float, head_dim: int) -> tuple[float, ...]:
    """Radians per position of each pair, without any scaling (Su et al. 2021)."""
    return tuple(theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2))


def _clip(value: float) -> float:
    return min(max(value, 0.0), 1.0)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer of the llama, mistral, qwen and gemma families.

    Attributes:
        family: `llama`, `mistral`, `qwen2`, `qwen3`, `gemma2` or `gemma3`; it settles
            how files are read, and nothing in the forward pass.
        max_positions: the longest context the checkpoint was made for, in tokens.
        activation: of the gated MLP, `silu` or `gelu_tanh`.
        qk_norm: RMSNorm on each head of q and k, before the rotary embedding.
        sandwich_norms: norms after attention and after the MLP too (gemma).
        tied: the head is the embedding; nothing is stored for it.
        embedding_scale: multiplies the embedding, rounded to the weights' dtype.
        query_scale: multiplies q.k; `head_dim ** -0.5` nearly always.
        windows: per layer, how many positions a query sees, itself included; None: all.
        ropes: per layer.
        attention_soft_cap: c of `c tanh(x / c)` over the scaled scores, before the
            mask (Gemma 2 report, section 2); None: none.
        logit_soft_cap: the same over the logits.
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
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
