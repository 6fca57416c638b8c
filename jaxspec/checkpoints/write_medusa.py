"""Writes Medusa heads that share the target's vocabulary head."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxspec.checkpoints.atomic import replace
from jaxspec.drafters.medusa import Heads


def write_medusa(
    folder: Path,
    heads: Heads,
    known: Int[np.ndarray, " v"] | None,
    dtype: Any = jnp.bfloat16,
) -> None:
    """Writes `medusa_lm_head.safetensors`, with the names of the authors' blocks.

    Their files give each head a vocabulary matrix of its own, vLLM's too. These have
    none, which means the target's; `token_map` says which of its ids are drafted.

    Args:
        folder: made if it is not there.
        heads: without vocabulary matrices.
        known: the ids that they draft; None: all.
        dtype: of the file.
    """
    from safetensors.flax import save

    tensors = {}
    for head, (weights, biases) in enumerate(
        zip(heads.weights, heads.biases, strict=True)
    ):
        for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            tensors[f"{head}.{layer}.linear.weight"] = weight.astype(dtype)
            tensors[f"{head}.{layer}.linear.bias"] = bias.astype(dtype)
    if known is not None:
        tensors["token_map"] = jnp.asarray(known, jnp.int32)
    folder.mkdir(parents=True, exist_ok=True)
    replace(folder / "medusa_lm_head.safetensors", save(tensors))
