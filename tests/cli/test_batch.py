"""`jaxspec batch`: whole jobs of the real command, and what it refuses."""

import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import pytest

import jaxspec
from jaxspec.cli import batch, main
from tests.batch import jobs

LINES = (
    '{"prompt": [70, 300, 82]}',
    '{"prompt": [1, 2',
    "",
    '{"prompt": [5, 6, 7, 8, 5, 6, 7, 8]}',
    '{"messages": [{"role": "user", "content": "hello"}]}',
    '{"prompt": [9999]}',
    '{"prompt": "hello world 2024"}',
)
JOB = """\
model: {models}/target
draft_model: {models}/draft
draft_tokens: 3
topology: v5e:2x4
batch_size: 2
capacity: 256
max_new_tokens: 9
temperature: 1.0
seed: 3
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    jobs.write_model(folder / "target")
    jobs.write_model(folder / "draft", noise=0.03)
    return folder


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory):
    """A finished job: its folder, its arguments and what it said."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "in.jsonl").write_text("\n".join(LINES))
    (folder / "job.yaml").write_text(JOB.format(models=models))
    arguments = (
        *("batch", str(folder / "job.yaml"), "--platform", "cpu"),
        *("--input", str(folder / "in.jsonl"), "--output", str(folder / "OUT.jsonl")),
        *("--max-new-tokens", "16", "--seed", "9"),
    )
    programs = tmp_path_factory.getbasetemp() / "programs"
    with jobs.jobs(programs) as begin:
        return folder, arguments, jobs.finished(begin(*arguments[1:]))


def test_every_line_has_its_record_in_order(whole, models):
    folder, _, (out, err) = whole
    output = folder / "OUT.jsonl"
    assert out == ""
    assert err == f"jaxspec: 6 records in {output}, 2 of them errors\n"
    records = jobs.records_of(output)
    names = ["index", "prompt", "text", "token_ids", "finish_reason", "stats"]
    assert [record["index"] for record in records] == [*range(6)]
    given = [json.loads(line) for line in LINES if line and line != LINES[1]]
    prompts = [each.get("prompt", each.get("messages")) for each in given]
    assert [record["prompt"] for record in records] == [prompts[0], None, *prompts[1:]]
    tokenizer = jaxspec.load(models / "target").tokenizer
    for index in (0, 2, 3, 5):
        record = records[index]
        assert list(record) == names
        assert record["finish_reason"] in ("length", "eos")
        assert 0 < len(record["token_ids"]) <= 16
        assert record["text"] == tokenizer.decode(record["token_ids"])
        assert 0 < record["stats"]["acceptance_rate"] <= 1
        assert len(record["stats"]["accepted_by_position"]) == 3
    lengths = [len(record["token_ids"]) for record in records]
    assert max(lengths) == 16 and len({str(r["token_ids"]) for r in records}) == 5
    for index, part in ((1, "in.jsonl line 2: not JSON"), (4, "id 9999 is outside")):
        assert list(records[index]) == [*names, "error"]
        assert part in records[index]["error"]
        assert records[index]["finish_reason"] == "error"


@pytest.mark.full
def test_the_tokens_are_those_of_generate(whole, models):
    folder, _, _ = whole
    for index, line in enumerate(line for line in LINES if line):
        record = jobs.records_of(folder / "OUT.jsonl")[index]
        if "error" in record:
            continue
        (folder / "one.jsonl").write_text(line)
        done = subprocess.run(
            [
                *(sys.executable, "-m", "jaxspec.cli.main", "generate", "--json"),
                *("--prompts", str(folder / "one.jsonl"), "--draft-tokens", "3"),
                *("--model", str(models / "target"), "--temperature", "1"),
                *("--draft-model", str(models / "draft"), "--seed", str(9 + index)),
                *("--max-new-tokens", "16", "--capacity", "256"),
            ],
            env=os.environ | {"XLA_FLAGS": jobs.QUICK},
            capture_output=True,
            check=True,
        )
        assert json.loads(done.stdout)["token_ids"] == record["token_ids"]


@pytest.fixture
def no_model(monkeypatch):
    """Whoever reads a model fails."""

    def read(*_, **__):
        raise AssertionError("a model was read")

    monkeypatch.setattr(batch, "make_generator", read)


def call(capsys, *arguments):
    """The exit code of the command in this process, and its stderr."""
    try:
        code = main.main(arguments)
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    assert out == ""
    return code, err


def assert_refused(outcome, *parts):
    code, err = outcome
    assert code == 2
    assert err.startswith("jaxspec") and err.count("\n") == 1, err
    assert [part for part in parts if part not in err] == [], err


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# What `--platform cpu` sets cannot be set in a process that has computed.
def here(arguments):
    return [each for each in arguments if each not in ("--platform", "cpu")]


def on_any_device(folder):
    text = (folder / "job.yaml").read_text()
    (folder / "job.yaml").write_text(text.replace("topology: v5e:2x4\n", ""))


@pytest.fixture
def again(whole, tmp_path):
    """The finished job in a folder of its own: that, and its arguments."""
    folder, arguments, _ = whole
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    on_any_device(tmp_path)
    return tmp_path, [each.replace(str(folder), str(tmp_path)) for each in arguments]


def test_a_finished_job_is_not_done_again(again, no_model, capsys):
    folder, arguments = again
    before = contents(folder)
    code, err = call(capsys, *here(arguments))
    assert code == 0
    assert err == f"jaxspec: {folder}/OUT.jsonl is finished\n"
    assert contents(folder) == before


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize(
    "option, name",
    [
        (("--seed", "10"), "`seed` is 9, but 10"),
        (("--temperature", "0"), "`temperature` is 1.0, but 0.0"),
        (("--batch-size", "3"), "`batch_size` is 2, but 3"),
        (("--draft-tokens", "2"), "`draft_tokens` is 3, but 2"),
        (("--drafter", "prompt-lookup"), "`drafter` is null, but"),
        (("--rule", "block"), "`rule` is null, but"),
        (("--chat",), "`chat` is false, but true"),
    ],
)
def test_another_option_is_another_job(
    again, no_model, capsys, option, name, is_finished
):
    folder, arguments = again
    if not is_finished:
        (folder / "OUT.jsonl").unlink()
    before = contents(folder)
    assert_refused(call(capsys, *here(arguments), *option), name, "ask for the same")
    assert contents(folder) == before


def test_before_the_first_record_options_can_be_changed(again, no_model, capsys):
    folder, arguments = again
    (folder / "OUT.jsonl").unlink()
    refused = call(capsys, *here(arguments), "--batch-size", "3")
    assert_refused(refused, "or delete that file: no record was kept yet")
    (folder / "OUT.jsonl.part-00001-of-00002").write_text("{")
    refused = call(capsys, *here(arguments), "--batch-size", "3")
    assert_refused(refused, "or choose another output")


def test_another_input_is_another_job(again, no_model, capsys):
    folder, arguments = again
    (folder / "OUT.jsonl").unlink()
    with (folder / "in.jsonl").open("a") as file:
        file.write('\n{"prompt": [3]}')
    assert_refused(call(capsys, *here(arguments)), "`input_sha256` is")


def test_an_output_that_is_another_file_is_not_touched(again, no_model, capsys):
    folder, arguments = again
    for name in ("OUT.jsonl.job.json", "OUT.jsonl.merged.json"):
        (folder / name).unlink()
    (folder / "OUT.jsonl").write_text("mine")
    before = contents(folder)
    assert_refused(call(capsys, *here(arguments)), "is not what this job wrote")
    assert contents(folder) == before


def test_a_merge_is_of_the_same_job(again, no_model, capsys):
    folder, arguments = again
    before = contents(folder)
    merge = [*here(arguments), "--merge"]
    refused = call(capsys, *merge, "--seed", "10")
    assert_refused(refused, "`seed` is 9, but 10")
    refused = call(capsys, *merge, "--num-processes", "0")
    assert_refused(refused, "`num_processes` is 1, but 0")
    assert contents(folder) == before
    assert call(capsys, *merge) == (
        0,
        f"jaxspec: 6 records in {folder}/OUT.jsonl, 2 of them errors\n",
    )
    assert contents(folder) == before


def test_a_platform_that_is_not_here(again, no_model, monkeypatch, capsys):
    _, arguments = again

    def missing():
        raise RuntimeError("Unable to initialize backend 'tpu'\nmore")

    monkeypatch.setattr(jax, "local_devices", missing)
    refused = call(capsys, *here(arguments))
    assert_refused(refused, "no devices", "Unable to initialize backend 'tpu'")


def test_a_stop_is_no_error_that_others_catch(again, monkeypatch, capsys):
    """Such as while a chat is rendered, whose faults are a record's error."""
    folder, arguments = again
    (folder / "OUT.jsonl").unlink()

    def ask(*_, **__):
        try:
            signal.raise_signal(signal.SIGTERM)
        except Exception:
            return []
        return []

    monkeypatch.setattr(batch, "make_generator", ask)
    assert call(capsys, *here(arguments)) == (
        143,
        "jaxspec: stopped; start it again to go on\n",
    )


def test_a_job_for_a_slice_runs_there(whole, no_model, capsys):
    """Only `--platform cpu` makes a rehearsal of it, as in `whole`."""
    _, arguments, _ = whole
    refused = call(capsys, *here(arguments))
    assert_refused(refused, "the job is for v5e:2x4, but the devices here are cpu's")
    assert "--platform cpu" in refused[1]
