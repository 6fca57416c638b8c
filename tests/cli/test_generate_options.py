"""The options of `jaxspec generate` in one process: what they reach and refuse."""

import json

import numpy as np
import pytest

import jaxspec
from jaxspec.cli import generate, main
from jaxspec.core.accept import RULES
from jaxspec.row_options import OPTIONS
from jaxspec.tokenizer import Tokenizer
from tests import fakes, quick, tokenizers_made

VOCAB = 400
INF = float("inf")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tokenizers_made.write_folder(tmp_path_factory.mktemp("tokenizer"))
    tokenizer = Tokenizer.from_folder(folder)
    return jaxspec.LanguageModel(
        "tiny", fakes.tiny(1, layers=1, vocab=VOCAB), tokenizer
    )


@pytest.fixture
def command(monkeypatch, capsys, model):
    """Runs the command on a tiny model; gives exit code, lines of stdout and stderr."""
    monkeypatch.setattr("jaxspec.cli.options.load", lambda *_, **__: model)

    def command(*arguments):
        with quick.generators():
            try:
                code = main.main(["generate", *arguments])
            except SystemExit as error:
                code = error.code
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return command


@pytest.fixture
def asked(monkeypatch, command):
    """What the generator is asked for, without running it."""
    seen = []

    class Recorder:
        def iterate(self, prompts, **options):
            seen.append(options)
            return iter(())

    monkeypatch.setattr(generate, "make_generator", lambda *_, **__: Recorder())

    def asked(*arguments):
        assert command("--prompt", "x", *arguments) == (0, [], [])
        return seen.pop()

    return asked


# By the name of the call's option: the flags, and what they must become.
REACH = {
    "min_new_tokens": {"--min-new-tokens 3": 3, "--min-new-tokens 5": 5, "": None},
    "repetition_penalty": {
        "--repetition-penalty 1.5": 1.5,
        "--repetition-penalty 0.5": 0.5,
        "": None,
    },
    "presence_penalty": {
        "--presence-penalty 0.5": 0.5,
        "--presence-penalty -0.5": -0.5,
        "": None,
    },
    "frequency_penalty": {
        "--frequency-penalty 1": 1.0,
        "--frequency-penalty -2": -2.0,
        "": None,
    },
    "logit_bias": {
        "--logit-bias 5=1.5": {5: 1.5},
        "--logit-bias 5=-2 --logit-bias 7=-inf": {5: -2.0, 7: -INF},
        "": None,
    },
    "banned_sequences": {
        "--ban-ids 5": [[5]],
        "--ban-ids 5,6,7 --ban-ids 8": [[5, 6, 7], [8]],
        "": None,
    },
    "stop_sequences": {
        "--stop-ids 5": [[5]],
        "--stop-ids 5,6 --stop-ids 8": [[5, 6], [8]],
        "": None,
    },
    "stop": {"--stop a": ["a"], "--stop a --stop bc": ["a", "bc"], "": None},
    "include_stop": {"--stop a --include-stop": True, "--stop a": False},
    "log_probs": {
        "--json --log-probs 0": 0,
        "--json --log-probs 5": 5,
        "--json": None,
    },
    "temperature": {"--temperature 0.5": 0.5, "--temperature 2": 2.0, "": 0.0},
    "top_k": {"--top-k 5": 5, "--top-k 0": 0, "": None},
    "top_p": {"--top-p 0.5": 0.5, "--top-p 1": 1.0, "": None},
    "min_p": {"--min-p 0.5": 0.5, "--min-p 0": 0.0, "": None},
    "max_new_tokens": {"--max-new-tokens 5": 5, "--max-new-tokens 0": 0, "": 128},
    "seed": {"--seed 5": 5, "--seed 18446744073709551615": 2**64 - 1, "": 0},
    "batch_size": {"--batch-size 5": 5, "--batch-size 1": 1, "": None},
}


def test_every_option_of_the_call_has_a_flag(asked):
    assert set(asked()) == set(REACH) >= set(OPTIONS)


@pytest.mark.parametrize("name", REACH)
def test_bl69_every_flag_reaches_the_call(asked, name):
    for flags, value in REACH[name].items():
        found = asked(*flags.split())
        assert found[name] == value and type(found[name]) is type(value)
        others = {**asked(), **{n: found[n] for n in ("include_stop", "stop")}}
        assert {**found, name: None} == {**others, name: None}


def test_bl69_the_rule_reaches_the_generator(monkeypatch, model):
    from jaxspec.cli.options import make_generator

    monkeypatch.setattr("jaxspec.cli.options.load", lambda *_, **__: model)
    parse = main.build_parser().parse_args
    for rule in RULES:
        args = parse(["generate", "--prompt", "x", "--rule", rule])
        assert make_generator(args).rule is RULES[rule]
    assert make_generator(parse(["generate", "--prompt", "x"])).rule.name == "rejection"
    args = parse(["generate", "--prompt", "x", "--drafter", "none"])
    assert make_generator(args).rule.name == "rejection"


MISTAKES = {
    "--rule magic": "invalid choice: 'magic'",
    "--rule coupled --drafter none": "--rule has no effect with --drafter none",
    "--log-probs 3": "--log-probs are shown with --json only",
    "--include-stop": "--include-stop has no effect without --stop",
    "--include-stop --stop-ids 5": "--include-stop has no effect without --stop",
    "--json --log-probs -1": "log_probs is -1, expected a whole number from 0 to 100",
    "--json --log-probs 101": "log_probs is 101",
    "--json --log-probs many": "invalid int value: 'many'",
    "--min-new-tokens -1": "min_new_tokens is -1, expected",
    "--min-new-tokens 9 --max-new-tokens 8": "min_new_tokens is 9, over max_new_tokens",
    "--repetition-penalty 0": "repetition_penalty is 0.0, expected a number over 0",
    "--repetition-penalty nan": "repetition_penalty is nan",
    "--presence-penalty inf": "presence_penalty is inf, expected",
    "--frequency-penalty much": "invalid float value: 'much'",
    "--logit-bias 5": "'5' is no id and bias, such as 13=-2.5",
    "--logit-bias a=1": "'a=1' is no id and bias",
    "--logit-bias 5=": "'5=' is no id and bias",
    "--logit-bias 5=nan": "logit_bias is {5: nan}, expected a mapping",
    "--logit-bias 5=inf": "logit_bias is {5: inf}, expected a mapping",
    "--logit-bias=-5=1": "logit_bias is {-5: 1.0}, expected a mapping",
    "--logit-bias 400=1": "logit_bias names id 400, outside the 400 known ids",
    "--logit-bias 5=1 --logit-bias 5=2": "--logit-bias names an id more than once",
    "--ban-ids ,": "',' is no list of ids, such as 13 or 13,198",
    "--ban-ids 1,x": "'1,x' is no list of ids",
    "--ban-ids=-1": "banned_sequences is [[-1]], expected a list of sequences",
    "--ban-ids 399,400": "banned_sequences names id 400, outside the 400 known ids",
    "--stop-ids 400": "stop_sequences names id 400",
    "--stop-ids 1.5": "'1.5' is no list of ids",
    "--stop=": "stop is [''], expected a text or a list of texts, none empty",
    "--temperature 1e39": "temperature is 1e+39, expected a number from 0",
    "--min-p 2": "min_p is 2.0, expected a number from 0 to 1",
    "--seed 18446744073709551616": "seed is 18446744073709551616, expected",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_is_one_line_and_code_2(command, flags):
    code, out, err = command("--prompt", "x", *flags.split())
    assert (code, out) == (2, []) and len(err) == 1
    assert err[0].startswith("jaxspec") and MISTAKES[flags] in err[0]


PROMPT = ("--prompt", "hello world 12 hello world 12 hello", "--json")
SAMPLED = ("--temperature", "1", "--seed", "7", "--max-new-tokens", "40")


def test_coupled_writes_what_plain_decoding_writes(command):
    """And the JSON has log-probabilities only where they are asked for."""
    code, [line], err = command(*PROMPT, *SAMPLED, "--drafter", "none")
    assert (code, err) == (0, [])
    plain = json.loads(line)
    flags = "--draft-model itself --draft-tokens 3 --rule coupled --log-probs 2"
    code, [line], err = command(*PROMPT, *SAMPLED, *flags.split())
    assert (code, err) == (0, [])
    coupled = json.loads(line)
    assert coupled["token_ids"] == plain["token_ids"]
    assert coupled["text"] == plain["text"] and len(plain["token_ids"]) == 40
    assert coupled["stats"]["drafted"] > 0 == plain["stats"]["drafted"]
    # Draft and target draw with the same noise.
    assert coupled["stats"]["acceptance_rate"] == 1.0
    names = ["prompt", "text", "token_ids", "finish_reason", "stats"]
    assert list(plain) == names and list(coupled) == [*names, "log_probs"]
    found = coupled["log_probs"]
    assert len(found["raw"]) == len(found["warped"]) == len(found["alternatives"]) == 40
    np.testing.assert_allclose(found["raw"], found["warped"], atol=1e-5)
    for raw, likeliest in zip(found["raw"], found["alternatives"], strict=True):
        assert [set(each) for each in likeliest] == [{"id", "raw"}] * 2
        assert likeliest[0]["raw"] >= max(likeliest[1]["raw"], raw)


def test_a_row_that_ends_in_error_is_told_and_gives_code_1(command, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    every = [f"--ban-ids={token}" for token in range(VOCAB - 1)]
    # The last id is left, but not after itself, and row 1 begins with it.
    prompts.write_text(f'{{"prompt": [5, 6]}}\n{{"prompt": [{VOCAB - 1}]}}\n')
    last = f"--ban-ids={VOCAB - 1},{VOCAB - 1}"
    code, out, err = command(
        *("--prompts", str(prompts), "--json", "--drafter", "none"), *every, last
    )
    assert code == 1
    first, second = map(json.loads, out)
    assert first["token_ids"] == [VOCAB - 1] and second["token_ids"] == []
    assert first["finish_reason"] == second["finish_reason"] == "error"
    assert len(err) == 2
    for row, (line, count) in enumerate(zip(err, (1, 0), strict=True)):
        assert line.startswith(f"jaxspec: prompt {row} ended in error after {count} ")
        assert "rule every id out" in line
