import math

import numpy as np
import pytest

from jaxspec.checkpoints.hf_config import parse_config
from jaxspec.checkpoints.load import open_checkpoint
from jaxspec.errors import UserError
from jaxspec.models.config import Rope, Yarn
from tests.checkpoints.gguf_loads import assert_refused
from tests.checkpoints.writers import tiny_config, write_hf_folder, write_tiny_gguf

# What the cards of Qwen2.5 and Qwen3 tell users to add for 131,072 tokens.
QWEN = {"factor": 4.0, "original_max_position_embeddings": 32768}
EVERY_FIELD = {
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 0.5,
    "mscale_all_dim": 1.5,
    "truncate": False,
}
YARN_KEYS = {
    "type": "yarn",
    "factor": 4.0,
    "original_context_length": 128,
    "yarn_beta_fast": 16.0,
    "finetuned": True,
}


def parse(scaling, family="qwen2", **changes):
    values = tiny_config(family, rope_scaling={"rope_type": "yarn"} | scaling)
    return parse_config(values | changes, "config.json")


def ratios(rope, head_dim):
    plain = Rope(rope.theta).inverse_frequencies(head_dim)
    return np.array(rope.inverse_frequencies(head_dim)) / np.array(plain)


def test_bl38_frequencies_and_attention_factor_of_qwen():
    # By hand: pairs turn 32 times in 32,768 positions at index 23.6 and once at 39.7,
    # and one of 17 steps between 23 and 40 takes 3/4 / 17 off the frequency.
    rope = parse(QWEN, head_dim=128).ropes[1]
    found = ratios(rope, 128)
    np.testing.assert_allclose(found[:24], 1)
    np.testing.assert_allclose(found[24:40], 1 - 0.75 / 17 * np.arange(1, 17))
    np.testing.assert_allclose(found[40:], 0.25)
    np.testing.assert_allclose(rope.attention_factor, 1.1386294361)


def test_bl38_ends_that_are_not_rounded():
    rope = parse(QWEN | {"truncate": False}, head_dim=128).ropes[0]
    turns = 32768 * np.array(Rope(1e6).inverse_frequencies(128)) / (2 * np.pi)
    divided = np.clip(np.log(32 / turns) / np.log(32), 0, 1)
    np.testing.assert_allclose(ratios(rope, 128), 1 - 0.75 * divided)


@pytest.mark.parametrize(
    ("changes", "first", "last"),
    [
        ({}, 10, 23),
        ({"beta_fast": 8.0}, 15, 23),
        ({"beta_slow": 4.0}, 10, 18),
        # 0.001 of a turn is past the last pair, whose index is held to the width.
        ({"beta_fast": 1e4, "beta_slow": 1e-4}, 0, 55),
        ({"beta_slow": 1e-6}, 10, 63),
    ],
)
def test_bl38_the_bounds_in_turns_are_those_in_pairs(changes, first, last):
    # 4,096 / (2 pi turns) is 10,000 to the power of pair / 32.
    short = {"factor": 4.0, "original_max_position_embeddings": 4096}
    rope = parse(short | changes, rope_theta=1e4, head_dim=64).ropes[0]
    divided = np.interp(np.arange(32), [first, last], [0, 1])
    np.testing.assert_allclose(ratios(rope, 64), 1 - 0.75 * divided)


@pytest.mark.parametrize(
    ("stated", "wanted"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"factor": 1.0}, 1.0),
        ({"attention_factor": 0.75}, 0.75),
        (
            {"mscale": 0.5, "mscale_all_dim": 1.5},
            (0.05 * math.log(4) + 1) / (0.15 * math.log(4) + 1),
        ),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
    ],
)
def test_the_attention_factor(stated, wanted):
    assert parse(QWEN | stated).ropes[0].attention_factor == pytest.approx(wanted)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2"])
def test_both_layouts_and_both_names_of_the_type_agree(family):
    theta = tiny_config(family)["rope_theta"]
    both = {"rope_type": "yarn", "type": "yarn", "rope_theta": theta} | EVERY_FIELD
    values = tiny_config(family, rope_theta=None, rope_parameters=both)
    new = parse_config(values, "config.json")
    older = {"rope_type": None, "type": "yarn"} | EVERY_FIELD
    assert new == parse(EVERY_FIELD, family) == parse(older, family)
    scaling = new.ropes[0].scaling
    assert isinstance(scaling, Yarn)
    assert (scaling.factor, scaling.original_positions) == (8.0, 64)
    assert (scaling.fast_turns, scaling.slow_turns) == (16.0, 2.0)
    assert scaling.truncate is False


def test_gemma3_scales_its_full_layers_only():
    ropes = parse(QWEN, "gemma3").ropes
    assert ropes[0] == Rope(1e4)
    assert isinstance(ropes[1].scaling, Yarn)


def test_the_context_is_what_yarn_makes_of_it():
    assert parse(QWEN, max_position_embeddings=32768).max_positions == 131072
    assert parse(QWEN, max_position_embeddings=262144).max_positions == 262144


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({"factor": None}, "factor` is missing"),
        ({"factor": 0.5}, "factor` is 0.5"),
        ({"factor": "4"}, "factor` is '4'"),
        ({"original_max_position_embeddings": None}, "embeddings` is missing"),
        ({"original_max_position_embeddings": 0}, "embeddings` is 0"),
        ({"original_max_position_embeddings": 64.0}, "embeddings` is 64.0"),
        ({"original_max_position_embeddings": 2**30}, "4294967296 positions"),
        ({"beta_fast": 0}, "beta_fast` is 0"),
        ({"beta_slow": -1.0}, "beta_slow` is -1"),
        ({"beta_fast": 2.0, "beta_slow": 3.0}, "beta_fast` is 2.0, .*`beta_slow`, 3"),
        ({"attention_factor": 0.0}, "attention_factor` is 0"),
        ({"attention_factor": math.nan}, "attention_factor` is nan"),
        ({"mscale": 1.0}, "come together"),
        ({"mscale_all_dim": 1.0}, "come together"),
        (
            {"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0},
            "without `attention_factor`",
        ),
        ({"mscale": True, "mscale_all_dim": 1.0}, "mscale` is True"),
        ({"truncate": 0}, "truncate` is 0"),
        ({"low_freq_factor": 1.0}, "unknown field `low_freq_factor`"),
        ({"finetuned": True}, "unknown field `finetuned`"),
    ],
)
def test_a_wrong_field_is_refused_by_name(changes, culprit):
    with pytest.raises(UserError, match=culprit) as caught:
        parse(QWEN | changes)
    assert "\n" not in str(caught.value)


def yarn_file(path, **changes):
    keys = {f"qwen2.rope.scaling.{n}": v for n, v in (YARN_KEYS | changes).items()}
    return write_tiny_gguf(path, tiny_config("qwen2"), changes=keys)


def test_gguf_keys_make_the_config_of_the_folder(tmp_path):
    scaling = {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
    }
    values = tiny_config("qwen2", rope_scaling=scaling)
    folder = open_checkpoint(write_hf_folder(tmp_path / "hf", values)).config
    file = open_checkpoint(yarn_file(tmp_path / "m")).config
    assert file.ropes == folder.ropes
    assert file.max_positions == folder.max_positions == 512


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({"factor": None}, "rope.scaling.factor` is missing"),
        ({"original_context_length": None}, "original_context_length` is missing"),
        ({"yarn_beta_slow": 17.0}, "yarn_beta_fast` is 16"),
        ({"yarn_log_multiplier": 0.1}, "yarn_log_multiplier` is not supported"),
        ({"yarn_ext_factor": 0.5}, "yarn_ext_factor` is not supported"),
        ({"attn_factor": 2.0}, "attn_factor` is 2"),
    ],
)
def test_gguf_keys_that_are_missing_or_change_the_maths_are_refused(
    tmp_path, changes, culprit
):
    assert_refused(yarn_file(tmp_path / "m", **changes), culprit)
