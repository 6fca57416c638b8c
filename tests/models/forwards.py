"""Runs a `Decoder` over texts: in one piece, in chunks, or token by token."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.cache import KVCache, causal, run_rows
from jaxspec.checkpoints.hf_config import parse_config
from jaxspec.checkpoints.load import expected_shapes, with_parameters
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.types import Output
from tests.checkpoints.writers import tiny_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
# Of four pairs of base 10,000 the first is kept, the second blended, the rest divided.
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
YARN_IN_FULL = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 12.0,
    "beta_slow": 0.5,
    "mscale": 0.5,
    "mscale_all_dim": 1.5,
    "truncate": False,
}
# By name: a family and what differs from its tiny config. Windows are shorter than the
# texts, and the texts longer than two blocks of the cache.
TINY: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, llama3 rope": ("llama", {"rope_scaling": LLAMA3}),
    "llama, linear rope": ("llama", {"rope_scaling": LINEAR}),
    "qwen2": ("qwen2", {}),
    "qwen2, windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "gemma3": ("gemma3", {"num_hidden_layers": 3, "sliding_window": 40}),
    "gemma3, linear rope": ("gemma3", {"rope_scaling": LINEAR}),
    "gemma2": ("gemma2", {"num_hidden_layers": 3, "sliding_window": 40}),
    "mistral": ("mistral", {"sliding_window": 40}),
    "qwen2, yarn rope": (
        "qwen2",
        {"rope_theta": 1e4, "rope_scaling": YARN},
    ),
    "qwen3, yarn rope": (
        "qwen3",
        {"rope_theta": 1e4, "rope_scaling": YARN_IN_FULL},
    ),
}
NEWER = ("gemma2", "mistral", "qwen2, yarn rope", "qwen3, yarn rope")
TEXT_LENGTH = 290


def tiny_names(*full: str) -> list:
    """`TINY` for `parametrize`: each costs seconds, so `full` are run in full only."""
    return [
        pytest.param(name, marks=pytest.mark.full if name in full else ())
        for name in TINY
    ]


def tiny_values(name: str) -> dict:
    """The `config.json` of an entry of `TINY`."""
    family, changes = TINY[name]
    return tiny_config(family, max_position_embeddings=512, **changes)


def tiny_parameters(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random parameters by canonical name, biases and norms included."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(name.endswith("norm.weight"), 0.15, shape).astype(np.float32))
        for name, shape in expected_shapes(config).items()
    }


class Tiny(NamedTuple):
    """A tiny random decoder and what it is made of."""

    config: ModelConfig
    parameters: dict[str, np.ndarray]
    model: Decoder


@functools.cache
def tiny(name: str) -> Tiny:
    """The float32 decoder of an entry of `TINY`."""
    config = parse_config(tiny_values(name), name)
    parameters = tiny_parameters(config)
    return Tiny(config, parameters, decoder(config, parameters))


def decoder(
    config: ModelConfig, parameters: Mapping[str, np.ndarray], dtype=jnp.float32
) -> Decoder:
    """A decoder with the given parameters; norms stay float32."""
    arrays = {
        name: jnp.asarray(value, jnp.float32 if "norm" in name else dtype)
        for name, value in parameters.items()
    }
    return with_parameters(config, arrays, dtype)


def random_ids(vocabulary: int, *shape: int, seed: int = 1) -> np.ndarray:
    """Token ids; the legacy generator, whose stream never changes."""
    return np.random.RandomState(seed).randint(vocabulary, size=shape, dtype=np.int32)


def leaves(model: Decoder) -> dict[str, jax.Array]:
    """The arrays of a decoder under their canonical names."""
    state = nnx.to_pure_dict(nnx.state(model))
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    return {".".join(str(key.key) for key in path): leaf for path, leaf in flat}


class Fed(NamedTuple):
    """What feeding a text gave: logits by position, the raw output, the cache."""

    logits: np.ndarray
    output: Output
    cache: KVCache


@jax.jit
def step(model, cache, tokens, count):
    """Feeds `count` tokens of each row and commits them; taps every block."""
    rows, width = tokens.shape
    taps = tuple(range(model.config.num_layers))
    slots = jnp.arange(width)
    positions = cache.length[:, None] + slots
    scratch = model.init_scratch(rows, width)
    output, scratch = run_rows(
        model, cache, scratch, tokens, positions, slots, causal(rows, width), taps
    )
    path = jnp.broadcast_to(slots, tokens.shape)
    return output, cache.commit(scratch, path, count)


@jax.jit
def logits_of(model, hidden):
    """The logits of un-normed hidden states."""
    return model.unembed(model.norm(hidden))


def pieces(length: int, width: int) -> list[tuple[int, int]]:
    """Chunks of one width, `(width, count)` each, the last one padded."""
    return [(width, min(width, length - at)) for at in range(0, length, width)]


def feed(
    model: Decoder,
    ids: np.ndarray,
    chunks: Sequence[tuple[int, int]],
    *,
    cache: KVCache | None = None,
    at: Sequence[int] | slice = slice(None),
    make_cache: Callable[..., KVCache] | None = None,
) -> Fed:
    """Feeds `ids[B, n]` (or `[n]`) chunk by chunk.

    Args:
        model: the decoder.
        ids: of all rows, equally long.
        chunks: width and count of each.
        cache: to go on from; by default an empty one.
        at: the positions whose logits are wanted.
        make_cache: in the place of `model.init_cache`.
    """
    ids = np.atleast_2d(ids)
    if cache is None:
        make = model.init_cache if make_cache is None else make_cache
        cache = make(len(ids), ids.shape[1] + 1, max(width for width, _ in chunks))
    outputs, start = [], 0
    for width, count in chunks:
        tokens = np.zeros((len(ids), width), np.int32)
        tokens[:, :count] = ids[:, start : start + count]
        output, cache = step(model, cache, tokens, np.full(len(ids), count))
        # NumPy's slices: jnp's would be compiled for each count.
        outputs.append(
            jax.tree.map(lambda leaf, n=count: np.asarray(leaf)[:, :n], output)
        )
        start += count
    assert start == ids.shape[1], "the chunks cover the text"
    output = jax.tree.map(lambda *parts: np.concatenate(parts, 1), *outputs)
    logits = logits_of(model, output.hidden[:, at])
    return Fed(np.asarray(logits), output, cache)


def one_shot(model: Decoder, ids: np.ndarray, **options) -> Fed:
    """Feeds the text as one chunk."""
    length = np.shape(ids)[-1]
    return feed(model, ids, [(length, length)], **options)


def chunked(model: Decoder, ids: np.ndarray, width: int, **options) -> Fed:
    """Feeds the text in chunks of `width`, the last one padded."""
    return feed(model, ids, pieces(np.shape(ids)[-1], width), **options)


def largest_difference(ours, theirs) -> float:
    """The largest absolute difference; shapes must agree."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return float(np.abs(ours - theirs).max())
