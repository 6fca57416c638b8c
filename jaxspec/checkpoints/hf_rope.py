"""The rotary embeddings of a `config.json`, in its old and its new layout."""

from typing import Any

from jaxspec.checkpoints.fields import Fields, shown
from jaxspec.checkpoints.hf_windows import FULL, SLIDING
from jaxspec.models.config import Rope, RopeScaling, Yarn, yarn_attention_factor

_KINDS = {kind: kind for kind in ("default", "linear", "llama3", "yarn")}
_LARGEST_THETA = 1e12


def read_ropes(
    fields: Fields, theta: float, local_theta: float | None
) -> dict[str, Rope]:
    """The rope of each layer type, from `rope_parameters` or the older fields.

    Args:
        fields: of the config; faults are left with it.
        theta: the family's default base.
        local_theta: the same for windowed layers, if the family rotates those
            differently: `rope_scaling` then reaches the full layers only.
    """
    fields.only("partial_rotary_factor", 1, 1.0)
    old = {
        FULL: _old_layout(fields, "rope_theta", theta, fields.raw("rope_scaling")),
        SLIDING: None,
    }
    if local_theta is not None:
        old[SLIDING] = _old_layout(fields, "rope_local_base_freq", local_theta, None)
    new = fields.raw("rope_parameters")
    if new is None:
        found = {kind: rope or Rope(theta) for kind, rope in old.items()}
    else:
        found = _new_layout(fields, new, theta, local_theta)
        _refuse_disagreement(fields, old, found)
    if local_theta is None:
        found[SLIDING] = found[FULL]
    return found


def _old_layout(
    fields: Fields, theta_name: str, default: float, scaling: Any
) -> Rope | None:
    stated = fields.number(theta_name, None, low=1.0, high=_LARGEST_THETA)
    if stated is None and scaling is None:
        return Rope(default) if fields.raw("rope_parameters") is None else None
    theta = default if stated is None else stated
    if scaling is None:
        return Rope(theta)
    return _read_rope(fields, "rope_scaling", scaling, theta)


def _new_layout(
    fields: Fields, value: Any, theta: float, local_theta: float | None
) -> dict[str, Rope]:
    if local_theta is None:
        return {FULL: _read_rope(fields, "rope_parameters", value, theta)}
    if not isinstance(value, dict) or not set(value) <= {FULL, SLIDING}:
        fields.fault("rope_parameters", f"an object with `{FULL}` and `{SLIDING}`")
        value = {}
    return {
        kind: _read_rope(fields, f"rope_parameters.{kind}", value.get(kind, {}), base)
        for kind, base in ((FULL, theta), (SLIDING, local_theta))
    }


def _read_rope(fields: Fields, name: str, value: Any, theta: float) -> Rope:
    if not isinstance(value, dict):
        fields.faults.append(f"`{name}` is {shown(value)}, expected an object")
        return Rope(theta)
    inner = Fields(value, fields.origin)
    theta = inner.number("rope_theta", theta, low=1.0, high=_LARGEST_THETA)
    scaling = _read_scaling(inner)
    inner.only("partial_rotary_factor", 1, 1.0)
    inner.refuse_unread()
    fields.faults.extend(f"{name}: {fault}" for fault in inner.faults)
    return Rope(theta, scaling)


def _read_scaling(inner: Fields) -> RopeScaling | Yarn | None:
    kind = _read_kind(inner)
    if kind == "default":
        return None
    factor = inner.number("factor", low=0.999999, high=1e6)
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind == "yarn":
        return _read_yarn(inner, factor)
    low = inner.number("low_freq_factor", high=1e6)
    high = inner.number("high_freq_factor", high=1e6)
    original = inner.integer("original_max_position_embeddings")
    if not inner.faults and low >= high:
        inner.fault("high_freq_factor", f"more than `low_freq_factor`, {low:g}")
    return RopeScaling("llama3", factor, low, high, original)


def _read_yarn(inner: Fields, factor: float) -> Yarn:
    fast = inner.number("beta_fast", 32.0, high=1e6)
    slow = inner.number("beta_slow", 1.0, high=1e6)
    if not inner.faults and fast < slow:
        inner.fault("beta_fast", f"at least `beta_slow`, {slow:g}")
    return Yarn(
        factor=factor,
        original_positions=inner.integer("original_max_position_embeddings"),
        fast_turns=fast,
        slow_turns=slow,
        truncate=inner.flag("truncate", True),
        attention_factor=_attention_factor(inner, factor),
    )


def _attention_factor(inner: Fields, factor: float) -> float:
    """As stated, else of `factor`, else the quotient of those of two weights."""
    stated = inner.number("attention_factor", None, high=1e3)
    above = inner.number("mscale", None, high=1e3)
    below = inner.number("mscale_all_dim", None, high=1e3)
    if above is None and below is None:
        return yarn_attention_factor(factor) if stated is None else stated
    if above is None or below is None or stated is not None:
        # Whoever wrote one of them meant it; the reference would pass it over.
        inner.faults.append(
            "`mscale` and `mscale_all_dim` come together, without `attention_factor`"
        )
        return 1.0
    return yarn_attention_factor(factor, above) / yarn_attention_factor(factor, below)


def _read_kind(inner: Fields) -> str:
    """`rope_type`, or `type` as it was called before; both must agree."""
    older = inner.choice("type", _KINDS, None)
    kind = inner.choice("rope_type", _KINDS, older)
    if older not in (None, kind):
        inner.fault("type", f"the same as `rope_type`, {kind}")
    return "default" if kind is None else kind


def _refuse_disagreement(
    fields: Fields, old: dict[str, Rope | None], new: dict[str, Rope]
) -> None:
    for kind, name in ((FULL, "rope_theta"), (SLIDING, "rope_local_base_freq")):
        stated = old[kind]
        if stated is not None and not fields.faults and stated != new.get(kind):
            fields.faults.append(
                f"`{name}` or `rope_scaling` says {stated}, but `rope_parameters` says "
                f"{new.get(kind)}: keep one of the two layouts"
            )
