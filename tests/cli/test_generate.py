"""`jaxspec generate` and `jaxspec demo`: the real command on the default model."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

import jaxspec
from jaxspec.cli import generate, main
from jaxspec.cli.options import make_generator
from tests import models_on_disk
from tests.checkpoints.writers import random_tensors, tiny_config, write_hf_folder
from tests.tokenizers_made import CHATML, write_folder

MODEL = "smollm2-135m-instruct"
COUNTING = "1 2 3 4 1 2 3 4 1 2 3 4 1 2 3"


def jaxspec_command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "jaxspec.cli.main", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "100"},
    )


def assert_refused(run, *parts):
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.startswith("jaxspec")
    assert run.stderr.count("\n") == 1, run.stderr
    assert "Traceback" not in run.stderr
    for part in parts:
        assert part in run.stderr


def write_model(folder, seed=0):
    """A tiny random llama with a tokenizer, as a Hugging Face folder."""
    values = tiny_config("llama", vocab_size=512)
    write_hf_folder(folder, values, tensors=random_tensors(values, seed))
    return str(write_folder(folder, jinja=CHATML))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def draft_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "draft", seed=1)


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    records = [
        {"prompt": COUNTING},
        {"messages": [{"role": "user", "content": "Say hello."}]},
        {"prompt": [70, 300, 82]},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def runs(model_path, draft_path, prompts_file):
    """The same prompts with and without speculation, as JSON."""

    def run(*drafting):
        done = jaxspec_command(
            *("generate", "--model", model_path, "--prompts", str(prompts_file)),
            *("--max-new-tokens", "24", "--batch-size", "3", "--json", *drafting),
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return {
        "plain": run("--drafter", "none"),
        "lookup": run("--drafter", "prompt-lookup", "--draft-tokens", "3"),
        "itself": run("--draft-model", model_path, "--draft-tokens", "3"),
        "exit, tree": run("--drafter", "early-exit:1", "--tree", "2,1,1"),
        "dynamic tree": run(
            *("--draft-model", draft_path, "--tree", "dynamic:depth=3,topk=2,nodes=6")
        ),
    }


def test_one_object_a_prompt_and_nothing_else(runs):
    stats = {field.name for field in dataclasses.fields(jaxspec.Stats)}
    for records in runs.values():
        assert len(records) == 3
        for record in records:
            assert list(record) == [
                *("prompt", "text", "token_ids", "finish_reason", "stats")
            ]
            assert set(record["stats"]) == stats
            assert record["finish_reason"] in ("eos", "length")
            assert 0 < len(record["token_ids"]) <= 24
            assert record["stats"]["compile_seconds"] > 0
            assert record["stats"]["decode_seconds"] > 0


def test_speculation_changes_no_token(runs):
    for name, records in runs.items():
        for record, plain in zip(records, runs["plain"], strict=True):
            assert record["token_ids"] == plain["token_ids"]
            if name == "itself":
                assert record["stats"]["acceptance_rate"] == 1.0
            if name != "plain":
                assert len(record["stats"]["accepted_by_position"]) == 3
    drafted = {
        name: sum(record["stats"]["drafted"] for record in records)
        for name, records in runs.items()
    }
    assert drafted.pop("plain") == 0 and min(drafted.values()) > 0


def test_text_is_the_ids_decoded(runs, model_path):
    tokenizer = jaxspec.load(model_path).tokenizer
    for record in runs["lookup"]:
        assert record["text"] == tokenizer.decode(record["token_ids"])


def test_demo_shows_the_gain():
    models_on_disk.path(MODEL)
    run = jaxspec_command("demo", "--max-new-tokens", "24")
    assert run.returncode == 0, run.stderr
    for part in ("tokens/s", "tokens per round", "acceptance rate", "same tokens"):
        assert part in run.stdout
    same = next(line for line in run.stdout.splitlines() if "same tokens" in line)
    assert same.count("yes") == 3 and "NO" not in same


SEVERAL = ["--temperature", "-1", "--top-p", "1.5", "--max-new-tokens", "-3"]
BAD = {
    "unknown model": (["--model", "smolm"], "smolm"),
    "no such file": (["--model", "./nowhere.gguf"], "nowhere.gguf"),
    "temperature": (["--temperature", "nan"], "temperature is nan"),
    "all at once": (
        SEVERAL,
        "temperature is -1.0",
        "top_p is 1.5",
        "max_new_tokens is",
    ),
    "k": (["--draft-tokens", "0"], "--draft-tokens is 0, expected 1 or more"),
    "k without a draft": (
        ["--drafter", "none", "--draft-tokens", "3"],
        "--draft-tokens has no effect with --drafter none",
    ),
    "two drafters": (
        ["--drafter", "prompt-lookup", "--draft-model", MODEL],
        "not allowed with argument",
    ),
    "tree of what": (["--tree", "4,x"], "'4,x' is no list of whole numbers"),
    "tree of nothing": (["--draft-model", MODEL, "--tree", "2,0"], "tree is (2, 0)"),
    "tree too large": (["--draft-model", MODEL, "--tree", "99,9"], "tree has 990"),
    "dynamic tree of nothing": (
        ["--draft-model", MODEL, "--tree", "dynamic:depth=2,topk=2,nodes=9"],
        "nodes is 9, expected 2 (the depth) to 6",
    ),
    "dynamic tree without a model": (
        ["--drafter", "early-exit:3", "--tree", "dynamic:depth=2,topk=2,nodes=3"],
        "a dynamic tree needs a draft model or eagle, draft to draft it",
    ),
    "tree without a model": (["--tree", "2,1"], "a tree needs a draft model or early"),
    "tree of nobody": (
        ["--drafter", "none", "--tree", "2,1"],
        "--tree has no effect with --drafter none",
    ),
    "eagle of nothing": (["--drafter", "eagle:"], "'eagle:', expected auto, "),
    "block and a tree": (
        [
            "--model",
            "nowhere",
            "--draft-model",
            MODEL,
            "--tree",
            "2,1",
            "--rule",
            "block",
        ],
        "rule block takes chains, but a tree of 4 nodes",
    ),
    "unknown drafter": (["--drafter", "magic"], "drafter is 'magic', expected"),
    "no layer": (
        ["--drafter", "early-exit:0"],
        "drafter is 'early-exit:0', expected early-exit:1 to early-exit:29",
        "has 30 layers",
    ),
    "tree and k": (
        ["--draft-model", MODEL, "--tree", "2,1", "--draft-tokens", "3"],
        "--draft-tokens and --tree are both given",
    ),
    "batch size": (["--batch-size", "0"], "batch_size is 0"),
    "not a number": (["--top-k", "many"], "invalid int value: 'many'"),
    "unknown flag": (["--turbo"], "unrecognized arguments: --turbo"),
}


@pytest.mark.parametrize(
    "arguments, parts", [(a, p) for a, *p in BAD.values()], ids=BAD
)
def test_a_mistake_is_one_line_and_code_2(arguments, parts):
    assert_refused(jaxspec_command("generate", "--prompt", "Hi", *arguments), *parts)


def test_a_corrupt_model_is_refused(tmp_path):
    write_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    run = jaxspec_command("generate", "--model", str(tmp_path), "--prompt", "Hi")
    assert_refused(run, "model.safetensors")


def test_another_tokenizer_is_refused(model_path, tmp_path):
    write_model(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["h"], vocab["i"] = vocab["i"], vocab["h"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    run = jaxspec_command(
        *("generate", "--model", model_path, "--draft-model", str(tmp_path)),
        *("--prompt", "Hi"),
    )
    first = min(vocab["h"], vocab["i"])
    assert_refused(run, f"tokenizers differ, first at id {first}", "'h'", "'i'")


def test_an_empty_prompt_without_bos_is_refused(model_path):
    run = jaxspec_command("generate", "--model", model_path, "--prompt", "")
    assert_refused(run, "prompt 0 is empty", "no BOS token")


def test_a_prompt_longer_than_the_model_is_refused(model_path):
    run = jaxspec_command("generate", "--model", model_path, "--prompt", "9" * 300)
    assert_refused(run, "prompt 0 has", "takes at most 255")


LINES = {
    "not json": ('{"prompt": "ok"}\n{"prompt": \n', "line 2", "not JSON"),
    "no prompt": (
        '{"prompt": "ok"}\n\n{"text": "x"}\n',
        "line 3",
        "expected an object",
    ),
    "not an object": ("3\n", "line 1"),
    "empty": ("\n\n", "no prompts"),
}


@pytest.mark.parametrize("text, parts", [(t, p) for t, *p in LINES.values()], ids=LINES)
def test_a_broken_prompt_file_is_named_by_line(tmp_path, text, parts):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    assert_refused(
        jaxspec_command("generate", "--prompts", str(path)), str(path), *parts
    )


def test_a_missing_prompt_file_is_named(tmp_path):
    path = str(tmp_path / "none.jsonl")
    assert_refused(jaxspec_command("generate", "--prompts", path), path, "No such file")


def parse(*arguments):
    return main.build_parser().parse_args(["generate", "--prompt", "x", *arguments])


@pytest.mark.parametrize(
    "flag, name, values",
    [
        ("--max-new-tokens", "max_new_tokens", (3, 5)),
        ("--temperature", "temperature", (0.5, 1.5)),
        ("--top-p", "top_p", (0.5, 0.9)),
        ("--top-k", "top_k", (1, 7)),
        ("--min-p", "min_p", (0.1, 0.2)),
        ("--seed", "seed", (1, 2)),
        ("--batch-size", "batch_size", (1, 2)),
    ],
)
def test_bl69_every_flag_reaches_the_call(monkeypatch, flag, name, values):
    seen = []

    class Recorder:
        def iterate(self, prompts, **options):
            seen.append(options)
            return iter(())

    monkeypatch.setattr(generate, "make_generator", lambda *_, **__: Recorder())
    for value in values:
        args = parse(flag, str(value))
        assert args.run(args) == 0
    assert [options[name] for options in seen] == list(values)


def test_bl69_the_model_flags_reach_the_generator(monkeypatch):
    from tests import fakes

    loaded = []

    def load(reference, dtype, *where, **how):
        loaded.append((reference, dtype))
        return jaxspec.LanguageModel(reference, fakes.tiny(1))

    monkeypatch.setattr("jaxspec.cli.options.load", load)
    draft = ("--model", "a", "--draft-model", "b", "--dtype", "bfloat16")
    generator = make_generator(parse(*draft, "--draft-tokens", "2"), capacity=64)
    assert loaded == [("a", "bfloat16"), ("b", "bfloat16")]
    assert generator.drafter.nodes == 2 and generator.capacity == 64
    assert (
        make_generator(parse("--model", "a", "--draft-tokens", "5")).drafter.nodes == 5
    )
    assert make_generator(parse("--drafter", "none")).drafter.nodes == 0
    assert loaded[-1] == (MODEL, "float32")


def test_capacity_reaches_the_generator(monkeypatch):
    seen = []

    def stop(args, **options):
        seen.append(options["capacity"])
        raise jaxspec.UserError("stop")

    monkeypatch.setattr(generate, "make_generator", stop)
    for capacity in ("64", "128"):
        with pytest.raises(jaxspec.UserError):
            args = parse("--capacity", capacity)
            args.run(args)
    assert seen == [64, 128]


def test_chat_makes_a_user_message():
    args = parse("--chat")
    assert generate._prompts(args) == [[{"role": "user", "content": "x"}]]
    assert generate._prompts(parse()) == ["x"]


@pytest.mark.parametrize("verb", [[], ["generate"], ["demo"], ["fetch"]])
def test_help_has_examples(verb):
    run = jaxspec_command(*verb, "--help")
    assert run.returncode == 0
    assert "examples:" in run.stdout
