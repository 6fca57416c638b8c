import numpy as np
import pytest

from jaxspec.cache import BLOCK
from jaxspec.checkpoints.load import load_decoder
from tests.checkpoints.writers import tiny_config, write_tiny_gguf
from tests.models import theirs
from tests.models.forwards import (
    NEWER,
    TEXT_LENGTH,
    TINY,
    YARN,
    largest_difference,
    one_shot,
    random_ids,
    tiny_values,
)

pytestmark = pytest.mark.parity

IDS = random_ids(64, TEXT_LENGTH)
LIMIT = 1e-4
# Of models whose attention is calm; measured 8.7e-6 at most.
CLOSE = 1e-5
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
YARN_STATED = YARN | {"attention_factor": 0.9, "beta_fast": 8.0, "beta_slow": 0.25}
# Null is not absence to these classes, which have defaults: a family and what differs.
FURTHER = {
    "gemma2, no caps": ("gemma2", dict.fromkeys(CAPS)),
    "gemma2, other layers": (
        "gemma2",
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 24,
            "rope_scaling": YARN,
        },
    ),
    "gemma3, capped": (
        "gemma3",
        {"final_logit_softcapping": 2.0, "rope_scaling": YARN},
    ),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mistral, wide heads": ("mistral", {"head_dim": 16, "rope_scaling": YARN_STATED}),
}


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
    assert difference(tmp_path, model) < (CLOSE if name in NEWER else LIMIT)


@pytest.mark.parametrize("name", FURTHER)
def test_a_folder_with_the_further_fields_of_a_family(name, tmp_path):
    family, changes = FURTHER[name]
    values = tiny_config(family, max_position_embeddings=512) | changes
    model = theirs.random_model(values)
    model.save_pretrained(tmp_path)
    assert difference(tmp_path, model) < CLOSE


def test_a_gguf_file_of_gemma2(tmp_path):
    # Transformers reads no cap and no query scale from a file: these are its defaults.
    values = tiny_config("gemma2", head_dim=256, sliding_window=40)
    values |= {"query_pre_attn_scalar": 256} | dict(
        zip(CAPS, (50.0, 30.0), strict=True)
    )
    file = write_tiny_gguf(tmp_path / "gemma2.gguf", values)
    assert difference(file, theirs.from_gguf(file)) < LIMIT


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
