"""`jaxspec plan`: what is refused before anything is compiled."""

import pytest

from jaxspec.pictures import KINDS
from jaxspec.tpu import compiled_job
from tests.cli.test_batch import assert_refused, call

JOB = "model: smollm2-135m-instruct\nbatch_size: 4\ncapacity: 256\n"
BAD = {
    "no topology": ("", [], "topology is missing"),
    "no chip": ("topology: v9:2x2", [], "topology is 'v9:2x2', expected one of v4"),
    "no grid": ("topology: v5e:wide", [], "with its grid of chips, such as v5e:2x4"),
    "part of a slice": ("topology: v5e:2x4\nmesh: 1x2", [], "mesh is 1x2: a program"),
    "live tokens": ("topology: v5e:1x1", ["--live-tokens", "0"], "--live-tokens is 0"),
    "picture": ("topology: v5e:1x1", ["--plot", "x.txt"], ", ".join(KINDS)),
    "folder": ("topology: v5e:1x1", ["--plot", "nowhere/x.png"], "nowhere is not"),
}


@pytest.mark.parametrize("text, arguments, part", BAD.values(), ids=BAD)
def test_a_mistake_is_one_line(text, arguments, part, tmp_path, monkeypatch, capsys):
    def compile_job(*_):
        raise AssertionError("it was compiled")

    monkeypatch.setattr("jaxspec.cli.plan.compile_job", compile_job)
    path = tmp_path / "job.yaml"
    path.write_text(JOB + text + "\n")
    assert_refused(call(capsys, "plan", str(path), *arguments), part)


def test_without_the_compiler_it_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compiled_job.importlib.util, "find_spec", lambda _: None)
    path = tmp_path / "job.yaml"
    path.write_text(JOB + "topology: v5e:1x1\n")
    assert_refused(
        call(capsys, "plan", str(path)), "pip install 'jaxspec-decoding[tpu]'"
    )
