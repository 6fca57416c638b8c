"""What a config says of frequencies, widths, biases and heads reaches the logits."""

import numpy as np
import pytest

from jaxspec.checkpoints.hf_config import parse_config
from jaxspec.checkpoints.load import load_decoder
from jaxspec.models.config import Rope, RopeScaling
from tests.checkpoints.writers import random_tensors, tiny_config, write_hf_folder
from tests.models.forwards import (
    NEWER,
    TEXT_LENGTH,
    largest_difference,
    one_shot,
    random_ids,
    tiny,
    tiny_names,
    tiny_values,
)
from tests.models.reference import forward, frequencies

NAMES = tiny_names(*NEWER[1:])
IDS = random_ids(64, TEXT_LENGTH)


def test_bl38_llama3_frequencies():
    rope = Rope(10_000.0, RopeScaling("llama3", 8.0, 1.0, 4.0, 64))
    wanted = [1, 0.0130423, 0.00125, 0.000125]
    np.testing.assert_allclose(rope.inverse_frequencies(8), wanted, rtol=1e-5)
    plain = Rope(10_000.0)
    np.testing.assert_allclose(plain.inverse_frequencies(8), [1, 0.1, 0.01, 0.001])


def test_bl38_frequencies_of_llama_3_2_1b():
    plain, scaling = Rope(500_000.0), RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    scaled = Rope(500_000.0, scaling).inverse_frequencies(64)
    ratio = np.array(scaled) / np.array(plain.inverse_frequencies(64))
    np.testing.assert_array_equal(ratio[:15], 1)
    np.testing.assert_allclose(ratio[15:18], [0.60557, 0.30374, 0.10345], rtol=1e-4)
    np.testing.assert_allclose(ratio[18:], 1 / 32)


@pytest.mark.parametrize("name", NAMES)
def test_frequencies_equal_the_reference(name):
    config = tiny(name).config
    for rope in set(config.ropes):
        ours = rope.inverse_frequencies(config.head_dim)
        np.testing.assert_allclose(ours, frequencies(rope, config.head_dim), rtol=1e-12)


def loaded(folder, values, tensors):
    """A folder's decoder, and the NumPy forward of the tensors put into it."""
    model = load_decoder(write_hf_folder(folder, values, tensors=tensors))
    parameters = {
        name.removeprefix("model."): tensor for name, tensor in tensors.items()
    }
    parameters["final_norm.weight"] = parameters.pop("norm.weight")
    config = parse_config(values, "config.json")
    return one_shot(model, IDS).logits[0], forward(config, parameters, IDS).logits


def test_bl38_scaling_in_a_folder_changes_logits_as_it_should(tmp_path):
    values = tiny_values("llama, llama3 rope")
    tensors = random_tensors(values)
    scaled, wanted = loaded(tmp_path / "scaled", values, tensors)
    assert largest_difference(scaled, wanted) < 1e-4
    plain, _ = loaded(tmp_path / "plain", values | {"rope_scaling": None}, tensors)
    assert largest_difference(scaled, plain) > 0.1


def test_bl40_head_width_apart_from_hidden_over_heads(tmp_path):
    values = tiny_values("qwen3")
    tensors = random_tensors(values)
    shapes = {name.split("layers.0.")[-1]: t.shape for name, t in tensors.items()}
    assert shapes["self_attn.q_proj.weight"] == (64, 32)
    assert shapes["self_attn.o_proj.weight"] == (32, 64)
    assert (
        shapes["self_attn.q_norm.weight"] == shapes["self_attn.k_norm.weight"] == (16,)
    )
    ours, theirs = loaded(tmp_path, values, tensors)
    assert largest_difference(ours, theirs) < 1e-5


def test_bl40_a_missing_head_width_is_hidden_over_heads(tmp_path):
    values = tiny_config("llama", max_position_embeddings=512)
    assert "head_dim" not in values
    ours, theirs = loaded(tmp_path, values, random_tensors(values))
    # Weights of 0.3 make attention sharp: float32 rounding alone is 2.2e-5 here.
    assert largest_difference(ours, theirs) < 1e-4


def test_bl41_a_large_key_bias_changes_logits_as_it_should(tmp_path):
    values = tiny_values("qwen2")
    tensors = random_tensors(values)
    before, _ = loaded(tmp_path / "before", values, tensors)
    bias = "model.layers.1.self_attn.k_proj.bias"
    tensors[bias] = 5 * np.sign(tensors[bias])
    after, wanted = loaded(tmp_path / "after", values, tensors)
    assert largest_difference(after, wanted) < 1e-4
    assert largest_difference(after, before) > 0.1


@pytest.mark.parametrize("head_stored_too", (False, True))
def test_bl37_a_tied_model_takes_its_logits_from_the_embedding(
    tmp_path, head_stored_too
):
    values = tiny_values("qwen2")
    tensors = random_tensors(values)
    assert "lm_head.weight" not in tensors
    stored = dict(tensors)
    if head_stored_too:
        stored["lm_head.weight"] = -tensors["model.embed_tokens.weight"]
    ours, _ = loaded(tmp_path, values, stored)
    parameters = {n.removeprefix("model."): t for n, t in tensors.items()}
    parameters["final_norm.weight"] = parameters.pop("norm.weight")
    config = parse_config(values, "config.json")
    assert config.tied
    assert largest_difference(ours, forward(config, parameters, IDS).logits) < 1e-4
