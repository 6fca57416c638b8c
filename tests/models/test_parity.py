import numpy as np
import pytest

from jaxspec.cache import BLOCK
from jaxspec.checkpoints.load import load_decoder
from tests.models import theirs
from tests.models.forwards import (
    TEXT_LENGTH,
    TINY,
    largest_difference,
    one_shot,
    random_ids,
    tiny_values,
)

pytestmark = pytest.mark.parity

IDS = random_ids(64, TEXT_LENGTH)
LIMIT = 1e-4


@pytest.fixture(scope="module", autouse=True)
def the_parity_extra():
    theirs.require()


def difference(folder, model):
    wanted = theirs.logits(model, IDS)
    assert wanted.std() > 0.5
    found = largest_difference(one_shot(load_decoder(folder), IDS).logits[0], wanted)
    print(f"largest difference {found:.1e}")
    return found


@pytest.mark.parametrize("name", TINY)
def test_a_folder_that_transformers_wrote(name, tmp_path):
    values = tiny_values(name)
    assert max(2 * BLOCK, values.get("sliding_window", 0)) < TEXT_LENGTH
    model = theirs.random_model(values)
    model.save_pretrained(tmp_path)
    assert difference(tmp_path, model) < LIMIT


@pytest.mark.parametrize("name", ("llama", "gemma3"))
def test_a_folder_in_shards(name, tmp_path):
    model = theirs.random_model(tiny_values(name), seed=1)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert difference(tmp_path, model) < LIMIT


@pytest.mark.parametrize("name", ("qwen2", "gemma3"))
def test_a_folder_in_bfloat16_read_as_float32(name, tmp_path):
    import torch

    exact = theirs.random_model(tiny_values(name), seed=2)
    before = theirs.logits(exact, IDS)
    exact.to(torch.bfloat16).save_pretrained(tmp_path)
    rounded = theirs.from_folder(tmp_path)
    assert largest_difference(theirs.logits(rounded, IDS), before) > 100 * LIMIT
    assert difference(tmp_path, rounded) < LIMIT


def test_the_comparison_can_fail(tmp_path):
    model = theirs.random_model(tiny_values("qwen2"))
    model.save_pretrained(tmp_path)
    model.model.layers[0].self_attn.k_proj.bias.data += 0.5
    assert difference(tmp_path, model) > 100 * LIMIT


def test_the_reference_forward_agrees_too():
    # Two oracles that never met: NumPy's here, and transformers' above.
    from jaxspec.checkpoints.hf_config import parse_config
    from tests.models.reference import forward

    for name in ("llama, llama3 rope", "gemma3"):
        values = tiny_values(name)
        model = theirs.random_model(values)
        gemma = "gemma" in values["model_type"]
        parameters = {
            key.removeprefix("model."): np.asarray(tensor.detach())
            + np.float32(gemma and "norm" in key)
            for key, tensor in model.named_parameters()
        }
        parameters["final_norm.weight"] = parameters.pop("norm.weight")
        config = parse_config(values, name)
        reference = forward(config, parameters, IDS).logits
        assert largest_difference(theirs.logits(model, IDS), reference) < LIMIT
