"""From a checkpoint file to the arrays of a `Decoder`, strictly, without a copy."""

import functools
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.checkpoints.fields import refuse_all, shown
from jaxspec.checkpoints.tensors import (
    Checkpoint,
    StoredTensor,
    is_norm,
    tensor_faults,
    unused_tensor,
)
from jaxspec.errors import UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.sharding import Partition

T = TypeVar("T")
# Some of a tensor: a slice of each of its first axes; () is all of it.
Part = tuple[slice, ...]
Place = Callable[[str, tuple[int, ...], Callable[[Part], np.ndarray]], jax.Array]

# Rows are decoded in blocks of about this many elements: what a block needs (several
# float32 copies inside the dequantiser) is all that a load holds beside the model.
_BLOCK_ELEMENTS = 2**20
_ALIGNMENT = 64
_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a GGUF file or a Hugging Face folder without reading any weight.

    Raises:
        UserError: nothing there, or not a model that this library supports.
    """
    place = Path(path)
    if place.is_dir():
        from jaxspec.checkpoints.huggingface import open_folder

        return open_folder(place)
    if place.is_file():
        from jaxspec.checkpoints.gguf import open_gguf

        return open_gguf(place)
    raise UserError(
        f"{place}: no such file or folder, expected a GGUF file or a folder with "
        "config.json and safetensors"
    )


def load_decoder(
    path: str | os.PathLike[str],
    dtype: Any = "float32",
    partition: Partition | None = None,
    *,
    draft: bool = False,
) -> Decoder:
    """The decoder of a GGUF file or a Hugging Face folder.

    With a partition its parameters are spread over the mesh, as a target's or a
    draft's, and of each tensor only what this process keeps is read.

    Raises:
        UserError: one line with all that is wrong with the file.
    """
    checkpoint = open_checkpoint(path)
    place = None
    if partition is not None:
        place = _place_on_mesh(partition, checkpoint.config.head_dim, draft)
    parameters = load_parameters(checkpoint, dtype, place)
    return with_parameters(checkpoint.config, parameters, _checked_dtype(dtype))


def with_parameters(
    config: ModelConfig, parameters: Mapping[str, jax.Array], dtype: Any
) -> Decoder:
    """A decoder that holds the given arrays."""
    return fill(functools.partial(Decoder, config, dtype=dtype), parameters)


def fill(make: Callable[..., T], parameters: Mapping[str, jax.Array]) -> T:
    """The module of `make(rngs=...)` with the given arrays; no others are ever made."""
    graph, state = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))

    def pick(path, _):
        return parameters[".".join(str(getattr(key, "key", key)) for key in path)]

    filled = jax.tree_util.tree_map_with_path(pick, nnx.to_pure_dict(state))
    nnx.replace_by_pure_dict(state, filled)
    return nnx.merge(graph, state)


def named_parameters(module: nnx.Module) -> Mapping[str, Any]:
    """The arrays of a module by canonical name: what `fill` takes."""
    flat = nnx.to_flat_state(nnx.state(module))
    return {".".join(map(str, path)): value[...] for path, value in flat}


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The parameters of a decoder: canonical name to shape."""
    width = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config.vocab_size, width)
    }
    block = block_shapes(config)
    for layer in range(config.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in block.items()}
    shapes["final_norm.weight"] = (width,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    return shapes


def load_parameters(
    checkpoint: Checkpoint, dtype: Any = "float32", place: Place | None = None
) -> dict[str, jax.Array]:
    """Reads every parameter, one tensor at a time, as `dtype` (norms as float32).

    Args:
        checkpoint: from `open_checkpoint`.
        dtype: float32 or bfloat16, by name or as a dtype.
        place: `place(name, shape, read)` puts a tensor on the device or mesh, of which
            `read` gives the parts that it asks for. It may keep their memory: nobody
            writes to it again. By default the first device.

    Returns:
        canonical name to array, the names and shapes being `expected_shapes`.

    Raises:
        UserError: one line with each tensor that is missing, left over, of another
            shape or of a type that cannot be read; raised before any is read.
    """
    target = _checked_dtype(dtype)
    shapes = expected_shapes(checkpoint.config)
    refuse_all(
        [*checkpoint.faults, *_tensor_faults(checkpoint, shapes)], checkpoint.path
    )
    place = _place_on_default_device if place is None else place
    return {
        name: place(
            name,
            shape,
            functools.partial(
                read_tensor,
                checkpoint.tensors[name],
                jnp.float32 if is_norm(name) else target,
            ),
        )
        for name, shape in shapes.items()
    }


def block_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The parameters of one layer: name inside the layer to shape."""
    width, inner = config.hidden_size, config.intermediate_size
    query = config.num_heads * config.head_dim
    key = config.num_kv_heads * config.head_dim
    projections = {
        "self_attn.q_proj": (query, width, config.qkv_bias),
        "self_attn.k_proj": (key, width, config.qkv_bias),
        "self_attn.v_proj": (key, width, config.qkv_bias),
        "self_attn.o_proj": (width, query, config.output_bias),
        "mlp.gate_proj": (inner, width, config.mlp_bias),
        "mlp.up_proj": (inner, width, config.mlp_bias),
        "mlp.down_proj": (width, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (out, into, bias) in projections.items():
        shapes[f"{name}.weight"] = (out, into)
        if bias:
            shapes[f"{name}.bias"] = (out,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.sandwich_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return shapes | {f"{name}.weight": (width,) for name in norms}


def _tensor_faults(
    checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]]
) -> list[str]:
    """What keeps the file's tensors from being exactly the decoder's parameters."""
    tensors = checkpoint.tensors
    allowed = dict(shapes)
    if checkpoint.config.tied:
        # A tied checkpoint may store its head all the same; the embedding is used.
        allowed["lm_head.weight"] = shapes["embed_tokens.weight"]
    unused = functools.partial(unused_tensor, config=checkpoint.config)
    return tensor_faults(tensors, shapes, allowed, unused)


def _checked_dtype(dtype: Any) -> Any:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = shown(dtype)
    if name not in _DTYPES:
        raise UserError(f"dtype is {name}, expected float32 or bfloat16")
    return _DTYPES[name]


def read_tensor(stored: StoredTensor, dtype: Any, part: Part = ()) -> np.ndarray:
    """Decodes a tensor, or a part, block by block into one array of its final dtype."""
    whole = zip(stored.shape, (*part, *[slice(None)] * len(stored.shape)), strict=False)
    first, *others = [slice(*each.indices(size)) for size, each in whole]
    shape = [each.stop - each.start for each in (first, *others)]
    out = _aligned(tuple(shape), np.dtype(dtype))
    row_elements = max(1, math.prod(stored.shape[1:]))
    step = max(1, _BLOCK_ELEMENTS // row_elements)
    for start in range(first.start, first.stop, step):
        stop = min(start + step, first.stop)
        # An infinity or NaN that the file itself holds is not worth a warning here.
        with np.errstate(over="ignore", invalid="ignore"):
            rows = stored.rows(start, stop)[:, *others]
            out[start - first.start : stop - first.start] = rows
    return out


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array that XLA can adopt: its buffers begin on 64-byte boundaries."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _place_on_default_device(name: str, shape: tuple[int, ...], read) -> jax.Array:
    # Aliasing is safe: `read_tensor` made the array for this call and drops it.
    del name, shape
    return jax.device_put(read(()), may_alias=True)


def _place_on_mesh(partition: Partition, head_dim: int, draft: bool) -> Place:
    """Reads for each device of this process its own part, equal parts once."""

    def place(name: str, shape: tuple[int, ...], read) -> jax.Array:
        where = partition.parameter(name, shape, head_dim, draft=draft)
        parts: dict[str, np.ndarray] = {}

        def once(part: Part) -> np.ndarray:
            if (key := str(part)) not in parts:
                parts[key] = read(part)
            return parts[key]

        return jax.make_array_from_callback(shape, where, once)  # pyright: ignore

    return place
