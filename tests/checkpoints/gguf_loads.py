"""Loads GGUF files for tests, and expects refusals."""

import pytest

from jaxspec.checkpoints.load import load_parameters, open_checkpoint
from jaxspec.errors import UserError
from tests.checkpoints.writers import (
    gguf_metadata,
    gguf_tensors,
    plain,
    random_tensors,
    tiny_config,
)


def load(path, dtype="float32"):
    return load_parameters(open_checkpoint(path), dtype)


def assert_refused(path, culprit):
    """Loads, expects one line that names the culprit, and that nothing was placed."""
    placed = []
    with pytest.raises(UserError, match=culprit) as caught:
        load_parameters(
            open_checkpoint(path), place=lambda name, *_: placed.append(name)
        )
    assert "\n" not in str(caught.value)
    assert placed == []
    return str(caught.value)


def tiny_parts(family="llama", **changes):
    """Metadata and tensors of a tiny file, to be spoilt."""
    values = tiny_config(family, **changes)
    tensors = gguf_tensors(values, random_tensors(values))
    return gguf_metadata(values), {name: plain(t) for name, t in tensors.items()}
