"""Truncated, flipped and made-up GGUF files: a load or a one-line refusal."""

import struct
import tracemalloc

import numpy as np
import pytest

from jaxspec.errors import UserError
from tests.checkpoints.gguf_loads import assert_refused, load
from tests.checkpoints.writers import (
    tiny_config,
    write_tiny_gguf,
)


@pytest.fixture(scope="module")
def sound_bytes(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return write_tiny_gguf(path, tiny_config("gemma3")).read_bytes()


def load_or_refuse(path):
    """Whether a file loads; anything but a UserError of one line is a failure."""
    try:
        load(path)
    except UserError as error:
        assert "\n" not in str(error)
        return False
    return True


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path, sound_bytes):
    path = tmp_path / "m.gguf"
    # The last tensor may be followed by padding that nothing needs.
    for size in np.linspace(0, len(sound_bytes) - 64, 50).astype(int):
        path.write_bytes(sound_bytes[:size])
        assert_refused(path, "not a sound GGUF file|truncated")
    path.write_bytes(sound_bytes)
    assert load_or_refuse(path)


def test_flipped_bits_in_the_header_never_escape_as_another_error(
    tmp_path, sound_bytes
):
    rng = np.random.default_rng(0)
    path = tmp_path / "m.gguf"
    size = sound_bytes.rindex(b"blk.1.") + 64
    tracemalloc.start()
    refusals = 0
    for _ in range(300):
        data = bytearray(sound_bytes)
        for place in rng.integers(0, size, rng.integers(1, 4)):
            data[place] ^= 1 << rng.integers(8)
        path.write_bytes(data)
        refusals += not load_or_refuse(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refusals > 100
    assert peak < 50e6, "a hostile count must not be believed"


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"GGUF",
        b"FUGG" + bytes(60),
        struct.pack("<4sIQQ", b"GGUF", 1, 0, 0),
        struct.pack(">4sIQQ", b"GGUF", 3, 0, 0),
        struct.pack("<4sIQQ", b"GGUF", 3, 2**63, 0),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**63),
        struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 2**63),
        struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 8, 2**62),
        struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 7, 2**23),
        struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 9, 1),
        struct.pack("<4sIQQQ1sIQ", b"GGUF", 3, 0, 1, 1, b"\n", 8, 0),
        struct.pack("<4sIQQQ1sIQ1s", b"GGUF", 3, 0, 1, 1, b"k", 8, 1, b"\xff"),
        struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", 13),
        struct.pack("<4sIQQQ1sI", b"GGUF", 3, 1, 0, 1, b"t", 2**31),
        struct.pack("<4sIQQQ1sI", b"GGUF", 3, 1, 0, 1, b"t", 0),
        struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 2**63, 0, 0),
        struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 0, 0, 0),
        struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 1, 0, 2**63),
        struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 31, 2, 0),
    ],
)
def test_a_hostile_header_is_refused(tmp_path, header):
    path = tmp_path / "m.gguf"
    path.write_bytes(header)
    assert_refused(path, "not a sound GGUF file")


def test_a_name_that_occurs_twice_is_refused(tmp_path, sound_bytes):
    path = tmp_path / "m.gguf"
    path.write_bytes(
        sound_bytes.replace(b"blk.0.attn_q.weight", b"blk.0.attn_k.weight")
    )
    assert_refused(path, "'blk.0.attn_k.weight' occurs twice")
