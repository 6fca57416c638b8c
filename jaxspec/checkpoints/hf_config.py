"""`config.json` to `ModelConfig`: each field is used, known harmless, or refused."""

from collections.abc import Mapping
from typing import Any

from jaxspec.checkpoints.fields import Fields
from jaxspec.checkpoints.hf_families import (
    ACTIVATIONS,
    FAMILIES,
    GEMMA3,
    HARMLESS,
    HARMLESS_OF_IMAGE_MODELS,
    LLAMA,
    NEUTRAL,
    QWEN2,
    QWEN3,
    Family,
)
from jaxspec.checkpoints.hf_rope import FULL, SLIDING, read_ropes
from jaxspec.errors import UserError
from jaxspec.models.config import ModelConfig


def parse_config(values: Mapping[str, Any], origin: str) -> ModelConfig:
    """The decoder that a `config.json` describes.

    Args:
        values: the parsed file.
        origin: its path, for messages.

    Raises:
        UserError: one line with every field that is missing, out of range, unknown, or
            known and not supported.
    """
    model_type = values.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UserError(
            f"{origin}: `model_type` is {str(model_type)[:40]!r}, expected one of "
            f"{', '.join(FAMILIES)}"
        )
    if model_type == "gemma3":
        values = _text_part(values, origin)
    fields = Fields(values, origin)
    _check_architectures(fields, family)
    for name, allowed in NEUTRAL.items():
        fields.only(name, *allowed)
    fields.ignore(HARMLESS)
    config = _read(fields, family)
    fields.refuse_unread()
    if not fields.faults:
        fields.faults.extend(shape_faults(config))
    fields.finish()
    return config


def _check_architectures(fields: Fields, family: Family) -> None:
    stated = fields.raw("architectures")
    if stated is None:
        return
    if not isinstance(stated, list) or any(
        a not in family.architectures for a in stated
    ):
        fields.fault("architectures", f"a list of {', '.join(family.architectures)}")


def shape_faults(config: ModelConfig) -> list[str]:
    """What makes the sizes of a config impossible together."""
    faults = []
    if config.num_heads % config.num_kv_heads:
        faults.append(
            f"{config.num_heads} query heads are not a multiple of "
            f"{config.num_kv_heads} key heads"
        )
    if config.head_dim % 2:
        faults.append(
            f"head width {config.head_dim} is odd: rotary pairs need an even one"
        )
    return faults


def _text_part(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The decoder's fields of an image model, the tie being stated beside them."""
    outer = Fields(values, origin)
    text = outer.raw("text_config")
    if not isinstance(text, dict):
        outer.fault("text_config", "an object")
        text = {}
    outer.ignore([*HARMLESS, *HARMLESS_OF_IMAGE_MODELS])
    outer.only("quantization_config")
    architectures = outer.raw("architectures")
    tied = outer.raw("tie_word_embeddings")
    if text.get("model_type", "gemma3_text") != "gemma3_text":
        outer.faults.append("`text_config.model_type` is not gemma3_text")
    outer.refuse_unread()
    outer.finish()
    stated = {"architectures": architectures, "tie_word_embeddings": tied}
    return text | {name: value for name, value in stated.items() if value is not None}


def _read(fields: Fields, family: Family) -> ModelConfig:
    sizes = _sizes(fields, family)
    windows = _windows(fields, family, sizes["num_layers"])
    ropes = read_ropes(
        fields,
        per_layer_type=family is GEMMA3,
        theta=family.theta,
        local_theta=10_000.0,
    )
    query_width = sizes["head_dim"]
    if family is GEMMA3:
        query_width = fields.number("query_pre_attn_scalar", 256.0, high=1e6)
    return ModelConfig(
        family=family.name,
        **sizes,
        **_biases(fields, family),
        norm_eps=fields.number("rms_norm_eps", family.norm_eps, high=1.0),
        query_scale=query_width**-0.5,
        windows=windows,
        ropes=tuple(ropes[FULL if w is None else SLIDING] for w in windows),
        activation=fields.choice(
            family.activation_field, ACTIVATIONS, family.activation
        ),
        qk_norm=family in (QWEN3, GEMMA3),
        sandwich_norms=family is GEMMA3,
        tied=fields.flag("tie_word_embeddings", family.tied),
        embedding_scale=sizes["hidden_size"] ** 0.5 if family is GEMMA3 else 1.0,
    )


def _sizes(fields: Fields, family: Family) -> dict[str, int]:
    def size(name: str, high: int, default: Any = None) -> Any:
        fallback = family.defaults.get(name, default)
        return fields.integer(
            name, *([] if fallback is None else [fallback]), high=high
        )

    hidden = size("hidden_size", 2**20)
    heads = size("num_attention_heads", 2**12)
    if fields.raw("head_dim") is None and "head_dim" not in family.defaults:
        head_dim = max(1, hidden // heads)
        if not fields.faults and hidden % heads:
            fields.fault(
                "hidden_size", f"a multiple of the {heads} heads, or `head_dim`"
            )
    else:
        head_dim = size("head_dim", 2**12)
    return {
        "vocab_size": size("vocab_size", 2**24),
        "hidden_size": hidden,
        "intermediate_size": size("intermediate_size", 2**22),
        "num_layers": size("num_hidden_layers", 2**10),
        "num_heads": heads,
        "num_kv_heads": size("num_key_value_heads", 2**12, heads),
        "head_dim": head_dim,
        "max_positions": size("max_position_embeddings", 2**30),
    }


def _biases(fields: Fields, family: Family) -> dict[str, bool]:
    if family is QWEN2:
        # Part of this architecture, whatever the file says or leaves out.
        fields.only("attention_bias", True)
        attention, output = True, False
    else:
        attention = output = fields.flag("attention_bias")
    mlp = fields.flag("mlp_bias")
    if mlp and family is not LLAMA:
        fields.fault("mlp_bias", f"false in {family.name}")
    return {"qkv_bias": attention, "output_bias": output, "mlp_bias": mlp}


def _windows(fields: Fields, family: Family, layers: int) -> tuple[int | None, ...]:
    if family is GEMMA3:
        pattern = fields.integer("_sliding_window_pattern", 6, high=2**10)
        pattern = fields.integer("sliding_window_pattern", pattern, high=2**10)
        sliding = [(layer + 1) % pattern != 0 for layer in range(layers)]
        width = fields.integer("sliding_window", 4096)
    elif family is LLAMA:
        fields.only("sliding_window")
        sliding, width = [False] * layers, None
    else:
        used = fields.flag("use_sliding_window")
        first = fields.integer("max_window_layers", 28, low=0)
        sliding = [used and layer >= first for layer in range(layers)]
        stated = fields.integer("sliding_window", 4096)
        width = stated if used else None
    sliding = _layer_types(fields, sliding)
    if any(sliding) and width is None:
        fields.fault("layer_types", "no windowed layer: the config has windows off")
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
