"""`jaxspec train`: the real command, from prompts to a head that drafts."""

import json
from pathlib import Path

import numpy as np
import pytest

import jaxspec
from jaxspec.cli.train_data import load_draft
from jaxspec.train.corpus import Corpus
from tests.checkpoints.writers import random_tensors, tiny_config, write_hf_folder
from tests.cli.test_generate import assert_refused, jaxspec_command
from tests.tokenizers_made import CHATML, write_folder

TEXT = "the cat sat on a mat and then it ran off to see if more was left"
FEW = ("--steps", "4", "--check-every", "2", "--batch-size", "4", "--depth", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random llama deep enough for EAGLE's taps."""
    folder = tmp_path_factory.mktemp("models") / "target"
    values = tiny_config("llama", vocab_size=512, num_hidden_layers=6)
    write_hf_folder(folder, values, tensors=random_tensors(values, 0))
    return str(write_folder(folder, jinja=CHATML))


@pytest.fixture(scope="module")
def texts(model, tmp_path_factory):
    """What it answered to twelve prompts."""
    folder = tmp_path_factory.mktemp("texts")
    prompts = folder / "prompts.jsonl"
    lines = [{"prompt": TEXT[at : at + 9]} for at in range(12)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ("--prompts", str(prompts), "--rows", "6", "--answer-tokens", "16")
    out = folder / "out"
    done = jaxspec_command("train", "data", "--model", model, *command, "--out", out)
    assert done.returncode == 0, done.stderr
    return str(out)


def test_texts_and_chats_that_are_given_are_kept(model, tmp_path):
    """Of a chat the last answer is learned, of a text all."""
    chat = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "sat on a mat"},
    ]
    lines = [{"text": TEXT}, {"messages": chat}, {"messages": [*chat, *chat]}]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = ("--texts", str(file), "--rows", "2", "--out", str(tmp_path / "out"))
    done = jaxspec_command("train", "data", "--model", model, *out)
    assert done.returncode == 0, done.stderr
    tokenizer = jaxspec.load(model).tokenizer
    corpus = Corpus.open(tmp_path / "out")
    parts = [corpus.texts(part) for part in range(len(corpus))]
    ids = [text.tolist() for texts in parts for text in texts.each()]
    starts = [int(start) for texts in parts for start in texts.starts]
    assert ids[0] == tokenizer.encode(TEXT) and starts[0] == 0
    answer = tokenizer.encode("sat on a mat", add_bos=False)
    for text, start in zip(ids[1:], starts[1:], strict=True):
        assert text[start : start + len(answer)] == answer
    assert ids[2][: len(ids[1])] == ids[1], "the second has the first before it"
    assert starts[2] > len(ids[1])


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ('{"text": 3}', 'line 1: expected an object with "text" or "messages"'),
        ('{"messages": [{"role": "user", "content": "a"}]}', "text 1: a chat to learn"),
        ('{"messages": []}', "text 1: a chat to learn from ends with"),
        ('{"text": ""}', "text 1: nothing to learn from within"),
        ("{", "line 1: not JSON"),
        ("", "no texts; expected one JSON object a line"),
    ],
)
def test_texts_that_teach_nothing_are_refused_by_their_line(
    model, tmp_path, line, part
):
    file = tmp_path / "texts.jsonl"
    file.write_text(line + "\n")
    out = ("--texts", str(file), "--out", str(tmp_path / "out"))
    assert_refused(jaxspec_command("train", "data", "--model", model, *out), part)


def train(kind, model, texts, out, *options):
    given = ("--model", model, "--data", texts, "--out", str(out))
    return jaxspec_command("train", kind, *given, *FEW, *options)


def test_a_head_is_trained_and_drafts(model, texts, tmp_path):
    head = tmp_path / "head"
    done = train("eagle", model, texts, head, "--draft-vocabulary", "64", "--plot")
    assert (head / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    checks = [line for line in done.stderr.splitlines() if line.startswith("step ")]
    assert len(checks) == 2
    assert "tokens per round" in checks[-1]
    assert (tmp_path / "head" / "metrics.jsonl").read_text().count("\n") == 4
    ask = (
        "generate",
        "--model",
        model,
        "--prompt",
        "the cat",
        "--max-new-tokens",
        "16",
    )
    drafted, plain = (
        jaxspec_command(*ask, "--drafter", drafter)
        for drafter in (f"eagle:{tmp_path / 'head'}", "none")
    )
    assert drafted.returncode == 0, drafted.stderr
    assert drafted.stdout == plain.stdout != ""
    card = json.loads((tmp_path / "head" / "drafter.json").read_text())
    assert card["kind"] == "eagle" and card["target"] == model
    assert card["held_out"]["sampled_tokens_per_round"] >= 1
    assert len(card["target_sha256"]) == 64
    # Again: it is done, and nothing is trained a second time.
    again = train("eagle", model, texts, tmp_path / "head", "--draft-vocabulary", "64")
    assert again.returncode == 0
    assert "step " not in again.stderr
    other = train("eagle", model, texts, tmp_path / "head", "--seed", "1")
    assert_refused(other, "training.json", "`seed` is 0, but 1 is asked for")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["data", "--out", "x"], ["give one of --tokens, --prompts and --texts"]),
        (["data", "--out", "x", "--tokens", "0"], ["--tokens is 0, expected 1 or"]),
        (["eagle", "--data", "nowhere", "--out", "x"], ["nowhere: holds no training"]),
        (
            ["medusa", "--data", "x", "--out", "x", "--learning-rate", "2"],
            ["--learning-rate is 2.0, expected a number from 0 to 1"],
        ),
        (
            ["medusa", "--data", "x", "--out", "x", "--steps", "0"],
            ["--steps is 0, expected 1 or more"],
        ),
        (["early-exit", "--data", "x", "--out", "x"], ["required: --layers"]),
        (
            ["draft", "--data", "x", "--out", "x", "--layers", "a"],
            ["'a' is no list of layers such as 0,29"],
        ),
        (["heads"], ["invalid choice: 'heads'"]),
    ],
    ids=lambda value: value[0] if value[0].isalpha() else "",
)
def test_a_mistake_is_named_before_anything_is_loaded(options, parts):
    assert_refused(jaxspec_command("train", *options), *parts)


def test_texts_of_another_model_teach_nothing(texts, tmp_path):
    values = tiny_config("llama", vocab_size=512, num_hidden_layers=6)
    write_hf_folder(tmp_path, values, tensors=random_tensors(values, 1))
    other = str(write_folder(tmp_path, jinja=CHATML))
    done = train("medusa", other, texts, tmp_path / "head")
    assert_refused(done, "these texts are of", "let it write its own")


CUT = ("--draft-vocabulary", "64", "--layers", "0,5")


@pytest.fixture(scope="module")
def draft(model, texts, tmp_path_factory):
    out = tmp_path_factory.mktemp("draft")
    done = train("draft", model, texts, out, *CUT)
    assert done.returncode == 0, done.stderr
    return str(out)


def test_a_cut_draft_is_trained_and_drafts(model, texts, draft, tmp_path):
    ask = ("generate", "--model", model, "--prompt", "the cat")
    drafted, plain = (
        jaxspec_command(*ask, "--max-new-tokens", "16", "--drafter", drafter)
        for drafter in (f"draft:{draft}", "none")
    )
    assert drafted.returncode == 0, drafted.stderr
    assert drafted.stdout == plain.stdout != ""
    nowhere = train("draft", model, texts, tmp_path / "x", *CUT, "--from", "nowhere")
    assert_refused(nowhere, "nowhere: holds no config.json of what `jaxspec")
    beyond = train("draft", model, texts, tmp_path / "x", "--layers", "0,6")
    assert_refused(beyond, "draft model of the layers [0, 6], expected one or more")


def test_a_draft_goes_on_with_what_it_writes_itself(model, texts, draft, tmp_path):
    """Every other answer is greedy."""
    prompts, own = Path(texts).parent / "prompts.jsonl", tmp_path / "own"
    command = ("--prompts", str(prompts), "--rows", "6", "--answer-tokens", "16")
    command += ("--out", str(own), "--writer", draft)
    done = jaxspec_command("train", "data", "--model", model, *command)
    assert done.returncode == 0, done.stderr
    target = jaxspec.load(model)
    itself = jaxspec.Generator(load_draft(target, draft))
    part = Corpus.open(own).texts(0)
    for text, start in list(zip(part.each(), part.starts, strict=True))[::2]:
        given = text[:start].tolist()
        assert (
            itself.generate(given, max_new_tokens=16).token_ids == text[start:].tolist()
        )
    theirs = Corpus.open(texts).texts(0)
    assert not np.array_equal(part.tokens, theirs.tokens)
    options = (*CUT, "--from", draft)
    assert train("draft", model, str(own), tmp_path / "on", *options).returncode == 0
    nobody = jaxspec_command("train", "data", "--model", model, *command[:-1], "nobody")
    assert_refused(nobody, "nobody: holds no config.json")


@pytest.mark.parametrize(
    ("layers", "part"),
    [
        ("6", "the exit is after 6 layers, expected 1 to 5"),
        ("99", "the exit is after 99 layers, expected 1 to 5"),
        ("0", "--layers is 0, expected 1 or more"),
    ],
)
def test_an_exit_that_cannot_be_is_refused_before_texts_are_read(
    model, texts, tmp_path, layers, part
):
    done = train("early-exit", model, texts, tmp_path / "head", "--layers", layers)
    assert_refused(done, part)
