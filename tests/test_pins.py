"""What files were made by is written once, by whoever is first."""

import json
import threading

import pytest

from jaxspec.checkpoints.atomic import create, replace
from jaxspec.errors import UserError
from jaxspec.pins import pin


def test_values_are_held_against_those_that_are_there(tmp_path):
    path = tmp_path / "new" / "pin.json"
    pin(path, {"seed": 1, "tree": (2, 1)})
    pin(path, {"seed": 1, "tree": [2, 1]})
    with pytest.raises(UserError, match="`seed` is 1, but 2 is asked for; choose"):
        pin(path, {"seed": 2, "tree": [2, 1]})


def test_of_those_that_write_at_once_one_succeeds(tmp_path):
    """All have seen that there is none: they wait for each other before they write."""
    count = 8
    together, refused = threading.Barrier(count), []

    def create_together(path, content):
        together.wait()
        create(path, content)

    def begin(seed):
        try:
            pin(tmp_path / "pin.json", {"seed": seed}, write=create_together)
        except UserError:
            refused.append(seed)

    threads = [threading.Thread(target=begin, args=(seed,)) for seed in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    kept = json.loads((tmp_path / "pin.json").read_text())["seed"]
    assert sorted([*refused, kept]) == list(range(count))
    assert [path.name for path in tmp_path.iterdir()] == ["pin.json"]


def test_a_file_system_without_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no links here")

    monkeypatch.setattr("os.link", refuse)
    create(tmp_path / "file", b"content")
    assert (tmp_path / "file").read_bytes() == b"content"
    replace(tmp_path / "file", b"other")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"other"]
