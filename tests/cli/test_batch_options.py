"""The options of `jaxspec batch`: each reaches its call, and mistakes are refused."""

import subprocess
import sys

import pytest

from jaxspec import distributed
from jaxspec.batch.place import Place
from jaxspec.cli import batch, main
from jaxspec.core.dynamic_tree import DynamicTree
from tests.batch import jobs
from tests.cli.test_batch import assert_refused, call, contents

# By option, two values as a flag and as a YAML has them, and where they come out.
OPTIONS = {
    "model": ("a", "b"),
    "draft_model": ("c", "d"),
    "drafter": ("early-exit:1", "none"),
    "draft_tokens": (2, 5),
    "tree": ("2,1", "3,2"),
    "rule": ("block", "coupled"),
    "dtype": ("float32", "bfloat16"),
    "batch_size": (2, 3),
    "capacity": (64, 128),
    "mesh": ("1x2", "2x4"),
    "replicate_draft": (False, True),
    "max_new_tokens": (3, 5),
    "temperature": (0.0, 1.5),
    "seed": (0, 2),
    "chat": (False, True),
}


class Recorder:
    """Stands for the generator and the runner, and keeps what reaches them."""

    def __init__(self):
        self.seen = {}
        self.tokens = self.drafted = self.accepted = 0

    def make_generator(self, named, partition, *, capacity):
        self.seen |= vars(named) | {"capacity": capacity}
        return self

    def whole_rows(self, rows):
        return rows

    def make_runner(self, generator, rows, seed, **options):
        assert generator is self
        self.seen |= {"batch_size": rows, "seed": seed, **options}
        return self

    def find_place(self, job, platform):
        replicated = {"replicate_draft": job.replicate_draft, "platform": platform}
        self.seen |= {"mesh": job.mesh, **replicated}
        return Place(None)

    def run(self, items):
        self.seen |= {"chat": not isinstance(items[0].prompt, str)}
        return iter([{"index": item.index} for item in items])


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    for name, stand_in in (
        ("make_generator", recorder.make_generator),
        ("Runner", recorder.make_runner),
        ("find_place", recorder.find_place),
    ):
        monkeypatch.setattr(batch, name, stand_in)
    return recorder


def as_seen(name, value):
    if name == "mesh":
        return tuple(map(int, value.split("x")))
    return tuple(map(int, value.split(","))) if name == "tree" else value


def run_job(folder, *arguments):
    (folder / "in.jsonl").write_text('{"prompt": "x"}\n')
    args = main.build_parser().parse_args(
        [
            *("batch", *map(str, arguments), "--input", str(folder / "in.jsonl")),
            *("--output", str(folder / f"{len([*folder.iterdir()])}.jsonl")),
        ]
    )
    assert args.run(args) == 0


def as_flag(name, value):
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] * value
    return [flag, str(value)]


@pytest.mark.parametrize("name", OPTIONS)
def test_bl69_every_flag_reaches_its_call(name, recorder, tmp_path):
    for value in OPTIONS[name]:
        model = [] if name == "model" else ["--model", "m"]
        run_job(tmp_path, *model, *as_flag(name, value))
        assert recorder.seen[name] == as_seen(name, value)


@pytest.mark.parametrize("name", OPTIONS)
def test_bl69_every_field_reaches_its_call(name, recorder, tmp_path):
    for value in OPTIONS[name]:
        lines = [] if name == "model" else ["model: m"]
        shown = f"[{value}]" if name == "tree" else str(value)
        (tmp_path / "job.yaml").write_text("\n".join([*lines, f"{name}: {shown}"]))
        run_job(tmp_path, tmp_path / "job.yaml")
        assert recorder.seen[name] == as_seen(name, value)


@pytest.mark.parametrize(
    "shown, expected",
    [
        ("3,2", (3, 2)),
        ("dynamic:depth=3,topk=2,nodes=5", DynamicTree(3, 2, 5)),
    ],
)
def test_a_tree_is_written_as_for_the_flag_too(recorder, tmp_path, shown, expected):
    (tmp_path / "job.yaml").write_text(f"model: m\ntree: {shown}\n")
    run_job(tmp_path, tmp_path / "job.yaml")
    assert recorder.seen["tree"] == expected


def test_a_file_takes_every_seed(recorder, tmp_path):
    (tmp_path / "job.yaml").write_text(f"model: m\nseed: {2**64 - 1}\n")
    run_job(tmp_path, tmp_path / "job.yaml")
    assert recorder.seen["seed"] == 2**64 - 1


FILE = "model: m\ndraft_model: d\ndraft_tokens: 3\ntemperature: 0.7\nseed: 4\n"


@pytest.mark.parametrize(
    "flags, expected",
    [
        ([], {"draft_model": "d", "draft_tokens": 3, "temperature": 0.7, "seed": 4}),
        # A value of 0 is a value.
        (["--temperature", 0, "--seed", 0], {"temperature": 0.0, "seed": 0}),
        # Another drafter, and nothing of the shape of the file's.
        (
            ["--drafter", "none"],
            {"drafter": "none", "draft_model": None, "draft_tokens": None},
        ),
        (["--tree", "2,1"], {"tree": (2, 1), "draft_tokens": None}),
        (["--draft-model", "e"], {"draft_model": "e", "draft_tokens": None}),
    ],
)
def test_a_flag_takes_the_place_of_a_field(recorder, tmp_path, flags, expected):
    (tmp_path / "job.yaml").write_text(FILE)
    run_job(tmp_path, tmp_path / "job.yaml", *flags)
    assert {name: recorder.seen[name] for name in expected} == expected


def test_without_a_drafter_it_looks_up(recorder, tmp_path):
    run_job(tmp_path, "--model", "m")
    assert recorder.seen["drafter"] == "prompt-lookup"


@pytest.mark.parametrize("number", [0, 1])
def test_bl69_processes_are_joined_as_is_asked(recorder, tmp_path, monkeypatch, number):
    joined = []
    monkeypatch.setattr(
        distributed,
        "initialize",
        lambda *given, **options: joined.append((given, options)),
    )
    run_job(tmp_path, "--model", "m")
    assert joined == []
    run_job(
        *(tmp_path, "--model", "m", "--coordinator", f"h:{number}"),
        *("--num-processes", 2 + number, "--process-id", number),
        *("--timeout", 5 + number),
    )
    assert joined == [((f"h:{number}", 2 + number, number), {"timeout": 5 + number})]
    run_job(tmp_path, "--model", "m", "--distributed")
    assert joined[1:] == [((None, None, None), {"timeout": 120.0})]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return jobs.write_model(tmp_path_factory.mktemp("model"))


BAD = {
    "unknown model": (["--model", "smolm"], "smolm"),
    "unknown draft": (["--draft-model", "./nowhere.gguf"], "nowhere.gguf"),
    "no such input": (["--input", "./nowhere.jsonl"], "nowhere.jsonl", "No such file"),
    "no such job": (["./nowhere.yaml"], "nowhere.yaml: cannot be read"),
    "mesh": (["--mesh", "2y4"], "mesh is '2y4', expected DATAxMODEL"),
    "too few devices": (["--mesh", "64x4"], "mesh is 64x4, but there are"),
    "k without a draft": (
        ["--drafter", "none", "--draft-tokens", "3"],
        "--draft-tokens has no effect with --drafter none",
    ),
    "rule without a draft": (
        ["--drafter", "none", "--rule", "block"],
        "--rule has no effect with --drafter none",
    ),
    "two drafters": (
        ["--drafter", "prompt-lookup", "--draft-model", "x"],
        "not allowed with argument",
    ),
    "tree and k": (
        ["--drafter", "early-exit:1", "--tree", "2,1", "--draft-tokens", "3"],
        "--draft-tokens and --tree are both given",
    ),
    "tree of nobody": (["--tree", "2,1"], "a tree needs a draft model or early-exit"),
    "no layer": (
        ["--drafter", "early-exit:7", "--capacity", "128"],
        "drafter is 'early-exit:7', expected",
    ),
    "k": (["--draft-tokens", "0"], "--draft-tokens is 0, expected 1 or more"),
    "capacity": (["--capacity", "5000"], "capacity is 5000, expected 2 to 256"),
    "no input": (["--input", ""], "input is missing"),
    "numbers": (
        ["--batch-size", "0", "--capacity", "1", "--max-new-tokens", "0"],
        *("batch_size is 0", "capacity is 1", "max_new_tokens is 0"),
    ),
    "temperature": (["--temperature", "nan"], "temperature is nan"),
    "seed": (["--seed", "-1"], "seed is -1"),
    "seeds": (["--seed", f"{2**64 - 1}"], "expected at most 2**64 - 2"),
    "nothing to merge": (["--merge"], "no job was begun for this output"),
    "half a process": (["--process-id", "0"], "--coordinator", "missing"),
    "unknown flag": (["--turbo"], "unrecognized arguments: --turbo"),
}


@pytest.mark.parametrize(
    "arguments, parts", [(a, p) for a, *p in BAD.values()], ids=BAD
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    arguments, parts, model, tmp_path, capsys
):
    (tmp_path / "in.jsonl").write_text('{"prompt": [1]}\n{"prompt": [2]}\n')
    before = contents(tmp_path)
    outcome = call(
        *(capsys, "batch", "--model", model, "--input", str(tmp_path / "in.jsonl")),
        *("--output", str(tmp_path / "OUT.jsonl"), *arguments),
    )
    assert_refused(outcome, *parts)
    assert contents(tmp_path) == before


# Written out it would have 2 to the 39th words.
ALIASES = "a0: &a0 x\n" + "".join(
    f"a{level}: &a{level} [*a{level - 1}, *a{level - 1}]\n" for level in range(1, 40)
)
ALIASES += "model: *a39\n"
FIELDS = {
    "unknown": ("model: m\nturbo: 1\n", "turbo"),
    "all at once": (
        "draft_model: d\ndrafter: none\nmesh: 8\nbatch_size: 0\ntemperature: x\n",
        *("`model` is missing", "`draft_model` and `drafter`", "mesh is 8"),
        *("`batch_size`", "`temperature`"),
    ),
    "no model": ("model:\ninput: i\noutput: o\n", "`model` is missing"),
    "no name": ("model: m\ninput: ''\noutput: o\n", "`input` is '', expected a text"),
    "no tree": ("model: m\ntree: wide\n", "`tree`: 'wide' is no list"),
    "no YAML": ("model: [", "not valid YAML"),
    "no date": ("seed: 2001-99-99", "not valid YAML"),
    "no such number": ("seed: 0b_", "not valid YAML"),
    "a number without end": (f"seed: {'9' * 5000}", "not valid YAML"),
    "a long number": (f"seed: 0x{'F' * 5000}", "too long to show"),
    "aliases of aliases": (ALIASES, "`model` is [["),
    "no fields": ("- model\n", "expected fields of a job"),
    "no input": ("model: m\noutput: o\n", "input is missing"),
    "no output": ("model: m\ninput: i\n", "output is missing"),
}


@pytest.mark.parametrize(
    "text, parts", [(t, p) for t, *p in FIELDS.values()], ids=FIELDS
)
def test_a_wrong_file_is_one_line(text, parts, tmp_path, capsys):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert_refused(call(capsys, "batch", str(path)), *parts)
    assert [*contents(tmp_path)] == ["job.yaml"]


def test_the_real_command_says_it_the_same_way(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": [1]}\n')
    done = subprocess.run(
        [
            *(sys.executable, "-m", "jaxspec.cli.main", "batch", "--model", "smolm"),
            *("--input", "in.jsonl", "--output", "OUT.jsonl"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=jobs.LIMIT,
    )
    assert done.stdout == ""
    assert_refused((done.returncode, done.stderr), "smolm")
    assert [*contents(tmp_path)] == ["in.jsonl"]
