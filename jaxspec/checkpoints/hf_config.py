"""`config.json` to `ModelConfig`: each field is used, known harmless, or refused."""

from collections.abc import Mapping
from typing import Any

from jaxspec.checkpoints.fields import Fields
from jaxspec.checkpoints.hf_families import (
    ACTIVATIONS,
    ATTENTION_SOFT_CAP,
    FAMILIES,
    HARMLESS,
    HARMLESS_OF_IMAGE_MODELS,
    LLAMA,
    LOGIT_SOFT_CAP,
    NEUTRAL,
    Family,
)
from jaxspec.checkpoints.hf_rope import read_ropes
from jaxspec.checkpoints.hf_windows import FULL, SLIDING, read_windows
from jaxspec.errors import UserError
from jaxspec.models.config import ModelConfig

LARGEST_POSITION = 2**30


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
    if config.max_positions > LARGEST_POSITION:
        faults.append(
            f"YaRN's factor and original context make {config.max_positions} "
            f"positions, expected at most {LARGEST_POSITION}"
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
    windows = read_windows(fields, family, sizes["num_layers"])
    ropes = read_ropes(fields, family.theta, family.local_theta)
    # The published recipe for Qwen adds YaRN and leaves the number of positions alone.
    sizes["max_positions"] = max(sizes["max_positions"], ropes[FULL].positions)
    query_width = sizes["head_dim"]
    if family.gemma:
        query_width = fields.number("query_pre_attn_scalar", 256.0, high=1e6)
    for older, name in family.repeated.items():
        fields.only(older, fields.raw(name))
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
        qk_norm=family.qk_norm,
        sandwich_norms=family.gemma,
        tied=fields.flag("tie_word_embeddings", family.tied),
        embedding_scale=sizes["hidden_size"] ** 0.5 if family.gemma else 1.0,
        attention_soft_cap=_soft_cap(fields, family, ATTENTION_SOFT_CAP),
        logit_soft_cap=_soft_cap(fields, family, LOGIT_SOFT_CAP),
    )


def _soft_cap(fields: Fields, family: Family, name: str) -> float | None:
    if name not in family.soft_caps:
        fields.only(name)
        return None
    default = None if fields.states(name) else family.soft_caps[name]
    return fields.number(name, default, high=1e6)


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
        "max_positions": size("max_position_embeddings", LARGEST_POSITION),
    }


def _biases(fields: Fields, family: Family) -> dict[str, bool]:
    if family.attention_bias is None:
        attention = output = fields.flag("attention_bias")
    else:
        fields.only("attention_bias", family.attention_bias)
        attention, output = family.attention_bias, False
    mlp = fields.flag("mlp_bias")
    if mlp and family is not LLAMA:
        fields.fault("mlp_bias", f"false in {family.name}")
    return {"qkv_bias": attention, "output_bias": output, "mlp_bias": mlp}
