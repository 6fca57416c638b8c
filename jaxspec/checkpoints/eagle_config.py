"""`config.json` of an EAGLE head, in its authors' layout and in that of speculators."""

import re
import warnings
from collections.abc import Mapping
from typing import Any

from jaxspec.checkpoints.fields import Fields
from jaxspec.checkpoints.hf_config import parse_config
from jaxspec.checkpoints.hf_families import HARMLESS
from jaxspec.drafters.eagle_head import Eagle3Config, EagleConfig
from jaxspec.models.config import ModelConfig

TAPS = 3
_IDS = "eagle_aux_hidden_state_layer_ids"
_ARCHITECTURE = re.compile(r"(Eagle3?)?(Llama|Qwen[23])ForCausalLM(Eagle3?)?")
_SWITCHES = ("norm_before_residual", "norm_before_fc", "norm_output")
_OWN_FIELDS = (
    *("bias", "draft_vocab_size", "target_hidden_size", "fc_norm", "eagle_config"),
    *(_IDS, *_SWITCHES),
)
# How a `speculators` file is made and served: nothing of it is part of the network.
_HARMLESS = (
    *HARMLESS,
    *(
        "auto_map",
        "embed_requires_grad",
        "enable_sp_ulysses",
        "has_no_defaults_at_init",
    ),
    *("speculators_config", "speculators_version", "tie_word_embeddings"),
)
# A `speculators` file leaves out what the class of its layers has by default.
_LEFT_OUT = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
_LEFT_OUT_BY_TYPE = {
    "llama": {
        "vocab_size": 32_000,
        "intermediate_size": 11_008,
        "max_position_embeddings": 2048,
    },
    "qwen3": {
        "vocab_size": 151_936,
        "intermediate_size": 22_016,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
}


def parse_eagle(
    values: Mapping[str, Any], origin: str, target: ModelConfig, *, is_eagle3: bool
) -> EagleConfig | Eagle3Config:
    """What the file describes; its tensors say whether embedding and head are its own.

    Args:
        values: the parsed file.
        origin: its path, for messages.
        target: whose hidden states the head reads.
        is_eagle3: of a file in its authors' layout: told by its tensors. A
            `speculators` file says it itself.

    Raises:
        UserError: a field is missing, unknown, out of range, not supported, or made for
            another target.
    """
    if "speculators_model_type" in values:
        return _parse_speculators(values, origin, target)
    own = {name: value for name, value in values.items() if name in _OWN_FIELDS}
    rest = {name: value for name, value in values.items() if name not in own}
    fields = Fields(own, origin)
    _check_architectures(fields, rest.pop("architectures", None))
    decoder = parse_config(rest, origin)
    if is_eagle3:
        fields.only("bias", False)
        return _finish_eagle3(fields, decoder, target, first_id=0)
    bias = fields.flag("bias", True)
    return _finish_eagle(fields, decoder, target, bias)


def _check_architectures(fields: Fields, stated: Any) -> None:
    names = [] if stated is None else stated
    if not isinstance(names, list) or not all(
        isinstance(name, str) and _ARCHITECTURE.fullmatch(name) for name in names
    ):
        fields.faults.append(
            f"`architectures` is {str(stated)[:60]}, expected names such as "
            "LlamaForCausalLM or LlamaForCausalLMEagle3"
        )


def _parse_speculators(
    values: Mapping[str, Any], origin: str, target: ModelConfig
) -> EagleConfig | Eagle3Config:
    fields = Fields(values, origin)
    kinds = {"eagle": False, "eagle3": True}
    is_eagle3 = fields.choice("speculators_model_type", kinds)
    # Both files list names of classes, which add nothing to the type.
    fields.ignore([*_HARMLESS, "architectures"])
    inner = fields.raw("transformer_layer_config")
    if not isinstance(inner, dict):
        fields.fault("transformer_layer_config", "an object")
        fields.finish()
    kind = inner.get("model_type", "llama")
    known = _LEFT_OUT_BY_TYPE.get(kind, {}) if isinstance(kind, str) else {}
    layers = _LEFT_OUT | known | {"model_type": kind} | inner
    layers.pop("architectures", None)
    decoder = parse_config(layers, f"{origin}: transformer_layer_config")
    if is_eagle3:
        return _finish_eagle3(fields, decoder, target, first_id=1)
    fields.only("transformer_layer_architecture", "LlamaDecoderLayer")
    fields.only("layernorms", False)
    return _finish_eagle(fields, decoder, target, fields.flag("fusion_bias"))


def _finish_eagle(
    fields: Fields, decoder: ModelConfig, target: ModelConfig, bias: bool
) -> EagleConfig:
    fields.refuse_unread()
    fields.faults.extend(_fit_faults(decoder, target, decoder.hidden_size))
    fields.finish()
    return EagleConfig(decoder, bias=bias)


def _finish_eagle3(
    fields: Fields, decoder: ModelConfig, target: ModelConfig, first_id: int
) -> Eagle3Config:
    """`first_id` is what the layout calls the output of block 0."""
    ids = _stated_ids(fields)
    taps = _taps(fields, ids, target, first_id)
    switches = {name: fields.flag(name) for name in _SWITCHES}
    tapped = fields.integer("target_hidden_size", target.hidden_size)
    config = Eagle3Config(
        decoder,
        taps,
        target.hidden_size,
        draft_vocabulary=fields.integer("draft_vocab_size", decoder.vocab_size),
        norm_each_tap=fields.flag("fc_norm"),
        **switches,
    )
    fields.refuse_unread()
    fields.faults.extend(_fit_faults(decoder, target, tapped))
    fields.finish()
    if ids is None:
        warnings.warn(
            f"{fields.origin}: `{_IDS}` is missing; the outputs of blocks "
            f"{', '.join(map(str, taps))} are tapped, as usual for "
            f"{target.num_layers} layers",
            stacklevel=2,
        )
    return config


def _stated_ids(fields: Fields) -> Any:
    """The tapped layers as the file counts them, in the one place or the other."""
    inner = fields.raw("eagle_config")
    if not isinstance(inner, dict | None):
        fields.fault("eagle_config", "an object")
        inner = None
    nested = Fields(inner or {}, fields.origin)
    nested.only("use_aux_hidden_state", True)
    ids, inner_ids = fields.raw(_IDS), nested.raw(_IDS)
    nested.refuse_unread()
    fields.faults.extend(nested.faults)
    return inner_ids if ids is None else ids


def _taps(
    fields: Fields, ids: Any, target: ModelConfig, first_id: int
) -> tuple[int, ...]:
    """The blocks whose outputs are tapped, from either way to count them."""
    layers = target.num_layers
    if ids is None:
        taps = (1, layers // 2 - 1, layers - 4)
    elif (
        isinstance(ids, list)
        and len(ids) == TAPS
        and all(type(number) is int for number in ids)
    ):
        taps = tuple(number - first_id for number in ids)
    else:
        fields.faults.append(f"`{_IDS}` is {str(ids)[:60]}, expected {TAPS} layers")
        return (0,) * TAPS
    if not all(0 <= tap < layers for tap in taps):
        fields.faults.append(
            f"`{_IDS}` taps the outputs of blocks {', '.join(map(str, taps))}, but the "
            f"target has blocks 0 to {layers - 1}"
        )
    return taps


def _fit_faults(decoder: ModelConfig, target: ModelConfig, tapped: int) -> list[str]:
    """What keeps a head from reading this target."""
    faults = []
    if tapped != target.hidden_size:
        faults.append(
            f"the head reads hidden states of {tapped} numbers, but those of the "
            f"target have {target.hidden_size}"
        )
    if decoder.vocab_size != target.vocab_size:
        faults.append(
            f"the head is for {decoder.vocab_size} ids, but the target has "
            f"{target.vocab_size}"
        )
    if decoder.sandwich_norms:
        faults.append(f"a head of {decoder.family} layers is not supported")
    return faults
