"""Medusa heads from files in the published layouts, against float64 NumPy."""

import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxspec
from jaxspec.checkpoints.medusa import load_heads
from jaxspec.core.topology import Topology
from tests import fakes
from tests.cli.test_generate import assert_refused, jaxspec_command, write_model

WIDTH, VOCAB, HEADS = 32, 64, 3
TOLERANCE = 2e-5  # float32 sums of 32 products of order one


@pytest.fixture(scope="module")
def target():
    return jaxspec.LanguageModel("tiny", fakes.tiny(1))


def tensors(layers=1, own=True, heads=HEADS, width=WIDTH, vocab=VOCAB):
    """Random heads as (weights, biases, vocabulary) by head."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(heads):
        weights = rng.normal(size=(layers, width, width)) * width**-0.5
        biases = rng.normal(size=(layers, width))
        vocabulary = rng.normal(size=(vocab, width)) if own else None
        made.append((weights, biases, vocabulary))
    return made


def medusa_layout(made, prefix=""):
    """`{head}.{layer}.linear.*` and `{head}.{layers}.weight`, as Cai et al. save it."""
    stored = {}
    for head, (weights, biases, vocabulary) in enumerate(made):
        for layer in range(len(weights)):
            name = f"{prefix}{head}.{layer}.linear"
            stored[f"{name}.weight"] = weights[layer]
            stored[f"{name}.bias"] = biases[layer]
        if vocabulary is not None:
            stored[f"{prefix}{head}.{len(weights)}.weight"] = vocabulary
    return {name: value.astype("f4") for name, value in stored.items()}


def vllm_layout(made, prefix="", bias=True):
    stored = {}
    for head, (weights, biases, vocabulary) in enumerate(made):
        for layer in range(len(weights)):
            name = f"{prefix}blocks.{head}.layers.{layer}"
            stored[f"{name}.weight"] = weights[layer]
            if bias:
                stored[f"{name}.bias"] = biases[layer]
        if vocabulary is not None:
            stored[f"{prefix}lm_heads.{head}.weight"] = vocabulary
    return {name: value.astype("f4") for name, value in stored.items()}


def written(folder, stored, name="medusa_lm_head.safetensors"):
    save_file(stored, folder / name)
    return folder / name


def oracle(target, made, hidden, bias=True):
    """The heads' logits in float64, straight from the published formula."""
    decoder = target.decoder
    scale = np.asarray(decoder.final_norm.weight[...], float)
    x = np.asarray(hidden, float)
    x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * scale
    logits = []
    for weights, biases, vocabulary in made:
        y = x
        for weight, own in zip(weights, biases, strict=True):
            z = y @ weight.T + (own if bias else 0)
            y = y + z / (1 + np.exp(-z))
        head = decoder.lm_head.weight[...] if vocabulary is None else vocabulary
        logits.append(y @ np.asarray(head, float).T)
    return np.stack(logits, axis=1)


HIDDEN = np.random.default_rng(5).normal(size=(4, WIDTH)).astype("f4")
LAYOUTS = {
    "Medusa's own": (medusa_layout, {}, {}),
    "two blocks a head": (medusa_layout, {}, {"layers": 2}),
    "Medusa-2, with a prefix": (medusa_layout, {"prefix": "medusa_head."}, {}),
    "the target's vocabulary head": (medusa_layout, {}, {"own": False}),
    "vLLM's": (vllm_layout, {}, {}),
    "vLLM's, with a prefix": (vllm_layout, {"prefix": "medusa_heads."}, {}),
    "vLLM's, without biases": (vllm_layout, {"bias": False}, {"layers": 2}),
    "vLLM's, original head": (vllm_layout, {}, {"own": False}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_heads_give_the_oracles_logits(target, tmp_path, name):
    layout, how, what = LAYOUTS[name]
    made = tensors(**what)
    stored = layout(made, **how)
    if how.get("prefix"):
        # The rest of a whole model is not the heads' business.
        stored["model.norm.weight"] = np.ones(WIDTH, "f4")
    written(tmp_path, stored)
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    heads = load_heads(tmp_path, target.decoder.config)
    found = heads(target.decoder, jnp.asarray(HIDDEN), HEADS)
    assert found.dtype == jnp.float32
    expected = oracle(target, made, HIDDEN, how.get("bias", True))
    np.testing.assert_allclose(found, expected, atol=TOLERANCE * np.abs(expected).max())


def test_a_truncated_vocabulary_is_mapped_to_the_targets_ids(target, tmp_path):
    ids = np.array([40, 3, 7, 63])
    made = tensors(vocab=len(ids))
    stored = vllm_layout(made) | {"token_map": ids}
    heads = load_heads(written(tmp_path, stored), target.decoder.config)
    found = np.asarray(heads(target.decoder, jnp.asarray(HIDDEN), HEADS))
    expected = oracle(target, made, HIDDEN)
    np.testing.assert_allclose(found[..., ids], expected, atol=1e-3)
    others = np.delete(found, ids, axis=-1)
    assert np.isneginf(others).all()


def test_ids_without_a_vocabulary_are_rows_of_the_targets_head(target, tmp_path):
    ids = np.array([40, 3, 7, 63])
    made = tensors(own=False)
    config = target.decoder.config
    whole = load_heads(written(tmp_path, vllm_layout(made)), config)
    path = written(tmp_path, vllm_layout(made) | {"token_map": ids})
    found = load_heads(path, config)(target.decoder, jnp.asarray(HIDDEN), HEADS)
    expected = whole(target.decoder, jnp.asarray(HIDDEN), HEADS)
    np.testing.assert_allclose(found[..., ids], expected[..., ids], atol=1e-5)
    assert np.isneginf(np.delete(found, ids, axis=-1)).all()


def test_heads_load_as_bfloat16(target, tmp_path):
    path = written(tmp_path, medusa_layout(tensors()))
    heads = load_heads(path, target.decoder.config, jnp.bfloat16)
    assert heads.weights.dtype == heads.vocabulary.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.full),
        {"tree": (2, 2, 1)},
        pytest.param({"draft_tokens": 2}, marks=pytest.mark.full),
        pytest.param({"tree": (3, 2)}, marks=pytest.mark.full),
    ],
)
def test_a_generator_drafts_by_heads_and_stays_exact(target, tmp_path, options):
    path = written(tmp_path, medusa_layout(tensors()))
    prompts = [[5, 6, 7], [1], [9] * 12]
    plain = jaxspec.Generator(target).generate(prompts, max_new_tokens=24)
    generator = jaxspec.Generator(target, f"medusa:{path}", **options)
    if not options:
        assert generator.drafter.topology == Topology.chain(HEADS)
    found = generator.generate(prompts, max_new_tokens=24)
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]
    assert all(result.stats.drafted > 0 for result in found)


def refusal(target, stored, tmp_path, **options):
    path = written(tmp_path, stored)
    with pytest.raises(jaxspec.UserError) as error:
        jaxspec.Generator(target, f"medusa:{path}", **options)
    return str(error.value)


@pytest.mark.parametrize("options", [{"draft_tokens": 4}, {"tree": (2, 1, 1, 1)}])
def test_bl50_a_draft_deeper_than_the_heads_is_refused(target, tmp_path, options):
    message = refusal(target, medusa_layout(tensors()), tmp_path, **options)
    assert "has 3 heads, but a draft of depth 4" in message


BAD = {
    "another width": (
        medusa_layout(tensors(width=48)),
        "`0.0.linear.weight` has shape [48, 48], expected [32, 32] for a target of "
        "width 32",
    ),
    "another vocabulary": (
        medusa_layout(tensors(vocab=60)),
        "`0.1.weight` has shape [60, 32], expected [64, 32]",
    ),
    "a head is missing": (
        {n: t for n, t in medusa_layout(tensors()).items() if n[0] != "1"},
        "head 1 lacks its weight",
    ),
    "a vocabulary is missing": (
        {n: t for n, t in medusa_layout(tensors()).items() if n != "2.1.weight"},
        "head 2 lacks its vocabulary",
    ),
    "an unknown tensor": (
        medusa_layout(tensors()) | {"0.0.gate": np.ones(3, "f4")},
        "`0.0.gate` is none of Medusa heads",
    ),
    "no heads": ({"token_map": np.arange(3)}, "holds no Medusa head"),
    "a huge index": (
        {"99999.0.linear.weight": np.ones((32, 32), "f4")},
        "`99999.0.linear.weight` is none",
    ),
    "one tensor twice": (
        medusa_layout(tensors()) | vllm_layout(tensors(heads=1, own=False)),
        "`0.0.linear.weight` and `blocks.0.layers.0.weight` name one tensor",
    ),
    "a number in another way": (
        medusa_layout(tensors()) | {"00.0.linear.weight": np.ones((32, 32), "f4")},
        "`00.0.linear.weight` is none",
    ),
    "two prefixes": (
        medusa_layout(tensors(), "medusa_head.")
        | vllm_layout(tensors(), "medusa_heads."),
        "holds heads under medusa_head. and medusa_heads.",
    ),
    "doubles": (
        {n: t.astype("f8") for n, t in medusa_layout(tensors()).items()},
        "holds F64, expected one of F32",
    ),
    "too many ids": (
        vllm_layout(tensors(vocab=65)) | {"token_map": np.arange(65)},
        "`token_map` has shape [65], expected 1 to 64 ids",
    ),
    "no ids": (
        vllm_layout(tensors(vocab=1)) | {"token_map": np.arange(0)},
        "`token_map` has shape [0]",
    ),
    "whole numbers": (
        {n: t.astype("i4") for n, t in medusa_layout(tensors()).items()},
        "holds whole numbers",
    ),
    "ids out of range": (
        vllm_layout(tensors(vocab=2)) | {"token_map": np.array([1, 64])},
        "`token_map` has ids from 1 to 64, expected different ones from 0 to 63",
    ),
    "an id twice": (
        vllm_layout(tensors(vocab=2)) | {"token_map": np.array([1, 1])},
        "`token_map` has ids from 1 to 1",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_does_not_fit_is_refused(target, tmp_path, name):
    stored, part = BAD[name]
    assert part in refusal(target, stored, tmp_path)


def test_a_broken_or_missing_file_is_refused(target, tmp_path):
    path = written(tmp_path, medusa_layout(tensors()))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(jaxspec.UserError, match="not a safetensors file"):
        jaxspec.Generator(target, f"medusa:{path}")
    with pytest.raises(jaxspec.UserError, match="no such file or folder"):
        jaxspec.Generator(target, "medusa:nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(jaxspec.UserError, match=r"holds none of medusa_lm_head\.safe"):
        jaxspec.Generator(target, f"medusa:{tmp_path / 'empty'}")


def test_a_pickle_without_torch_is_refused_with_the_way_out(target, tmp_path):
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"never read")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from jaxspec.checkpoints.head_files import open_weights; import pathlib\n"
        f"open_weights(pathlib.Path({str(tmp_path / 'medusa_lm_head.pt')!r}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "weights_only=True" in run.stderr and "save_file" in run.stderr


@pytest.mark.parity
def test_a_pickle_of_weights_loads_and_one_with_code_does_not(target, tmp_path):
    import torch

    made = tensors()
    stored = medusa_layout(made)
    path = tmp_path / "medusa_lm_head.pt"
    torch.save({name: torch.tensor(value) for name, value in stored.items()}, path)
    heads = load_heads(tmp_path, target.decoder.config)
    found = heads(target.decoder, jnp.asarray(HIDDEN), HEADS)
    expected = oracle(target, made, HIDDEN)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE * np.abs(expected).max())

    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"0.0.linear.weight": Evil()}, path)
    with pytest.raises(jaxspec.UserError, match="not a file of weights only"):
        load_heads(tmp_path, target.decoder.config)
    assert not (tmp_path / "ran").exists()
    trainable = {n: torch.nn.Parameter(torch.tensor(v)) for n, v in stored.items()}
    torch.save(trainable, path)
    again = load_heads(tmp_path, target.decoder.config)
    np.testing.assert_array_equal(again.weights, heads.weights)
    for bad in (torch.ones(2, 2).to_sparse(), torch.ones(2, dtype=torch.complex64)):
        torch.save({"0.0.linear.weight": bad}, path)
        with pytest.raises(jaxspec.UserError, match="names and dense tensors"):
            load_heads(tmp_path, target.decoder.config)
    torch.save({"0.0.linear.weight": 3}, path)
    with pytest.raises(jaxspec.UserError, match="names and dense tensors"):
        load_heads(tmp_path, target.decoder.config)


@pytest.mark.full
def test_the_command_line_takes_heads_and_a_tree(tmp_path):
    model = write_model(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    made = tensors(width=config["hidden_size"], vocab=config["vocab_size"])
    path = written(tmp_path, medusa_layout(made))
    prompt = ("generate", "--model", model, "--prompt", "1 2 3", "--max-new-tokens")
    runs = [
        jaxspec_command(*prompt, "240", "--json", "--drafter", *drafter)
        for drafter in (("none",), (f"medusa:{path}", "--tree", "2,2"))
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[1].stderr
    plain, drafted = (json.loads(run.stdout) for run in runs)
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["stats"]["drafted"] > 0
    # Random heads are what a file loaded wrongly looks like.
    (warning,) = runs[1].stderr.splitlines()
    assert warning.startswith("jaxspec: warning: the drafter's first tokens were acc")
    refused = jaxspec_command(
        *prompt, "12", "--drafter", f"medusa:{path}", "--draft-tokens", "9"
    )
    assert_refused(refused, "has 3 heads, but a draft of depth 9")
