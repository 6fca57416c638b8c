"""EAGLE heads with random weights, as the published layouts write them."""

import json

import numpy as np
from safetensors.numpy import save_file

LAYERS = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": 64,
    "max_position_embeddings": 8,
}


class Weights:
    """Makes tensors by name; a norm's scale lies round one."""

    def __init__(self, seed=0):
        self.rng, self.made = np.random.default_rng(seed), {}

    def linear(self, name, out, into, scale=1.0):
        weight = self.rng.normal(size=(out, into)) * into**-0.5 * scale
        self.made[f"{name}.weight"] = weight.astype("f4")

    def norm(self, name, size):
        scale = 1 + 0.2 * self.rng.normal(size=size)
        self.made[f"{name}.weight"] = scale.astype("f4")

    def layer(self, name, layers, attention_in, input_norm=True):
        width, inner = layers["hidden_size"], layers["intermediate_size"]
        heads, groups = layers["num_attention_heads"], layers["num_key_value_heads"]
        head = layers.get("head_dim", width // heads)
        for projection, count in (("q", heads), ("k", groups), ("v", groups)):
            self.linear(
                f"{name}.self_attn.{projection}_proj", count * head, attention_in
            )
        self.linear(f"{name}.self_attn.o_proj", width, heads * head)
        self.linear(f"{name}.mlp.gate_proj", inner, width)
        self.linear(f"{name}.mlp.up_proj", inner, width)
        self.linear(f"{name}.mlp.down_proj", width, inner)
        self.norm(f"{name}.post_attention_layernorm", width)
        if input_norm:
            self.norm(f"{name}.input_layernorm", width)


def eagle(bias=True, embedding=True, speculators=False, layers=LAYERS, **changes):
    """EAGLE-1: config and tensors."""
    layers = LAYERS | layers | changes
    width, weights = layers["hidden_size"], Weights()
    fc, layer = ("fusion_fc", "transformer") if speculators else ("fc", "layers.0")
    weights.linear(fc, width, 2 * width)
    if bias:
        weights.made[f"{fc}.bias"] = weights.rng.normal(size=width).astype("f4")
    weights.layer(layer, layers, width, input_norm=False)
    for other in range(1, layers["num_hidden_layers"]):
        weights.layer(f"layers.{other}", layers, width)
    if embedding:
        weights.linear("embed_tokens", layers["vocab_size"], width, width**0.5)
    if speculators:
        config = {
            "speculators_model_type": "eagle",
            "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
            "speculators_version": "0.1.0",
            "speculators_config": {"algorithm": "eagle"},
            "transformer_layer_architecture": "LlamaDecoderLayer",
            "transformer_layer_config": layers,
            "layernorms": False,
            "fusion_bias": bias,
        }
        return config, weights.made
    config = layers | {"architectures": ["LlamaForCausalLM"], "bias": bias}
    return config, weights.made


def eagle3(
    ids=(0, 1, 1),
    draft_ids=None,
    head=True,
    embedding=False,
    speculators=False,
    target_size=32,
    switches=(),
    **changes,
):
    """EAGLE-3: config and tensors. `draft_ids` are the ids of the draft vocabulary."""
    layers = LAYERS | changes
    width, weights = layers["hidden_size"], Weights(1)
    switches = dict.fromkeys(switches, True)
    first = "layers.0" if speculators else "midlayer"
    weights.linear("fc", width, 3 * target_size)
    weights.layer(first, layers, 2 * width)
    weights.norm(f"{first}.hidden_norm", width)
    for other in range(1, layers["num_hidden_layers"]):
        weights.layer(f"layers.{other}", layers, width)
    weights.norm("norm", width)
    known = layers["vocab_size"] if draft_ids is None else len(draft_ids)
    if head:
        weights.linear("lm_head", known, width)
    if embedding:
        weights.linear("embed_tokens", layers["vocab_size"], width, width**0.5)
    if "norm_before_fc" in switches:
        weights.norm("input_norm", 3 * target_size)
    if "fc_norm" in switches:
        for tap in range(3):
            weights.norm(f"fc_norm.{tap}", target_size)
    if draft_ids is not None:
        draft_ids = np.asarray(draft_ids)
        weights.made["d2t"] = draft_ids - np.arange(known)
        weights.made["t2d"] = np.isin(np.arange(layers["vocab_size"]), draft_ids)
    common = {"draft_vocab_size": known, **switches}
    if target_size != width:
        common["target_hidden_size"] = target_size
    if speculators:
        config = common | {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3Speculator"],
            "speculators_version": "0.3.0",
            "speculators_config": {"algorithm": "eagle3"},
            "transformer_layer_config": layers,
            "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in ids],
            "embed_requires_grad": False,
        }
        return config, weights.made
    config = layers | common | {"architectures": ["LlamaForCausalLMEagle3"]}
    config["eagle_config"] = {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": list(ids),
    }
    return config, weights.made


def write(folder, config, tensors, name="model.safetensors"):
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / name)
    return folder
