"""Writes EAGLE-3 heads in their authors' layout, for any program that loads those."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxspec.checkpoints.atomic import replace
from jaxspec.checkpoints.eagle import head_shapes
from jaxspec.checkpoints.load import named_parameters
from jaxspec.drafters.eagle_head import Eagle3Head
from jaxspec.models.config import ModelConfig


def write_eagle3(
    folder: Path,
    head: Eagle3Head,
    known: Int[np.ndarray, " v"] | None,
    dtype: Any = jnp.bfloat16,
) -> None:
    """Writes `config.json` and `model.safetensors`.

    Args:
        folder: made if it is not there.
        head: with one layer, as the layout has it.
        known: the ids of the head's own vocabulary; None: it is the target's.
        dtype: of the file.
    """
    from safetensors.flax import save

    config = head.config
    parameters = named_parameters(head)
    tensors = {
        name.replace("layers.0.", "midlayer."): parameters[name].astype(dtype)
        for name in head_shapes(config)
    }
    if known is not None:
        ids = config.decoder.vocab_size
        # The file keeps how far each id lies from its place.
        tensors["d2t"] = jnp.asarray(known - np.arange(known.size), jnp.int32)
        tensors["t2d"] = jnp.asarray(np.isin(np.arange(ids), known))
    folder.mkdir(parents=True, exist_ok=True)
    replace(folder / "model.safetensors", save(tensors))
    written = json.dumps(_config(config, known), indent=2) + "\n"
    replace(folder / "config.json", written.encode())


def _config(config, known) -> dict[str, Any]:
    decoder = config.decoder
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_config(decoder),
        "draft_vocab_size": decoder.vocab_size if known is None else int(known.size),
        "target_hidden_size": config.target_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.norm_each_tap,
        "norm_output": config.norm_output,
        # This layout counts the outputs of blocks from 0, as the taps do.
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(config.taps),
        },
    }


def _layer_config(decoder: ModelConfig) -> dict[str, Any]:
    """The fields of a llama config that say what one of its layers is."""
    rope = decoder.ropes[0]
    return {
        "model_type": "llama",
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "rms_norm_eps": decoder.norm_eps,
        "rope_theta": rope.theta,
        "max_position_embeddings": decoder.max_positions,
        "vocab_size": decoder.vocab_size,
    }
