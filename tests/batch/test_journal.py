"""Records outlast their process, whenever it is killed, and none is there twice."""

import json
import pathlib

import pytest
from etils import epath

from jaxspec.batch.journal import LocalJournal, RemoteJournal, open_journal
from jaxspec.batch.layout import Layout
from jaxspec.batch.merge import merge
from jaxspec.errors import UserError

PINNED = {"input": "abc", "model": "m", "options": {"seed": 0, "stop": ["a"]}}
KINDS = {"local": pathlib.Path, "remote": epath.Path}


@pytest.fixture(params=KINDS)
def output(request, tmp_path):
    """The output of a job; a bucket's paths, of a folder that stands for one."""
    return KINDS[request.param](tmp_path) / "new" / "OUT.jsonl"


@pytest.fixture
def local(tmp_path):
    return tmp_path / "OUT.jsonl"


@pytest.fixture
def remote(tmp_path):
    return epath.Path(tmp_path) / "OUT.jsonl"


def journal_at(output, process_id=0, num_processes=1, pinned=PINNED, **parting):
    return open_journal(output, process_id, num_processes, pinned, **parting)


def record(index, text="a"):
    return {"index": index, "text": text}


def fill(output, *indices, **options):
    with journal_at(output, **options) as journal:
        for index in indices:
            journal.append(record(index))


def parts(output):
    return sorted(path.name for path in output.parent.glob("*.parts/*"))


def test_a_resumed_journal_knows_what_is_done(output):
    fill(output, 5, 0, 3)
    with journal_at(output) as journal:
        assert journal.done == {0, 3, 5}
        journal.append(record(1))
        assert journal.done == {0, 1, 3, 5}
    with journal_at(output) as journal:
        assert journal.done == {0, 1, 3, 5}


def test_an_index_is_taken_once(output):
    fill(output, 0)
    with journal_at(output) as journal:
        journal.append(record(1))
        for index in (0, 1):
            with pytest.raises(ValueError, match=f"index {index} has a record already"):
                journal.append(record(index))
        for index in (-1, None, "2", True, 1.0):
            with pytest.raises(ValueError, match="expected 0 or more"):
                journal.append(record(index))
        with pytest.raises(TypeError):
            journal.append(record(2, text=object()))
        assert journal.done == {0, 1}


def test_a_closed_journal_takes_nothing(output):
    journal = journal_at(output)
    journal.close()
    journal.close()
    with pytest.raises(ValueError, match="closed"):
        journal.append(record(0))


def test_any_text_can_be_recorded(output):
    texts = ["é\n\r\u2028\x00", "\ud800", "\U0001f600" * 1000, "x" * 3_000_000]
    with journal_at(output) as journal:
        for index, text in enumerate(texts):
            journal.append(record(index, text))
    assert merge(output, 1, len(texts)) == len(texts)
    lines = output.read_bytes().split(b"\n")
    assert [json.loads(line)["text"] for line in lines[:-1]] == texts
    assert lines[-1] == b""


def test_each_process_has_its_own_records(output):
    fill(output, 0, 2, process_id=0, num_processes=2)
    fill(output, 1, process_id=1, num_processes=2)
    with journal_at(output, 0, 2) as first, journal_at(output, 1, 2) as second:
        assert (first.done, second.done) == ({0, 2}, {1})


@pytest.mark.parametrize("process_id", [-1, 2])
def test_a_process_that_cannot_be(local, process_id):
    with pytest.raises(ValueError, match=f"process_id is {process_id} of 2"):
        journal_at(local, process_id, 2)


def test_another_job_is_refused(output):
    fill(output, 0)
    changed = {**PINNED, "input": "abd", "options": {"seed": 1, "stop": ("a",)}}
    with pytest.raises(UserError, match="choose another output") as error:
        journal_at(output, num_processes=2, pinned=changed)
    message = str(error.value)
    assert '`input` is "abc", but "abd" is asked for' in message
    assert "`num_processes` is 1, but 2" in message and "`options`" in message
    assert "`model`" not in message
    with journal_at(output) as journal:
        assert journal.done == {0}


def test_an_output_that_was_there_is_not_touched(output):
    output.parent.mkdir()
    output.write_bytes(b"mine")
    with pytest.raises(UserError, match="is not what this job wrote; move it away"):
        journal_at(output)
    assert [path.name for path in output.parent.iterdir()] == ["OUT.jsonl"]
    assert output.read_bytes() == b"mine"


def test_an_output_that_comes_later_is_not_touched(output):
    fill(output, 0)
    output.write_bytes(b"mine")
    with pytest.raises(UserError, match="is not what this job wrote"):
        journal_at(output)


@pytest.mark.parametrize("name", ["/", ".", ""])
def test_an_output_needs_a_name(name):
    with pytest.raises(UserError, match="names no file"):
        journal_at(name)


def test_an_output_that_cannot_be_there(local):
    local.parent.joinpath("file").write_text("")
    with pytest.raises(UserError, match=r"Not a directory|File exists"):
        journal_at(local.parent / "file" / "OUT.jsonl")


# What only a local journal does


def local_file(output):
    return Layout(output).journal(0, 1)


def test_a_record_is_a_line_of_its_file_at_once(local):
    with journal_at(local) as journal:
        assert isinstance(journal, LocalJournal)
        for index in (4, 2):
            journal.append(record(index))
            last = local_file(local).read_bytes().split(b"\n")[-2]
            assert json.loads(last) == record(index)
    assert local_file(local).name == "OUT.jsonl.part-00000-of-00001"


def test_a_line_torn_at_any_byte_is_done_again(local):
    fill(local, 0, 1)
    whole = local_file(local).read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first, len(whole) + 1):
        local_file(local).write_bytes(whole[:end])
        done = {0, 1} if end == len(whole) else {0}
        with journal_at(local) as journal:
            assert journal.done == done
            if 1 not in done:
                assert local_file(local).read_bytes() == whole[:first]
                journal.append(record(1))
        assert local_file(local).read_bytes() == whole


@pytest.mark.parametrize("tail", [b"\0" * 100, b"\0" * 100 + b"\n", b"\xff\n", b"\n"])
def test_a_spoilt_last_line_is_cut_off(local, tail):
    fill(local, 0)
    whole = local_file(local).read_bytes()
    local_file(local).write_bytes(whole + tail)
    fill(local)
    assert local_file(local).read_bytes() == whole


@pytest.mark.parametrize(
    "line", [b"", b'{"index": 1', b"\0", b'{"text": "a"}', b'{"index": true}', b"[1]"]
)
def test_a_wrong_line_in_the_middle_is_refused(local, line):
    fill(local, 0, 2)
    first, last, _ = local_file(local).read_bytes().split(b"\n")
    spoilt = b"\n".join([first, line, last, b""])
    local_file(local).write_bytes(spoilt)
    with pytest.raises(UserError, match=f"the line at byte {len(first) + 1} is no rec"):
        journal_at(local)
    assert local_file(local).read_bytes() == spoilt


def test_an_index_twice_in_a_file_is_refused(local):
    fill(local, 0, 1)
    content = local_file(local).read_bytes()
    local_file(local).write_bytes(content * 2)
    with pytest.raises(UserError, match="index 0 is there twice"):
        journal_at(local)


def test_two_processes_cannot_be_the_same(local):
    with journal_at(local):
        with pytest.raises(UserError, match="another process is writing it"):
            journal_at(local)
        with journal_at(local.with_name("other.jsonl")):
            pass
    with journal_at(local):
        pass


class FullDisk:
    """A file of which only half of a line is written, in one of two ways."""

    def __init__(self, file, raises):
        self.file, self.raises = file, raises

    def write(self, line):
        self.file.write(line[: len(line) // 2])
        if self.raises:
            raise self.raises
        return len(line) // 2

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize(
    "raises, error",
    [
        (None, UserError),
        (OSError(28, "No space left on device"), UserError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_half_a_line_does_not_stay(local, raises, error):
    fill(local, 0)
    whole = local_file(local).read_bytes()
    with journal_at(local) as journal:
        opened = journal._file
        journal._file = FullDisk(opened, raises)
        with pytest.raises(error):
            journal.append(record(1))
        assert journal.done == {0}
        assert local_file(local).read_bytes() == whole
        journal._file = opened
        journal.append(record(1))
    fill(local, 2)


# What only a bucket's journal does


def test_parts_are_written_by_count(remote):
    with journal_at(remote, 1, 2, most_records=2) as journal:
        assert isinstance(journal, RemoteJournal)
        for index, written in [(7, 0), (3, 1), (17, 1), (5, 2), (9, 2)]:
            journal.append(record(index))
            assert len(parts(remote)) == written
    assert [name[:35] for name in parts(remote)] == [
        "part-00001-of-00002-index-00000007-",
        "part-00001-of-00002-index-00000009-",
        "part-00001-of-00002-index-00000017-",
    ]


def test_parts_are_written_by_time(remote):
    now = 100.0
    layout = Layout(remote)
    with RemoteJournal(layout, 0, 1, most_seconds=10.0, clock=lambda: now) as journal:
        for at, written in [(200.0, 0), (209.0, 0), (210.0, 1), (219.0, 1), (229.0, 2)]:
            now = at
            journal.append(record(int(at)))
            assert len(parts(remote)) == written


def test_flush_writes_what_there_is(remote):
    with journal_at(remote) as journal:
        journal.flush()
        assert parts(remote) == []
        journal.append(record(3))
        journal.flush()
        journal.flush()
        assert len(parts(remote)) == 1


def test_what_was_not_flushed_is_done_again(remote):
    killed = journal_at(remote, most_records=2)
    for index in (0, 1, 2):
        killed.append(record(index))
    fill(remote, 2, 3)
    assert merge(remote, 1, 4) == 4


def test_a_part_is_never_overwritten(remote):
    """Two machines begin with the same index; what both did counts once."""
    first, second = journal_at(remote), journal_at(remote)
    for journal in (first, second):
        journal.append(record(0, text="b" if journal is first else "c"))
        journal.append(record(1 if journal is first else 2))
        journal.close()
    assert len(parts(remote)) == 2
    kept = (remote.parent / "OUT.jsonl.parts" / parts(remote)[0]).read_text()
    with journal_at(remote) as journal:
        assert journal.done == {0, 1, 2}
    assert merge(remote, 1, 3) == 3
    assert remote.read_text().splitlines()[0] == kept.splitlines()[0]


def test_a_torn_part_gives_its_whole_lines(remote):
    fill(remote, 0, 1)
    (name,) = parts(remote)
    path = remote.parent / "OUT.jsonl.parts" / name
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with journal_at(remote) as journal:
            assert journal.done == ({0} if end > whole.index(b"\n") else set())


def test_a_wrong_line_in_a_part_is_refused(remote):
    fill(remote, 0)
    path = remote.parent / "OUT.jsonl.parts" / parts(remote)[0]
    path.write_bytes(b"x\n" + path.read_bytes())
    with pytest.raises(UserError, match="is no record"):
        journal_at(remote)


def test_a_part_that_cannot_be_written_is_kept(remote, monkeypatch):
    class Unreachable(Exception):
        pass

    def fail(*_):
        raise Unreachable("no\nnetwork")

    with journal_at(remote) as journal:
        journal.append(record(0))
        with monkeypatch.context() as patch:
            patch.setattr(type(remote), "write_bytes", fail)
            with pytest.raises(UserError, match=r"-0\d+-.*: Unreachable: no network"):
                journal.flush()
    with journal_at(remote) as journal:
        assert journal.done == {0}


def test_an_error_does_not_lose_what_was_finished(output):
    with pytest.raises(SystemExit), journal_at(output) as journal:
        journal.append(record(0))
        raise SystemExit
    with journal_at(output) as journal:
        assert journal.done == {0}
