"""EAGLE's networks: small decoders over pairs of a token and the feature before it.

A feature stands for what the target knows after a token: the true one is made of the
target's own hidden states, and what a head makes of a pair is its guess at the next.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache import KVCache
from jaxspec.models.attention import Attention, Place
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Block, Embedding, cache_of, scratch_of
from jaxspec.models.layers import MLP, Linear, RMSNorm, project
from jaxspec.scratch import Scratch
from jaxspec.types import Model, Output


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """What an EAGLE-1 or EAGLE-2 head is; the two differ in their trees alone.

    Attributes:
        decoder: of the layers; the vocabulary is that of the embedding.
        own_embedding: the head has one; else it reads the target's.
        bias: of the map that joins embedding and feature.
    """

    decoder: ModelConfig
    own_embedding: bool = False
    bias: bool = True


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """What an EAGLE-3 head is.

    Attributes:
        decoder: of the layers; the vocabulary is that of the embedding.
        taps: the target's blocks whose outputs make a feature, counted from 0.
        target_size: width of the target.
        own_embedding: the head has one; else it reads the target's.
        draft_vocabulary: rows of the head's own vocabulary matrix; None: the target's
            serves.
        norm_before_residual: the first layer's residual is the normed feature.
        norm_before_fc: the taps are normed as one vector before they are joined.
        norm_each_tap: each tap is normed by itself before they are joined.
        norm_output: what is fed on is the normed output of the last layer.
    """

    decoder: ModelConfig
    taps: tuple[int, ...]
    target_size: int
    own_embedding: bool = False
    draft_vocabulary: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_each_tap: bool = False
    norm_output: bool = False


class _Head(nnx.Module):
    """What both kinds share: an embedding, layers with a cache, one pass over rows."""

    layers: nnx.List

    def __init__(self, config: Any, dtype, platform: str | None, rngs: nnx.Rngs):
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.platform = platform or jax.default_backend()
        self.whole = False
        own = config.own_embedding
        self.embed_tokens = Embedding(config.decoder, dtype, rngs) if own else None

    @property
    def width(self) -> int:
        """Of a feature."""
        return self.config.decoder.hidden_size

    def embed(self, model: Model, tokens: Int[Array, "*B"]) -> Float[Array, "*B E"]:
        """With the head's own embedding or the target's."""
        own = self.embed_tokens
        return (model.embed if own is None else own)(tokens).astype(self.dtype)

    def init_cache(self, rows: int, capacity: int, width: int) -> KVCache:
        """An empty cache for the pairs of `capacity` tokens."""
        kind = self.dtype, self.platform, self.whole
        return cache_of(self.config.decoder, rows, capacity, width, *kind)

    def init_scratch(self, rows: int, slots: int) -> Scratch:
        """Empty scratch space for `slots` slots a row."""
        return scratch_of(self.config.decoder, rows, slots, self.dtype)

    def run_rows(
        self,
        cache: KVCache,
        scratch: Scratch,
        inputs: Float[Array, "B T in"],
        positions: Int[Array, "B T"],
        slots: Int[Array, " T"],
        visible: Bool[Array, "B T P"],
    ) -> tuple[Float[Array, "B T E"], Scratch]:
        """Runs the layers over what `join` made of the pairs of each row."""
        live_blocks = cache.live_blocks

        def one_row(hidden, positions, cache, scratch, visible):
            place = Place(positions, slots, visible, live_blocks)
            scratch = scratch.place(positions, slots)
            for layer in self.layers:
                hidden, scratch = layer(hidden, cache, scratch, place)
            return hidden, scratch

        rows = jax.vmap(one_row, in_axes=(0, 0, cache.row_axes, 0, 0))
        return rows(inputs, positions, cache, scratch, visible)


class _Unnormed(nnx.Module):
    def __call__(self, inputs: Array) -> Array:
        return inputs


class EagleHead(_Head):
    """EAGLE-1's: a feature is the target's last hidden state after its final norm.

    Li et al. 2024 (EAGLE), section 4.1; the target's own head reads the features.
    """

    taps = ()

    def __init__(
        self,
        config: EagleConfig,
        *,
        dtype=jnp.float32,
        platform: str | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(config, dtype, platform, rngs)
        decoder, width = config.decoder, self.width
        self.fc = Linear(2 * width, width, config.bias, dtype, rngs)
        self.layers = nnx.List(
            Block(decoder, layer, dtype, rngs) for layer in range(decoder.num_layers)
        )
        # The map before it takes the place of the first layer's norm.
        self.layers[0].input_layernorm = _Unnormed()  # pyright: ignore

    def features(self, model: Model, output: Output) -> Float[Array, "B T E"]:
        """The true ones."""
        return model.norm(output.hidden).astype(self.dtype)

    def join(
        self, embedded: Float[Array, "B T E"], features: Float[Array, "B T E"]
    ) -> Float[Array, "B T E"]:
        """What the first layer is given of each pair."""
        return self.fc(jnp.concatenate([embedded, features], axis=-1))

    def guess(self, hidden: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """The next features, from the last layer's output."""
        return hidden

    def logits(
        self, model: Model, features: Float[Array, "B T E"]
    ) -> Float[Array, "B T V"]:
        """Of the tokens after guessed features."""
        return model.unembed(features)


class _FirstLayer(nnx.Module):
    """EAGLE-3's first layer: attends over embedding and feature side by side."""

    def __init__(self, config: Eagle3Config, dtype, rngs: nnx.Rngs):
        decoder = config.decoder
        width, eps = decoder.hidden_size, decoder.norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.self_attn = Attention(decoder, 0, dtype, rngs, size_in=2 * width)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(decoder, dtype, rngs)
        self.norm_before_residual = config.norm_before_residual

    def __call__(
        self,
        pairs: Float[Array, "T 2E"],
        cache: KVCache,
        scratch: Scratch,
        place: Place,
    ) -> tuple[Float[Array, "T E"], Scratch]:
        embedded, feature = jnp.split(pairs, 2, axis=-1)
        normed = self.hidden_norm(feature)
        both = jnp.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        mixed, scratch = self.self_attn(both, cache, scratch, place)
        hidden = (normed if self.norm_before_residual else feature) + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), scratch


class Eagle3Head(_Head):
    """EAGLE-3's: a feature is made of the outputs of three of the target's blocks.

    Li et al. 2025 (EAGLE-3), section 3.1.
    """

    def __init__(
        self,
        config: Eagle3Config,
        *,
        dtype=jnp.float32,
        platform: str | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(config, dtype, platform, rngs)
        decoder, width, taps = config.decoder, self.width, len(config.taps)
        tapped, eps = config.target_size, decoder.norm_eps
        rest = range(1, decoder.num_layers)
        self.fc = Linear(taps * tapped, width, False, dtype, rngs)
        self.layers = nnx.List(
            [
                _FirstLayer(config, dtype, rngs),
                *(Block(decoder, layer, dtype, rngs) for layer in rest),
            ]
        )
        self.norm = RMSNorm(width, eps)
        own = config.draft_vocabulary
        self.lm_head = None if own is None else Linear(width, own, False, dtype, rngs)
        joint, each = config.norm_before_fc, config.norm_each_tap
        self.input_norm = RMSNorm(taps * tapped, eps) if joint else None
        self.fc_norm = nnx.List(RMSNorm(tapped, eps) for _ in range(taps * each))

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's blocks whose outputs it reads."""
        return self.config.taps

    def features(self, model: Model, output: Output) -> Float[Array, "B T E"]:
        """The true ones."""
        taps = output.taps.astype(self.dtype)
        if self.fc_norm:
            normed = [norm(taps[..., i, :]) for i, norm in enumerate(self.fc_norm)]
            taps = jnp.stack(normed, axis=-2)
        joint = taps.reshape(*taps.shape[:-2], -1)
        return self.fc(joint if self.input_norm is None else self.input_norm(joint))

    def join(
        self, embedded: Float[Array, "B T E"], features: Float[Array, "B T E"]
    ) -> Float[Array, "B T 2E"]:
        """What the first layer is given of each pair."""
        return jnp.concatenate([embedded, features], axis=-1)

    def guess(self, hidden: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """The next features, from the last layer's output."""
        return self.norm(hidden) if self.config.norm_output else hidden

    def logits(
        self, model: Model, features: Float[Array, "B T E"]
    ) -> Float[Array, "B T v"]:
        """Of the tokens after guessed features, over the head's own vocabulary."""
        normed = features if self.config.norm_output else self.norm(features)
        if self.lm_head is None:
            return model.unembed(normed)
        return project(normed, self.lm_head.weight[...], jnp.float32)
