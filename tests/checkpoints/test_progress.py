import io
import time

import pytest

from jaxspec.checkpoints import disk, progress


def work(wanted, seconds):
    with progress.watching("fetching", lambda: 7_000_000, 10_000_000, wanted):
        time.sleep(seconds)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return progress.sys.stderr


def test_long_work_shows_its_progress_on_a_terminal(terminal, capsys, monkeypatch):
    assert progress.PATIENCE_SECONDS == 2
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.05)
    work(None, 0.5)
    assert "fetching" in terminal.getvalue()
    assert "7.0/10.0 MB" in terminal.getvalue()
    assert not capsys.readouterr().out


def test_short_work_shows_nothing_and_is_not_kept_waiting(terminal):
    began = time.monotonic()
    work(None, 0.01)
    assert not terminal.getvalue() and time.monotonic() - began < 1


def test_no_bar_where_it_is_refused_or_stderr_is_no_terminal(
    terminal, capsys, monkeypatch
):
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0)
    work(False, 0.3)
    assert not terminal.getvalue()
    monkeypatch.setattr("sys.stderr", io.StringIO())
    work(None, 0.3)
    assert not progress.sys.stderr.getvalue() and not capsys.readouterr().out


def test_an_error_in_the_work_comes_through(terminal):
    with pytest.raises(KeyError), progress.watching("", lambda: 0, None, True):
        raise KeyError


def test_the_bytes_of_a_folder_include_what_lies_deeper(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"12345")
    (tmp_path / "file").write_bytes(b"123")
    assert disk.folder_bytes(tmp_path) == 8
    assert disk.folder_bytes(tmp_path / "none") == 0
