"""`jaxspec certify`: the real command on tiny models."""

import json

import pytest

from jaxspec.certify.certificate import OPTION_SETS, TOGETHER
from jaxspec.cli.certify import PROMPTS
from tests.cli.test_generate import assert_refused, jaxspec_command, write_model

SMALL = ("--samples", "500", "--batch-size", "64", "--max-new-tokens", "8")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def draft_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "draft", seed=1)


def certify(*arguments):
    return jaxspec_command("certify", *arguments, *SMALL)


@pytest.mark.full
def test_a_good_pair_gets_one_json_object_and_exit_code_0(model_path, draft_path):
    pair = ("--model", model_path, "--draft-model", draft_path, "--draft-tokens", "2")
    run = certify(*pair, "--json")
    assert run.returncode == 0, run.stderr + run.stdout
    report = json.loads(run.stdout)
    assert report["passed"] is True and report["failures"] == []
    assert report["identity"]["prompts"] == len(PROMPTS)
    assert report["identity"]["differences"] == 0
    assert 0 < report["identity"]["delta"] < report["identity"]["smallest_gap"]
    assert [test["options"] for test in report["tests"]] == [
        *OPTION_SETS,
        TOGETHER,
    ]
    for test in report["tests"]:
        assert [each["verified"] >= 500 for each in test["positions"]] == [True] * 2
    assert report["tests"][-1]["samples"] == 500 * len(OPTION_SETS)


@pytest.mark.full
def test_what_is_untested_is_named_in_the_table_and_gives_exit_code_1(model_path):
    """A random model does not go on as its prompt repeats, so the lookup finds no more
    than the prompt's own draft."""
    run = certify("--model", model_path, "--rule", "block")
    assert run.returncode == 1
    assert "rule block" in run.stdout and "delta" in run.stdout
    assert "temperature 1.3" in run.stdout and "smallest gap" in run.stdout
    assert "position 2 is untested" in run.stdout
    assert run.stdout.rstrip().endswith("certificate: FAILED")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--drafter", "none"), "nothing to certify"),
        (("--tree", "2,1"), "certify tests chains"),
        (("--rule", "typical"), "typical does not keep the target's distribution"),
        (("--samples", "20"), "samples is 20, expected a whole number from 500 on"),
        (("--batch-size", "0"), "batch_size is 0"),
        (("--prompts", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--rule", "magic"), "magic"),
        (("--max-new-tokens", "0"), "max_new_tokens is 0"),
        (("--seed", "-1"), "seed is -1"),
        (("--dtype", "bfloat16"), "dtype is bfloat16, expected float32"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(model_path, arguments, part):
    command = ("certify", "--model", model_path, *arguments)
    assert_refused(jaxspec_command(*command), part)
