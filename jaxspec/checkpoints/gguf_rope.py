"""The rotary embeddings of a GGUF file's metadata, as llama.cpp computes them."""

import numpy as np

from jaxspec.checkpoints.fields import Fields, shown
from jaxspec.models.config import Rope, RopeScaling, Yarn, yarn_attention_factor

_KINDS = {kind: kind for kind in ("none", "linear", "yarn")}
_LOCAL_THETA = 10_000.0
_LARGEST_THETA = 1e12


def read_rope(fields: Fields, head_dim: int, factors: np.ndarray | None) -> Rope:
    """The rotary embedding of all layers but gemma3's windowed ones.

    Args:
        fields: of the architecture; faults are left with it.
        head_dim: of a head.
        factors: `rope_freqs.weight`, if the file has it.
    """
    theta = fields.number("rope.freq_base", 10_000.0, low=1.0, high=_LARGEST_THETA)
    plain = Rope(theta)
    kind = fields.choice("rope.scaling.type", _KINDS, "none")
    fields.only("rope.scale_linear", 1.0)
    fields.only("rope.scaling.attn_factor", 1.0)
    # Whether the scaling was trained: no maths in it.
    fields.ignore(["rope.scaling.finetuned"])
    if kind != "none" and factors is not None:
        fields.faults.append(f"it has both {kind} rope scaling and `rope_freqs`")
    if kind == "yarn":
        return Rope(theta, _yarn(fields))
    # Where the training stopped: only yarn's maths has it.
    fields.ignore(["rope.scaling.original_context_length"])
    if kind == "linear":
        return Rope(theta, RopeScaling("linear", _factor(fields)))
    fields.only("rope.scaling.factor", 0.0, 1.0)
    return plain if factors is None else _from_factors(fields, plain, head_dim, factors)


def read_local_rope(fields: Fields, arch: str, rope: Rope) -> Rope:
    """That of windowed layers: gemma3's have their own base, and no scaling."""
    if arch != "gemma3":
        return rope
    theta = fields.number(
        "rope.freq_base_swa", _LOCAL_THETA, low=1.0, high=_LARGEST_THETA
    )
    return Rope(theta)


def _factor(fields: Fields) -> float:
    return fields.number("rope.scaling.factor", low=0.999999, high=1e6)


def _yarn(fields: Fields) -> Yarn:
    """Its attention factor is the paper's: llama.cpp computes it from the other one."""
    factor = _factor(fields)
    fast = fields.number("rope.scaling.yarn_beta_fast", 32.0, high=1e6)
    slow = fields.number("rope.scaling.yarn_beta_slow", 1.0, high=1e6)
    if not fields.faults and fast < slow:
        fields.fault(
            "rope.scaling.yarn_beta_fast", f"at least yarn_beta_slow, {slow:g}"
        )
    return Yarn(
        factor,
        fields.integer("rope.scaling.original_context_length"),
        fast,
        slow,
        attention_factor=yarn_attention_factor(factor),
    )


def _from_factors(
    fields: Fields, plain: Rope, head_dim: int, factors: np.ndarray
) -> Rope:
    """The Llama 3 scaling whose frequencies are the plain ones over `factors`.

    A GGUF file states the divisors and not the rule, so the rule is tried.
    """
    if factors.shape != (head_dim // 2,) or not np.all(factors >= 1):
        fields.faults.append(
            f"`rope_freqs.weight` is {shown(factors.tolist())}, expected "
            f"{head_dim // 2} factors of at least 1"
        )
        return plain
    if np.all(factors == 1):
        return plain
    scaled = Rope(plain.theta, RopeScaling("llama3", float(factors.max())))
    wanted = np.array(scaled.inverse_frequencies(head_dim))
    stored = np.array(plain.inverse_frequencies(head_dim)) / factors
    if not np.allclose(stored, wanted, rtol=1e-4, atol=0):
        fields.faults.append(
            "`rope_freqs.weight` is not the Llama 3 scaling (8192 positions, factors 1 "
            "and 4), the only one that is supported"
        )
    return scaled
