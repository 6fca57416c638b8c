"""How parameters follow their slopes."""

from collections.abc import Callable
from typing import Any

import jax
import optax
import optax.contrib

from jaxspec.train.checkpoints import path_name

# Of AdamW: under 0.999 since trainings are of some hundred steps.
_SECOND_DECAY = 0.95
# Makes Muon's steps as long as AdamW's: Liu et al. 2025 (Muon is scalable), 2.2.
_ADAMW_RMS = 0.2
_VOCABULARY = ("embed_tokens", "lm_head", "vocabulary")

Make = Callable[[optax.Schedule, float], optax.GradientTransformation]


def _adamw(rate: optax.Schedule, weight_decay: float) -> optax.GradientTransformation:
    return optax.adamw(rate, b2=_SECOND_DECAY, weight_decay=weight_decay)


def _muon(rate: optax.Schedule, weight_decay: float) -> optax.GradientTransformation:
    return optax.contrib.muon(
        rate,
        weight_decay=weight_decay,
        adam_b2=_SECOND_DECAY,
        adam_weight_decay=weight_decay,
        muon_weight_dimension_numbers=hidden_matrices,
        consistent_rms=_ADAMW_RMS,
    )


def hidden_matrices(parameters: Any) -> Any:
    """Which axes of each parameter are of a matrix between hidden states.

    None for norms and biases, and for rows of a vocabulary: they are AdamW's.
    """

    def axes(path: Any, leaf: Any) -> Any:
        name = path_name(path)
        is_matrix = leaf.ndim >= 2 and "weight" in name
        if not is_matrix or any(part in name for part in _VOCABULARY):
            return None
        # Weights are [out, in]; what stands before is stacked.
        return optax.contrib.MuonDimensionNumbers(leaf.ndim - 1, leaf.ndim - 2)

    return jax.tree_util.tree_map_with_path(axes, parameters)


# AdamW: Loshchilov and Hutter 2019. Muon: Jordan et al. 2024; a step costs more, and
# so few steps learn more.
OPTIMIZERS: dict[str, Make] = {"adamw": _adamw, "muon": _muon}
