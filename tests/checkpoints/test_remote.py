import huggingface_hub
import pytest
from huggingface_hub import utils

from jaxspec.checkpoints import hub
from jaxspec.errors import UserError


def test_a_folder_holds_what_is_read_and_no_code(fake_hub):
    wanted = {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"{}",
        "model-00001-of-00002.safetensors": b"one",
        "model-00002-of-00002.safetensors": b"two",
        "model.safetensors.index.json": b"{}",
    }
    unwanted = {
        "pytorch_model.bin": b"",
        "tokenizer.py": b"",
        "modeling.py": b"",
        "original/consolidated.safetensors": b"",
        "consolidated.safetensors": b"",
        "README.md": b"",
    }
    fake_hub.repositories["org/name"] = wanted | unwanted
    located = hub.locate("org/name")
    assert (located.source, located.sha256) == ("hub", None)
    assert {path.name for path in located.path.iterdir()} == set(wanted)
    assert not utils.are_progress_bars_disabled()


def test_one_gguf_of_a_repository(fake_hub):
    fake_hub.repositories["org/name"] = {"a.gguf": b"GGUF a", "b.gguf": b"GGUF b"}
    assert hub.fetch("org/name:b.gguf").read_bytes() == b"GGUF b"
    for reference in ("org/name", "org/name:c.gguf"):
        with pytest.raises(UserError, match=r"'org/name:file' among.*a\.gguf, b\.gguf"):
            hub.fetch(reference)


def test_a_model_seen_before_needs_no_hub(fake_hub, at_endpoint):
    fake_hub.repositories["org/name"] = {
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "a.gguf": b"GGUF",
    }
    folder, file = hub.fetch("org/name"), hub.fetch("org/name:a.gguf")
    at_endpoint("http://127.0.0.1:9")
    assert hub.fetch("org/name") == folder
    assert hub.fetch("org/name:a.gguf") == file


@pytest.mark.parametrize(
    ("repository", "message"),
    [
        ("GatedRepo", r"'org/modle' is.*gated.*accept its terms.*`hf auth login`"),
        ("RepoNotFound", r"no local path.*check the spelling.*smollm2-135m-instruct"),
        ("Broken", r"could not give 'org/modle'.*no hub: smollm2-135m-instruct"),
        (
            {"config.json": b"{}", "pytorch_model.bin": b""},
            r"no config.*safetensors.*none",
        ),
        ({"model.safetensors": b""}, r"has no config\.json"),
    ],
)
def test_faults_are_one_line(fake_hub, repository, message):
    fake_hub.repositories["org/modle"] = repository
    with pytest.raises(UserError, match=message) as caught:
        hub.fetch("org/modle")
    assert "\n" not in str(caught.value)


def test_an_interruption_is_no_fault_of_the_hub(fake_hub, monkeypatch):
    def interrupt(*unused, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub, "snapshot_download", interrupt)
    files = {"config.json": b"{}", "model.safetensors": b""}
    fake_hub.repositories["org/name"] = files
    with pytest.raises(KeyboardInterrupt):
        hub.fetch("org/name")
    assert not utils.are_progress_bars_disabled()
