import io
import time

import pytest

from jaxspec import progress
from jaxspec.checkpoints import disk


class Stderr(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


@pytest.fixture
def run(monkeypatch):
    """Runs work of which 7 of 10 MB are done; returns what it wrote to stderr."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")

    def run(*, is_terminal, wanted=None, patience=0.05, seconds=0.4, until=None):
        monkeypatch.setattr(progress, "PATIENCE_SECONDS", patience)
        # Set here, as pytest sets it again after the fixtures.
        monkeypatch.setattr("sys.stderr", stderr := Stderr(is_terminal))
        with progress.watching("fetching", lambda: 7_000_000, 10_000_000, wanted):
            end = time.monotonic() + seconds
            while time.monotonic() < end and not (until and until in stderr.getvalue()):
                time.sleep(0.01)
            print("result")
        return stderr.getvalue()

    return run


def test_long_work_shows_its_progress_on_a_terminal(run, capsys):
    assert progress.PATIENCE_SECONDS == 2
    shown = run(is_terminal=True, seconds=20, until="7.0/10.0 MB")
    assert "fetching" in shown and "7.0/10.0 MB" in shown
    assert "result" not in shown and capsys.readouterr().out == "result\n"


def test_counts_are_shown_as_counts(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr("sys.stderr", stderr := Stderr(is_terminal=True))
    end = time.monotonic() + 20
    with progress.watching("prompts", lambda: 3, 10, in_bytes=False):
        while time.monotonic() < end and "3/10" not in stderr.getvalue():
            time.sleep(0.01)
    assert "3/10" in stderr.getvalue() and "B/s" not in stderr.getvalue()


def test_short_work_shows_nothing_and_is_not_kept_waiting(run):
    began = time.monotonic()
    assert not run(is_terminal=True, patience=2, seconds=0.01)
    assert time.monotonic() - began < 1


def test_no_bar_where_it_is_refused_or_stderr_is_no_terminal(run):
    assert run(is_terminal=True, seconds=20, until="fetching")
    assert not run(is_terminal=True, wanted=False)
    assert not run(is_terminal=False)


def test_an_error_in_the_work_comes_through():
    with pytest.raises(KeyError), progress.watching("", lambda: 0, None, True):
        raise KeyError


def test_the_bytes_of_a_folder_include_what_lies_deeper(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"12345")
    (tmp_path / "file").write_bytes(b"123")
    assert disk.folder_bytes(tmp_path) == 8
    assert disk.folder_bytes(tmp_path / "none") == 0
