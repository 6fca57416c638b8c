"""EAGLE files: what their fields and tensors mean, and what is refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxspec
from jaxspec.checkpoints.eagle import load_eagle
from jaxspec.checkpoints.eagle_config import parse_eagle
from jaxspec.models.config import Rope
from jaxspec.models.decoder import Decoder
from tests import fakes
from tests.cli.test_generate import assert_refused, jaxspec_command, write_model
from tests.drafters import eagle_files
from tests.drafters.test_eagle import DRAFT_IDS, whole


@pytest.fixture(scope="module")
def target():
    return fakes.tiny(1)


LAYERS_8 = dataclasses.replace(
    fakes.tiny(1).config,
    num_layers=8,
    windows=(None,) * 8,
    ropes=(Rope(1e4),) * 8,
    mlp_bias=True,
)


@pytest.mark.parametrize("speculators", [False, True])
def test_bl49_taps_are_the_outputs_of_the_named_blocks(tmp_path, speculators):
    """Block i adds i + 1 to the stream; both ways to count mean the same blocks."""
    model = Decoder(LAYERS_8, rngs=nnx.Rngs(0))
    model = jax.tree.map(jnp.zeros_like, model)
    for index, layer in enumerate(model.layers):
        layer.mlp.down_proj.bias = nnx.Param(jnp.full(32, index + 1.0))
    made = eagle_files.eagle3(ids=(1, 3, 4), speculators=speculators)
    head, _ = load_eagle(eagle_files.write(tmp_path, *made), LAYERS_8)
    assert head.taps == (1, 3, 4)
    taps = whole(model, jnp.array([[3, 4]]), head.taps).taps
    sums = [1 + 2, 1 + 2 + 3 + 4, 1 + 2 + 3 + 4 + 5]
    np.testing.assert_array_equal(taps[0, :, :, 0], [sums, sums])


@pytest.mark.parametrize("speculators", [False, True])
def test_bl49_without_ids_the_usual_blocks_are_tapped_and_told(tmp_path, speculators):
    config, tensors = eagle_files.eagle3(speculators=speculators)
    config.pop("eagle_config", None)
    config.pop("eagle_aux_hidden_state_layer_ids", None)
    folder = eagle_files.write(tmp_path, config, tensors)
    with pytest.warns(UserWarning, match=r"is missing; the outputs of blocks 1, 3, 4"):
        head, _ = load_eagle(folder, LAYERS_8)
    assert head.taps == (1, 3, 4)


def test_bl48_d2t_holds_offsets(tmp_path, target):
    config, tensors = eagle_files.eagle3(draft_ids=[0, 3, 4, 8])
    assert tensors["d2t"].tolist() == [0, 2, 2, 5]
    _, places = load_eagle(eagle_files.write(tmp_path, config, tensors), target.config)
    assert [int(places[i]) for i in (0, 3, 4, 8)] == [0, 1, 2, 3]
    assert (np.delete(places, [0, 3, 4, 8]) == 4).all()
    # The first ids may be the draft vocabulary, if t2d says so.
    config, tensors = eagle_files.eagle3(draft_ids=range(4))
    _, places = load_eagle(eagle_files.write(tmp_path, config, tensors), target.config)
    assert places[:5].tolist() == [0, 1, 2, 3, 4]
    tensors.pop("t2d")
    folder = eagle_files.write(tmp_path, config, tensors)
    with pytest.raises(jaxspec.UserError, match="`d2t` is all zero"):
        load_eagle(folder, target.config)


def test_a_short_context_of_the_heads_config_cuts_nothing(tmp_path, target):
    """Positions past its `max_position_embeddings`, 8, are rotated on."""
    config, tensors = eagle_files.eagle()
    assert config["max_position_embeddings"] == 8
    head, _ = load_eagle(eagle_files.write(tmp_path, config, tensors), target.config)
    assert head.config.decoder.max_positions == 8
    assert head.init_cache(1, 100, 4).groups[0][0].shape[4] >= 100


def changed(made, config=None, drop=(), **tensors):
    """A head with some fields and tensors replaced or gone."""
    values, stored = made
    values = values | (config or {})
    values = {name: v for name, v in values.items() if v is not Ellipsis}
    stored = {n: t for n, t in (stored | tensors).items() if n not in drop}
    return values, stored


NESTED = {"eagle_aux_hidden_state_layer_ids": [0, 1]}
EAGLE3 = eagle_files.eagle3(draft_ids=DRAFT_IDS)
REDUCED = {name: EAGLE3[1][name] for name in ("d2t", "t2d")}
BAD = {
    "another hidden size": (
        eagle_files.eagle(hidden_size=48),
        "reads hidden states of 48 numbers, but those of the target have 32",
    ),
    "another target": (
        eagle_files.eagle3(target_size=48),
        "reads hidden states of 48 numbers, but those of the target have 32",
    ),
    "another vocabulary": (
        eagle_files.eagle(vocab_size=80),
        "is for 80 ids, but the target has 64",
    ),
    "a tap past the last block": (
        eagle_files.eagle3(ids=(0, 1, 2)),
        "taps the outputs of blocks 0, 1, 2, but the target has blocks 0 to 1",
    ),
    "a tap before the first block": (
        eagle_files.eagle3(ids=(-1, 0, 1), speculators=True),
        "taps the outputs of blocks -1, 0, 1",
    ),
    "two taps": (
        changed(EAGLE3, {"eagle_config": NESTED}),
        "is [0, 1], expected 3 layers",
    ),
    "no auxiliary states": (
        changed(EAGLE3, {"eagle_config": {"use_aux_hidden_state": False}}),
        "`use_aux_hidden_state` is False",
    ),
    "an unknown switch": (
        changed(EAGLE3, {"parallel_drafting": True}),
        "unknown field `parallel_drafting` is not supported",
    ),
    "a switch that is none": (
        changed(EAGLE3, {"norm_output": "yes"}),
        "`norm_output` is 'yes', expected true or false",
    ),
    "another architecture": (
        changed(EAGLE3, {"architectures": ["MedusaModel"]}),
        "`architectures` is ['MedusaModel'], expected names such as",
    ),
    "another kind of speculator": (
        changed(
            eagle_files.eagle3(speculators=True), {"speculators_model_type": "mlp"}
        ),
        "`speculators_model_type` is 'mlp', expected one of eagle, eagle3",
    ),
    "more norms": (
        changed(eagle_files.eagle(speculators=True), {"layernorms": True}),
        "`layernorms` is True",
    ),
    "no layers": (
        changed(
            eagle_files.eagle3(speculators=True), {"transformer_layer_config": [1]}
        ),
        "`transformer_layer_config` is [1], expected an object",
    ),
    "a bias that is not there": (
        changed(eagle_files.eagle(bias=False), {"bias": True}),
        "tensor `fc.bias` is missing",
    ),
    "an unknown tensor": (
        changed(EAGLE3, **{"extra.weight": np.ones(3, "f4")}),
        "tensor `extra.weight` is not used by a head of this config",
    ),
    "a mis-shaped tensor": (
        changed(EAGLE3, **{"fc.weight": np.ones((32, 64), "f4")}),
        "tensor `fc.weight` has shape [32, 64], expected [32, 96]",
    ),
    "whole numbers": (
        changed(EAGLE3, **{"fc.weight": np.ones((32, 96), "i4")}),
        "tensor `fc.weight` holds whole numbers",
    ),
    "one tensor twice": (
        changed(EAGLE3, **{"layers.0.hidden_norm.weight": np.ones(32, "f4")}),
        "name one tensor",
    ),
    "no head for a reduced vocabulary": (
        changed(EAGLE3, drop=("lm_head.weight",)),
        "`lm_head.weight` is missing, and a head of width 32 and 24 ids",
    ),
    "no embedding of its width": (
        eagle_files.eagle3(hidden_size=48, target_size=32, draft_ids=DRAFT_IDS),
        "`embed_tokens.weight` is missing, and a head of width 48",
    ),
    "no d2t": (changed(EAGLE3, drop=("d2t",)), "`d2t` is missing"),
    "d2t out of range": (
        changed(EAGLE3, d2t=REDUCED["d2t"] + 64),
        "expected different ones from 0 to 63",
    ),
    "d2t of one id": (
        changed(EAGLE3, d2t=-np.arange(24)),
        "`d2t` leads to ids from 0 to 0",
    ),
    "t2d of other ids": (
        changed(EAGLE3, t2d=~REDUCED["t2d"]),
        "`t2d` marks 40 ids and `d2t` leads to 24, and they differ at id 0",
    ),
    "d2t of another size": (
        changed(EAGLE3, d2t=np.zeros(23, int)),
        "`d2t` has shape [23], expected 24 whole numbers",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_head_that_does_not_fit_is_refused(target, tmp_path, name):
    made, part = BAD[name]
    folder = eagle_files.write(tmp_path, *made)
    with pytest.raises(jaxspec.UserError) as error:
        jaxspec.Generator(jaxspec.LanguageModel("tiny", target), f"eagle:{folder}")
    assert part in str(error.value)


def test_a_missing_or_broken_folder_is_refused(target, tmp_path):
    with pytest.raises(jaxspec.UserError, match="expected a folder with config"):
        load_eagle(tmp_path / "nowhere", target.config)
    with pytest.raises(jaxspec.UserError, match=r"holds none of model\.safetensors"):
        load_eagle(tmp_path, target.config)
    folder = eagle_files.write(tmp_path, *EAGLE3)
    whole_file = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole_file[:-50])
    with pytest.raises(jaxspec.UserError, match="not a safetensors file"):
        load_eagle(folder, target.config)


def test_a_head_loads_as_bfloat16_with_its_norms_in_float32(target, tmp_path):
    folder = eagle_files.write(tmp_path, *eagle_files.eagle3(switches=["fc_norm"]))
    head, _ = load_eagle(folder, target.config, jnp.bfloat16)
    assert head.fc.weight[...].dtype == jnp.bfloat16
    assert head.norm.weight[...].dtype == head.fc_norm[0].weight[...].dtype == "float32"


def test_what_a_speculators_file_leaves_out_is_its_classs_default(target):
    common = {"speculators_model_type": "eagle3", "draft_vocab_size": 32000}
    common["eagle_aux_hidden_state_layer_ids"] = [1, 2, 2]
    wide = dataclasses.replace(target.config, hidden_size=4096, vocab_size=128256)
    layers = {"vocab_size": 128256, "num_hidden_layers": 1, "num_key_value_heads": 8}
    values = common | {"transformer_layer_config": layers}
    found = parse_eagle(values, "here", wide, is_eagle3=False).decoder
    sizes = found.num_heads, found.num_kv_heads, found.head_dim, found.norm_eps
    assert sizes == (32, 8, 128, 1e-6) and found.intermediate_size == 11008
    values["transformer_layer_config"] = {**layers, "model_type": "qwen3"}
    qwen = parse_eagle(values, "here", wide, is_eagle3=False).decoder
    assert qwen.qk_norm and qwen.intermediate_size == 22016 and qwen.head_dim == 128


@pytest.mark.full
def test_the_command_line_takes_an_eagle_head_and_trees(tmp_path):
    model = write_model(tmp_path / "model")
    values = json.loads((tmp_path / "model" / "config.json").read_text())
    made = eagle_files.eagle3(
        draft_ids=range(5, 205),
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        target_size=values["hidden_size"],
    )
    folder = eagle_files.write(tmp_path / "head", *made)
    prompt = ("generate", "--model", model, "--prompt", "1 2 3", "--max-new-tokens")
    runs = [
        jaxspec_command(*prompt, "20", "--json", "--drafter", *drafter)
        for drafter in (
            ("none",),
            (f"eagle:{folder}", "--tree", "2,2"),
            (f"eagle:{folder}", "--tree", "dynamic:depth=3,topk=2,nodes=6"),
        )
    ]
    assert [run.returncode for run in runs] == [0, 0, 0], runs[1].stderr
    plain, *drafted = (json.loads(run.stdout) for run in runs)
    for run in runs[1:]:
        (told,) = run.stderr.splitlines()
        assert "reads the outputs of blocks 0, 1, 1 (of 0 to 1)" in told
    for result in drafted:
        assert result["token_ids"] == plain["token_ids"]
        assert result["stats"]["drafted"] > 0
    refused = jaxspec_command(*prompt, "12", "--drafter", "eagle:nowhere")
    assert_refused(refused, "nowhere: expected a folder with config.json and weights")
