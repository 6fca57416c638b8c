"""EAGLE heads in float64 NumPy, from the published tensors, without a cache.

Written from the formulas alone: everything is read anew for every token.
"""

import numpy as np


def rms_norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def rotate(heads, theta):
    """Pairs half a head apart, of `[T, heads, D]` at positions 0, 1, ..."""
    half = heads.shape[-1] // 2
    turns = np.arange(len(heads))[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(turns)[:, None], np.sin(turns)[:, None]
    first, second = heads[..., :half], heads[..., half:]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return np.concatenate(rotated, axis=-1)


class Head:
    """One head: `tensors` by published name, `config` as published, and the target's.

    Attributes:
        target: `embed`, `norm` and `head` of the target, as float64 arrays.
    """

    def __init__(self, tensors, config, target, eagle3):
        self.tensors = {
            name: np.asarray(value, np.float64) for name, value in tensors.items()
        }
        self.config, self.target, self.eagle3 = config, target, eagle3
        layers = config.get("transformer_layer_config", config)
        self.layers, self.eps = layers, layers["rms_norm_eps"]

    def get(self, *names):
        """The first of these tensors that the file has."""
        return next((self.tensors[n] for n in names if n in self.tensors), None)

    def norm(self, x, *names):
        return rms_norm(x, self.get(*names), self.eps)

    def attention(self, x, layer):
        tensors = [self.get(f"{layer}.self_attn.{n}_proj.weight") for n in "qkvo"]
        query, key, value, out = tensors
        heads, groups = (
            self.layers["num_attention_heads"],
            self.layers["num_key_value_heads"],
        )
        width = query.shape[0] // heads
        q, k, v = ((x @ w.T).reshape(len(x), -1, width) for w in (query, key, value))
        q, k = rotate(q, 1e4), rotate(k, 1e4)
        k, v = (np.repeat(each, heads // groups, axis=1) for each in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(width)
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1) @ out.T

    def mlp(self, x, layer):
        gate, up, down = (
            self.get(f"{layer}.mlp.{n}_proj.weight") for n in ("gate", "up", "down")
        )
        return (silu(x @ gate.T) * (x @ up.T)) @ down.T

    def block(self, x, layer, first):
        """A plain decoder layer; EAGLE-1's first one has no norm before attention."""
        normed = x if first else self.norm(x, f"{layer}.input_layernorm.weight")
        x = x + self.attention(normed, layer)
        normed = self.norm(x, f"{layer}.post_attention_layernorm.weight")
        return x + self.mlp(normed, layer)

    def joint_block(self, embedded, features, layer):
        """EAGLE-3's first layer."""
        e = self.norm(embedded, f"{layer}.input_layernorm.weight")
        n = self.norm(features, f"{layer}.hidden_norm.weight")
        residual = n if self.config.get("norm_before_residual") else features
        x = residual + self.attention(np.concatenate([e, n], axis=-1), layer)
        normed = self.norm(x, f"{layer}.post_attention_layernorm.weight")
        return x + self.mlp(normed, layer)

    def true_features(self, hidden, taps):
        """Of positions 0, 1, ...: `hidden[T, E]` un-normed, `taps[T, 3, E]`."""
        if not self.eagle3:
            return rms_norm(hidden, self.target["norm"], self.target["eps"])
        if self.config.get("fc_norm"):
            each = [self.norm(taps[:, i], f"fc_norm.{i}.weight") for i in range(3)]
            taps = np.stack(each, axis=1)
        joint = taps.reshape(len(taps), -1)
        if self.config.get("norm_before_fc"):
            joint = self.norm(joint, "input_norm.weight")
        return joint @ self.get("fc.weight").T

    def last_guess(self, features, tokens):
        """The head's guess at the feature after the last of these pairs."""
        own = self.get("embed_tokens.weight")
        embedded = (self.target["embed"] if own is None else own)[tokens]
        if self.eagle3:
            first = (
                "midlayer"
                if "midlayer.hidden_norm.weight" in self.tensors
                else "layers.0"
            )
            x = self.joint_block(embedded, features, first)
        else:
            weight = self.get("fc.weight", "fusion_fc.weight")
            bias = self.get("fc.bias", "fusion_fc.bias")
            x = np.concatenate([embedded, features], axis=-1) @ weight.T
            x = x if bias is None else x + bias
            old = "transformer.self_attn.q_proj.weight" in self.tensors
            x = self.block(x, "transformer" if old else "layers.0", first=True)
        for layer in range(1, self.layers["num_hidden_layers"]):
            x = self.block(x, f"layers.{layer}", first=False)
        return x[-1]

    def logits(self, guess):
        if not self.eagle3:
            return guess, guess @ self.target["head"].T
        normed = self.norm(guess, "norm.weight")
        own = self.get("lm_head.weight")
        logits = normed @ (self.target["head"] if own is None else own).T
        if "d2t" in self.tensors:
            ids = np.arange(len(logits)) + self.tensors["d2t"].astype(int)
            wide = np.full(len(self.target["head"]), -np.inf)
            wide[ids] = logits
            logits = wide
        return (normed if self.config.get("norm_output") else guess), logits

    def draft_logits(self, text, hidden, taps, path):
        """Logits after the text, and after each token of a drafted path."""
        features = self.true_features(hidden, taps)
        tokens, rows = list(text[1:]), []
        for drafted in [*path, None]:
            fed_on, logits = self.logits(self.last_guess(features, tokens))
            rows.append(logits)
            features = np.concatenate([features, fed_on[None]])
            tokens.append(drafted)
        return np.stack(rows)
