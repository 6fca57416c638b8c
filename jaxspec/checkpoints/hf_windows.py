"""The windows of a `config.json`: how wide they are and which layers have one."""

from collections.abc import Callable

from jaxspec.checkpoints.fields import Fields
from jaxspec.checkpoints.hf_families import Family

FULL, SLIDING = "full_attention", "sliding_attention"
_DEFAULT_WIDTH = 4096

Width = int | None


def read_windows(fields: Fields, family: Family, layers: int) -> tuple[Width, ...]:
    """Per layer, how many positions a query sees; None: all of them."""
    width, by_rule = RULES[family.windows](fields, layers)
    sliding = _layer_types(fields, by_rule)
    if any(sliding) and width is None:
        culprit = "sliding_window" if sliding == by_rule else "layer_types"
        fields.fault(culprit, "a width, or no windowed layer: windows are off")
    if family.windows == "all" and sliding != by_rule:
        # Its class applies one mask to all layers, whatever this list says.
        fields.fault("layer_types", "all layers alike, or no such field")
    return tuple(width if windowed else None for windowed in sliding)


def _layer_types(fields: Fields, by_rule: list[bool]) -> list[bool]:
    """Which layers have a window; a list in the file goes before the family's rule."""
    kinds = fields.raw("layer_types")
    if kinds is None:
        return by_rule
    if (
        isinstance(kinds, list)
        and len(kinds) == len(by_rule)
        and all(kind in (FULL, SLIDING) for kind in kinds)
    ):
        return [kind == SLIDING for kind in kinds]
    fields.fault("layer_types", f"{len(by_rule)} of {FULL} or {SLIDING}")
    return by_rule


def _width(fields: Fields) -> Width:
    """The stated width; the classes have one where a file leaves the field out."""
    stated = fields.states("sliding_window")
    return fields.integer("sliding_window", None if stated else _DEFAULT_WIDTH)


def _none(fields: Fields, layers: int) -> tuple[Width, list[bool]]:
    fields.only("sliding_window")
    return None, [False] * layers


def _all(fields: Fields, layers: int) -> tuple[Width, list[bool]]:
    width = _width(fields)
    return width, [width is not None] * layers


def _late(fields: Fields, layers: int) -> tuple[Width, list[bool]]:
    """Those from `max_window_layers` on, where windows are asked for."""
    used = fields.flag("use_sliding_window")
    first = fields.integer("max_window_layers", 28, low=0)
    stated = _width(fields)
    width = stated if used else None
    return width, [width is not None and layer >= first for layer in range(layers)]


def _alternate(fields: Fields, layers: int) -> tuple[Width, list[bool]]:
    return _width(fields), [layer % 2 == 0 for layer in range(layers)]


def _pattern(fields: Fields, layers: int) -> tuple[Width, list[bool]]:
    """All but each sixth layer, or whatever number the file has."""
    every = fields.integer("_sliding_window_pattern", 6, high=2**10)
    every = fields.integer("sliding_window_pattern", every, high=2**10)
    return _width(fields), [(layer + 1) % every != 0 for layer in range(layers)]


RULES: dict[str, Callable[[Fields, int], tuple[Width, list[bool]]]] = {
    "none": _none,
    "all": _all,
    "late": _late,
    "alternate": _alternate,
    "pattern": _pattern,
}
