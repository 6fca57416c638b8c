"""One output of all records in order, as a whole or not at all."""

import contextlib
import json
import pathlib

import pytest
from etils import epath

from jaxspec.batch import merge as merging
from jaxspec.batch import store
from jaxspec.batch.journal import open_journal
from jaxspec.batch.layout import Layout, is_merged
from jaxspec.batch.merge import merge
from jaxspec.errors import UserError

PINNED = {"input": "abc"}


@pytest.fixture(params=[pathlib.Path, epath.Path])
def output(request, tmp_path):
    return request.param(tmp_path) / "OUT.jsonl"


@pytest.fixture
def local(tmp_path):
    return tmp_path / "OUT.jsonl"


def fill(output, shards):
    for process_id, indices in enumerate(shards):
        with open_journal(output, process_id, len(shards), PINNED) as journal:
            for index in indices:
                journal.append({"index": index, "text": f"é{index}"})


def lines_of(output):
    return [json.loads(line)["index"] for line in output.read_text().splitlines()]


def names(output):
    return sorted(path.name for path in output.parent.iterdir())


LEFT = ["OUT.jsonl", "OUT.jsonl.job.json", "OUT.jsonl.merged.json"]


def test_in_the_order_of_the_prompts(output):
    fill(output, [[4, 0, 2], [3, 5, 1]])
    assert merge(output, 2, 6) == 6
    assert lines_of(output) == [0, 1, 2, 3, 4, 5]
    assert names(output) == LEFT


def test_lines_are_as_they_were_written(local):
    fill(local, [[1, 0]])
    before = Layout(local).journal(0, 1).read_bytes().splitlines(keepends=True)
    merge(local, 1, 2)
    assert local.read_bytes() == before[1] + before[0]


def test_nothing_is_a_whole_as_well(output):
    fill(output, [[]])
    assert merge(output, 1, 0) == 0
    assert is_merged(output, 1, PINNED)
    assert output.read_bytes() == b""


def test_what_is_missing_is_listed(output):
    fill(output, [[0, 2], [3]])
    with pytest.raises(UserError, match="it goes on with these") as error:
        merge(output, 2, 100)
    assert (
        "97 of 100 records are missing, index 1, 4, 5, 6, 7, 8, 9, 10, 11, 12, ..."
        in (str(error.value))
    )
    assert not output.exists()
    with open_journal(output, 0, 2, PINNED) as journal:
        assert journal.done == {0, 2}


def test_a_torn_record_is_missing(local):
    fill(local, [[0, 1]])
    path = Layout(local).journal(0, 1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="1 of 2 records are missing, index 1;"):
        merge(local, 1, 2)


def test_a_process_of_another_folder_is_named(local):
    with open_journal(local, 0, 3, PINNED) as journal:
        journal.append({"index": 0})
    with pytest.raises(UserError, match="no file of process 1, 2 is here"):
        merge(local, 3, 2)


def test_what_is_there_twice_is_listed(output):
    fill(output, [[0, 1], [1, 2]])
    with pytest.raises(UserError, match="1 records are there twice, index 1, in the "):
        merge(output, 2, 3)
    assert not output.exists()


def test_what_no_prompt_asked_for_is_listed(output):
    fill(output, [[0, 1, 5]])
    with pytest.raises(UserError, match="records of index 5, but only 2 prompts"):
        merge(output, 1, 2)


def test_all_faults_at_once(output):
    fill(output, [[0, 9], [0]])
    with pytest.raises(UserError, match=r"missing.*; .*twice.*; .*index 9"):
        merge(output, 2, 2)


def test_a_finished_job_is_known(output):
    assert not is_merged(output, 1, PINNED)
    fill(output, [[0, 1]])
    assert not is_merged(output, 1, PINNED)
    merge(output, 1, 2)
    assert is_merged(output, 1, PINNED)
    before = output.read_bytes()
    with pytest.raises(UserError, match="is finished; there is nothing to do"):
        open_journal(output, 0, 1, PINNED)
    assert merge(output, 1, 2) == 2
    assert output.read_bytes() == before


def test_another_job_is_not_finished_by_it(output):
    fill(output, [[0]])
    merge(output, 1, 1)
    with pytest.raises(UserError, match="`input`"):
        is_merged(output, 1, {"input": "other"})
    with pytest.raises(UserError, match="`num_processes`"):
        is_merged(output, 2, PINNED)


def test_a_changed_output_is_not_the_jobs(output):
    fill(output, [[0]])
    merge(output, 1, 1)
    output.write_bytes(output.read_bytes() + b"{}\n")
    for act in (
        lambda: is_merged(output, 1, PINNED),
        lambda: open_journal(output, 0, 1, PINNED),
        lambda: merge(output, 1, 1),
    ):
        with pytest.raises(UserError, match="is not what this job wrote"):
            act()


def test_an_output_that_was_there_is_not_touched(output):
    fill(output, [[0]])
    output.write_bytes(b"mine")
    with pytest.raises(UserError, match="move it away, or choose another output"):
        merge(output, 1, 1)
    assert output.read_bytes() == b"mine"


def test_an_output_taken_away_is_made_again(output):
    fill(output, [[0]])
    merge(output, 1, 1)
    output.unlink()
    assert not is_merged(output, 1, PINNED)
    with open_journal(output, 0, 1, PINNED) as journal:
        assert journal.done == set()


class Killed(BaseException):
    pass


def killed(*_, **__):
    raise Killed


MOMENTS = {
    "before the seal": (merging, "seal"),
    "after the seal": (merging, "writing"),
    "before the parts go": (merging, "_remove_parts"),
}


@contextlib.contextmanager
def writing_nearly(path):
    """Ends before the file has its name."""
    with store.partial_of(path).open("wb") as file:
        yield file
    raise Killed


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_step(moment, output, monkeypatch):
    fill(output, [[1], [0]])
    with monkeypatch.context() as patch:
        end = writing_nearly if moment == "after the seal" else killed
        patch.setattr(*MOMENTS[moment], end)
        with pytest.raises(Killed):
            merge(output, 2, 2)
    is_whole = moment == "before the parts go"
    assert output.exists() == is_whole
    assert is_merged(output, 2, PINNED) == is_whole
    assert merge(output, 2, 2) == 2
    assert lines_of(output) == [0, 1]
    assert names(output) == LEFT
