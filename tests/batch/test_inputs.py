"""The prompts of a job, and the lines of a file that are none."""

import codecs
import hashlib
import importlib.util
import json

import pytest
from etils import epath

from jaxspec.batch.inputs import Item, digest, read_items
from jaxspec.errors import UserError

HELLO = [{"role": "user", "content": "Hello"}]


def write(folder, *lines):
    path = folder / "in.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_each_kind_of_prompt_and_its_place(tmp_path):
    lines = [
        b'{"prompt": "one"}',
        b"",
        b'{"prompt": [1, 2]}\r',
        b" \t\xe2\x80\xa8",
        json.dumps({"messages": HELLO, "id": 7}).encode(),
        b'{"prompt": "last \\u0000 \xc3\xa9"}',
    ]
    path = write(tmp_path, *lines)
    prompts = ["one", [1, 2], HELLO, "last \0 é"]
    expected = [Item(index, prompt, None) for index, prompt in enumerate(prompts)]
    assert read_items(path, chat=False) == expected
    assert read_items(str(path), chat=False) == expected
    assert read_items(epath.Path(path), chat=False) == expected


def test_with_chat_a_text_is_what_the_user_says(tmp_path):
    path = write(tmp_path, b'{"prompt": "Hello"}', b'{"prompt": [1]}')
    assert [item.prompt for item in read_items(path, chat=True)] == [HELLO, [1]]


def test_no_newline_at_the_end(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}')
    assert [item.prompt for item in read_items(path, chat=False)] == ["a", "b"]


def test_a_mark_of_byte_order_is_no_part_of_a_line(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + b'{"prompt": "a"}\n')
    assert read_items(path, chat=False) == [Item(0, "a", None)]


DEEP = 100_000
BAD = {
    "no JSON": (b"prompt", "not JSON"),
    "cut": (b'{"prompt": "a', "not JSON"),
    "no object": (b'["a"]', 'expected an object with "prompt" or "messages"'),
    "no prompt": (b'{"text": "a"}', 'expected an object with "prompt"'),
    "a number": (b'{"prompt": 3}', 'expected an object with "prompt"'),
    "null": (b"null", 'expected an object with "prompt"'),
    "NUL bytes": (b"\0" * 4096, "not JSON"),
    "a raw NUL": (b'{"prompt": "a\0b"}', "not JSON"),
    "bad UTF-8": (b'{"prompt": "\xff"}', "not UTF-8"),
    "half a pair": (b'{"prompt": "\\ud800"}', "surrogate"),
    "deep": (b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}", "nested too deep"),
    "open": (b"[" * DEEP, "nested too deep"),
    "rather deep": (b'{"prompt": ' + b"[" * 99 + b"]" * 99 + b"}", "nested too deep"),
    "not a number": (b'{"prompt": [NaN]}', "has NaN or an infinite number"),
    "a long number": (b'{"prompt": [' + b"1" * 9999 + b"]}", "not JSON"),
}


@pytest.mark.parametrize("line, part", BAD.values(), ids=BAD)
def test_a_bad_line_is_an_item_with_its_error(tmp_path, line, part):
    path = write(tmp_path, b'{"prompt": "a"}', b"", line, b'{"prompt": "b"}')
    first, bad, last = read_items(path, chat=False)
    assert (first.prompt, last) == ("a", Item(2, "b", None))
    assert (bad.index, bad.prompt) == (1, None)
    assert bad.error.startswith(f"{path} line 3: ") and part in bad.error
    assert len(bad.error) < len(str(path)) + 200


def test_a_very_long_line(tmp_path):
    path = write(tmp_path, json.dumps({"prompt": "ab" * 10_000_000}).encode())
    (item,) = read_items(path, chat=False)
    assert len(item.prompt) == 20_000_000


@pytest.mark.parametrize(
    "content, part",
    [
        (None, "No such file"),
        (b"", "no prompts"),
        (b"\n \n\t\n", "no prompts"),
        ('{"prompt": "a"}\n{"prompt": "b"}\n'.encode("utf-16"), "not UTF-8"),
        (b"\x1f\x8b\x08\xff\xfe\n\x9d\x01", "not UTF-8"),
    ],
)
def test_a_file_that_is_wrong_as_a_whole(tmp_path, content, part):
    path = tmp_path / "in.jsonl"
    if content is not None:
        path.write_bytes(content)
    for each in (path, epath.Path(path)):
        with pytest.raises(UserError, match=part) as error:
            read_items(each, chat=False)
        assert str(error.value).startswith(str(path))


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="directory"):
        read_items(tmp_path, chat=False)


def test_the_digest_is_of_the_bytes(tmp_path):
    path = write(tmp_path, b'{"prompt": "a"}')
    assert digest(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest(epath.Path(path)) == digest(str(path))
    with pytest.raises(UserError, match="No such file"):
        digest(tmp_path / "nowhere")


def test_a_bucket_without_its_package(monkeypatch):
    find = importlib.util.find_spec
    missing = {"gcsfs", "tensorflow"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name not in missing and find(name)
    )
    with pytest.raises(UserError, match=r"pip install 'jaxspec-decoding\[gcs\]'"):
        read_items("gs://bucket/in.jsonl", chat=False)


@pytest.mark.parametrize(
    "name", ["s3://a/b", "http://a/b", "gs://a", "gs://a/", "gs:///b"]
)
def test_no_other_place(name):
    with pytest.raises(UserError, match="expected a local path or gs://BUCKET/NAME"):
        read_items(name, chat=False)
