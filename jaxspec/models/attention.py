"""Grouped-query attention over the committed cache and the round's scratch."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache import KVCache, within
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers import Linear, RMSNorm, rotate, soft_cap
from jaxspec.scratch import Scratch


class Place(NamedTuple):
    """Where the tokens of a forward pass stand, for one row."""

    positions: Int[Array, " T"]
    slots: Int[Array, " T"]
    visible: Bool[Array, "T P"]
    live_blocks: Int[Array, ""]


class Running(NamedTuple):
    """A softmax-weighted sum of values so far (Milakov and Gimelshein 2018)."""

    peak: Float[Array, "K Q"]
    total: Float[Array, "K Q"]
    weighted: Float[Array, "K Q D"]

    def add(
        self,
        queries: Float[Array, "K Q D"],
        keys: Float[Array, "K k D"],
        values: Float[Array, "K k D"],
        visible: Bool[Array, "Q k"],
        cap: float | None = None,
    ) -> "Running":
        """Takes in a block of keys and values, with scores softly capped at `cap`."""
        scores = jnp.einsum(
            "kqd,ksd->kqs", queries, keys, preferred_element_type=jnp.float32
        )
        scores = jnp.where(visible, soft_cap(scores, cap), -jnp.inf)
        peak = jnp.maximum(self.peak, scores.max(axis=-1))
        weights = jnp.exp(scores - peak[..., None])
        shrink = jnp.exp(self.peak - peak)
        fresh = jnp.einsum(
            "kqs,ksd->kqd",
            weights.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        return Running(
            peak,
            self.total * shrink + weights.sum(axis=-1),
            self.weighted * shrink[..., None] + fresh,
        )


class Attention(nnx.Module):
    """Self-attention of one layer, written for one row.

    Its inputs may be wider than its outputs, by `size_in`.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype,
        rngs: nnx.Rngs,
        size_in: int | None = None,
    ):
        outer, width = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads
        inner, bias = size_in or outer, config.qkv_bias
        self.q_proj = Linear(inner, heads * width, bias, dtype, rngs)
        self.k_proj = Linear(inner, kv_heads * width, bias, dtype, rngs)
        self.v_proj = Linear(inner, kv_heads * width, bias, dtype, rngs)
        self.o_proj = Linear(heads * width, outer, config.output_bias, dtype, rngs)
        self.q_norm = RMSNorm(width, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(width, config.norm_eps) if config.qk_norm else None
        self.layer, self.head_dim, self.scale = layer, width, config.query_scale
        self.window = config.windows[layer]
        self.cap = config.attention_soft_cap
        rope = config.ropes[layer]
        self.inverse_frequencies = rope.inverse_frequencies(width)
        self.rope_factor = rope.attention_factor

    def __call__(
        self,
        inputs: Float[Array, "T in"],
        cache: KVCache,
        scratch: Scratch,
        place: Place,
    ) -> tuple[Float[Array, "T E"], Scratch]:
        """Attends to what is visible; returns scratch with this pass's entries."""
        queries = self._heads(self.q_proj(inputs), self.q_norm, place.positions)
        keys = self._heads(self.k_proj(inputs), self.k_norm, place.positions)
        values = self.v_proj(inputs).reshape(keys.shape)
        scratch = scratch.write(
            self.layer, keys.swapaxes(0, 1), values.swapaxes(0, 1), place.slots
        )
        mixed = self._attend(queries, cache, scratch, place)
        return self.o_proj(mixed), scratch

    def _heads(self, flat, norm, positions) -> Float[Array, "T heads D"]:
        heads = flat.reshape(flat.shape[0], -1, self.head_dim)
        heads = heads if norm is None else norm(heads)
        return rotate(heads, positions, self.inverse_frequencies, self.rope_factor)

    def _attend(self, queries, cache, scratch, place) -> Float[Array, "T HD"]:
        """Softmax over scratch, then over the live blocks of the cache.

        Scratch comes first: every query sees itself there, so the running maximum is
        finite before any block that may be masked as a whole.
        """
        tokens, heads, width = queries.shape
        kv_heads = scratch.keys[self.layer].shape[0]
        group = heads // kv_heads
        queries = (queries * self.scale).reshape(tokens, kv_heads, group, width)
        queries = queries.transpose(1, 2, 0, 3).reshape(kv_heads, -1, width)

        def of_each_head(visible):
            return jnp.tile(visible, (group, 1))

        distance = place.positions[:, None] - scratch.positions
        visible = place.visible & within(self.window, distance)
        flat = queries.shape[:2]
        running = Running(
            jnp.full(flat, -jnp.inf, jnp.float32),
            jnp.zeros(flat, jnp.float32),
            jnp.zeros((*flat, width), jnp.float32),
        ).add(
            queries,
            scratch.keys[self.layer],
            scratch.values[self.layer],
            of_each_head(visible),
            self.cap,
        )

        def take_block(index, running):
            keys, values = cache.block(self.layer, index)
            visible = cache.visible(self.layer, index, place.positions)
            return running.add(queries, keys, values, of_each_head(visible), self.cap)

        # A loop of unknown length has no gradient; in training nothing is committed.
        if cache.slots(self.layer):
            blocks = cache.live_blocks_of(self.layer, place.live_blocks)
            running = lax.fori_loop(0, blocks, take_block, running)
        mixed = running.weighted / running.total[..., None]
        mixed = mixed.reshape(kv_heads, group, tokens, width).transpose(2, 0, 1, 3)
        return mixed.reshape(tokens, heads * width).astype(scratch.keys[0].dtype)
