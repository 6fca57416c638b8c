"""Draft models cut from their target: the files, and what they draft."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.checkpoints.cut_draft import (
    CutDraft,
    cut_parameters,
    load_cut,
    write_cut,
)
from tests import fakes


@pytest.fixture(scope="module")
def target():
    return fakes.tiny(1, layers=3)


def generator(target, path=None, **options):
    drafter = None if path is None else f"draft:{path}"
    return jaxspec.Generator(jaxspec.LanguageModel("tiny", target), drafter, **options)


@pytest.fixture
def written(target, tmp_path):
    """The first and the last layer, as the target has them, over some ids."""
    known = np.array([9, 3, 40, 41, 42, 1])
    draft = CutDraft((0, 2), cut_parameters(target, (0, 2)), known)
    write_cut(tmp_path, draft)
    return tmp_path, draft


def test_what_is_read_is_what_was_written(target, written):
    folder, draft = written
    found = load_cut(folder, target.config)
    assert found.layers == (0, 2)
    np.testing.assert_array_equal(found.known, draft.known)
    assert found.own.keys() == draft.own.keys()
    assert not any("embed" in name or "head" in name for name in found.own)
    for name, array in draft.own.items():
        stored = array.astype(jnp.bfloat16).astype(jnp.float32)
        np.testing.assert_array_equal(found.own[name], stored, err_msg=name)


@pytest.mark.parametrize("options", [{"draft_tokens": 3}, {"tree": (2, 2)}])
def test_it_drafts_its_own_ids_and_changes_no_greedy_id(target, written, options):
    folder, draft = written
    drafted = generator(target, folder, **options).generate([5, 6], max_new_tokens=24)
    plain = generator(target).generate([5, 6], max_new_tokens=24)
    assert drafted.token_ids == plain.token_ids
    pairs = zip(drafted.token_ids, drafted.from_draft, strict=True)
    assert {token for token, own in pairs if own} <= set(draft.known.tolist())


def test_a_draft_of_all_layers_is_always_accepted(target, tmp_path):
    layers = (0, 1, 2)
    draft = CutDraft(layers, cut_parameters(target, layers), None)
    write_cut(tmp_path, draft, jnp.float32)
    made = generator(target, tmp_path, draft_tokens=3)
    result = made.generate([5, 6], max_new_tokens=25, temperature=1.0, seed=3)
    assert result.stats.acceptance_rate == 1


def test_its_ends_are_the_targets_own_arrays(target, written):
    model = generator(target, written[0]).drafter.model.model
    shared = model.embed_tokens.weight[...], target.embed_tokens.weight[...]
    assert shared[0].unsafe_buffer_pointer() == shared[1].unsafe_buffer_pointer()


def spoil(folder, layers=(0, 2), **tensors):
    """Files with other tensors; None leaves one out."""
    from safetensors.numpy import load_file, save_file

    stored = load_file(folder / "model.safetensors") | tensors
    kept = {name: value for name, value in stored.items() if value is not None}
    save_file(kept, folder / "model.safetensors")
    values = {"drafter": "draft", "layers": layers}
    (folder / "config.json").write_text(json.dumps(values))


NORM = "layers.1.input_layernorm.weight"
BAD = {
    "a layer that is not there": ({"layers": [0, 3]}, "`layers` is [0, 3], expected"),
    "no layers": ({"layers": []}, "`layers` is [], expected some of the target's"),
    "layers that are none": ({"layers": "02"}, "expected some of the target's, 0 to 2"),
    "more layers": ({"layers": [0, 1, 2]}, "`layers.2.mlp.up_proj.weight` is missing"),
    "a missing tensor": ({NORM: None}, f"`{NORM}` is missing"),
    "another shape": ({NORM: np.ones(3, "f4")}, "has shape [3], expected [32]"),
    "something else": (
        {"fc": np.ones(3, "f4")},
        "`fc` is none of `jaxspec train",
    ),
    "an id twice": ({"token_map": np.array([1, 1])}, "expected different ones"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_do_not_fit_are_refused(target, written, name):
    changes, part = BAD[name]
    spoil(written[0], **changes)
    with pytest.raises(jaxspec.UserError) as error:
        generator(target, written[0])
    assert part in str(error.value)


def test_a_folder_of_something_else_is_refused(target, tmp_path):
    with pytest.raises(jaxspec.UserError, match=r"holds no config\.json of what"):
        generator(target, tmp_path)
