"""The decoder of every supported family, written for one row."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache import KVCache
from jaxspec.models.attention import Attention, Place
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers import MLP, Linear, RMSNorm, project, soft_cap
from jaxspec.scratch import Scratch
from jaxspec.types import Output


class Embedding(nnx.Module):
    """The token embedding `[V, E]`."""

    def __init__(self, config: ModelConfig, dtype, rngs: nnx.Rngs):
        init = nnx.initializers.normal(config.hidden_size**-0.5)
        shape = (config.vocab_size, config.hidden_size)
        self.weight = nnx.Param(init(rngs.params(), shape, dtype))

    def __call__(self, tokens: Int[Array, "*B"]) -> Float[Array, "*B E"]:
        """Looks the tokens up."""
        return jnp.take(self.weight[...], tokens, axis=0, mode="clip")


class Block(nnx.Module):
    """One transformer layer: attention and MLP, each on a residual branch."""

    def __init__(self, config: ModelConfig, layer: int, dtype, rngs: nnx.Rngs):
        norm = functools.partial(RMSNorm, config.hidden_size, config.norm_eps)
        self.input_layernorm = norm()
        self.self_attn = Attention(config, layer, dtype, rngs)
        self.post_attention_layernorm = norm()
        self.mlp = MLP(config, dtype, rngs)
        self.sandwich = config.sandwich_norms
        if self.sandwich:
            self.pre_feedforward_layernorm = norm()
            self.post_feedforward_layernorm = norm()

    def __call__(
        self,
        hidden: Float[Array, "T E"],
        cache: KVCache,
        scratch: Scratch,
        place: Place,
    ) -> tuple[Float[Array, "T E"], Scratch]:
        """Applies the layer."""
        normed = self.input_layernorm(hidden)
        mixed, scratch = self.self_attn(normed, cache, scratch, place)
        if self.sandwich:
            hidden = hidden + self.post_attention_layernorm(mixed)
            fed = self.mlp(self.pre_feedforward_layernorm(hidden))
            return hidden + self.post_feedforward_layernorm(fed), scratch
        hidden = hidden + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), scratch


def cache_of(
    config: ModelConfig,
    rows: int,
    capacity: int,
    width: int,
    dtype,
    platform: str,
    whole: bool,
) -> KVCache:
    """An empty cache for the layers of a config, laid out as suits the platform."""
    return KVCache.init(
        config.windows,
        rows,
        config.num_kv_heads,
        capacity,
        width,
        config.head_dim,
        dtype,
        stacked=platform != "cpu",
        whole=whole,
    )


def scratch_of(config: ModelConfig, rows: int, slots: int, dtype) -> Scratch:
    """Empty scratch space for the layers of a config."""
    heads, width = config.num_kv_heads, config.head_dim
    return Scratch.init(config.num_layers, rows, heads, slots, width, dtype)


class Decoder(nnx.Module):
    """A decoder-only language model; `jaxspec.types.Model` says what its calls mean.

    Attributes:
        platform: where it will run (`cpu`, `tpu`, ...), which settles the layout of its
            cache; by default JAX's own. Only compiling for another machine names it.
        whole: it lies whole on each chip of a mesh, and so do its caches.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype=jnp.float32,
        platform: str | None = None,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.platform = platform or jax.default_backend()
        self.whole = False
        self.embed_tokens = Embedding(config, dtype, rngs)
        self.layers = nnx.List(
            Block(config, layer, dtype, rngs) for layer in range(config.num_layers)
        )
        self.final_norm = RMSNorm(config.hidden_size, config.norm_eps)
        # A tied head stores nothing: a Param under two attributes would be two leaves.
        self.lm_head = (
            None
            if config.tied
            else Linear(config.hidden_size, config.vocab_size, False, dtype, rngs)
        )

    def __call__(
        self,
        tokens: Int[Array, " T"],
        positions: Int[Array, " T"],
        cache: KVCache,
        scratch: Scratch,
        slots: Int[Array, " T"],
        visible: Bool[Array, "T P"],
        *,
        live_blocks: Int[Array, ""],
        first: int = 0,
        last: int | None = None,
        hidden: Float[Array, "T E"] | None = None,
        taps: tuple[int, ...] = (),
    ) -> tuple[Output, Scratch]:
        """Runs blocks `first` to `last`; resumes from `hidden` where it is given."""
        place = Place(positions, slots, visible, live_blocks)
        scratch = scratch.place(positions, slots)
        if hidden is None:
            hidden = self.embed(tokens)
        tapped = {}
        for index, block in enumerate(self.layers[first:last], start=first):
            hidden, scratch = block(hidden, cache, scratch, place)
            tapped[index] = hidden
        none = jnp.zeros((*tokens.shape, 0, self.config.hidden_size), self.dtype)
        stacked = jnp.stack([tapped[tap] for tap in taps], 1) if taps else none
        return Output(hidden, stacked), scratch

    def embed(self, tokens: Int[Array, "*B"]) -> Float[Array, "*B E"]:
        """What the first block is given."""
        scale = jnp.asarray(self.config.embedding_scale, self.dtype)
        return self.embed_tokens(tokens) * scale

    def norm(self, hidden: Float[Array, "*B E"]) -> Float[Array, "*B E"]:
        """The final norm."""
        return self.final_norm(hidden)

    def unembed(
        self, normed: Float[Array, "*B E"], ids: Int[Array, " v"] | None = None
    ) -> Float[Array, "*B V"]:
        """Logits in float32, of `ids` alone where they are given."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        weight = head.weight[...] if ids is None else head.weight[...][ids]
        logits = project(normed, weight, jnp.float32)
        return soft_cap(logits, self.config.logit_soft_cap)

    @property
    def vocab_size(self) -> int:
        """Ids that have a logit."""
        return self.config.vocab_size

    def init_hidden(self, rows: int) -> Float[Array, "B E"]:
        """A hidden state of zeros for each row."""
        return jnp.zeros((rows, self.config.hidden_size), self.dtype)

    def init_cache(self, rows: int, capacity: int, width: int) -> KVCache:
        """An empty cache for `capacity` tokens and commits of up to `width`."""
        kind = self.dtype, self.platform, self.whole
        return cache_of(self.config, rows, capacity, width, *kind)

    def init_scratch(self, rows: int, slots: int) -> Scratch:
        """Empty scratch space for `slots` slots a row."""
        return scratch_of(self.config, rows, slots, self.dtype)
