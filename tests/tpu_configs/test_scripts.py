"""The scripts of tpu_configs print what they run, run what they print, and no more.

`gcloud` and `xpk` are fakes that record how they are called.
"""

import base64
import math
import os
import pathlib
import re
import shlex
import shutil
import string
import subprocess
import time
import tomllib

import pytest
import yaml

ROOT = pathlib.Path(__file__).parent.parent.parent
CONFIGS = ROOT / "tpu_configs"
README = (CONFIGS / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VALUES = {
    "PROJECT": "my-project",
    "ZONE": "us-west4-a",
    "NAME": "batch",
    "TYPE": "v5litepod-8",
    "RUNTIME": "v2-alpha-tpuv5-lite",
    "CONFIG": "job.yaml",
    "INPUT": "gs://b/in.jsonl",
    "OUTPUT": "gs://b/out.jsonl",
    "CLUSTER": "my-cluster",
    "IMAGE": "gcr.io/p/jaxspec:1",
}
SLICE = ("PROJECT", "ZONE", "NAME")
REQUIRED = {
    "create": (*SLICE, "TYPE", "RUNTIME"),
    "setup": SLICE,
    "run": (*SLICE, "CONFIG", "INPUT", "OUTPUT"),
    "logs": SLICE,
    "status": SLICE,
    "delete": SLICE,
    "xpk": tuple(name for name in VALUES if name != "RUNTIME"),
}
SCRIPTS = sorted(CONFIGS.glob("scripts/*.sh"))
JAX = next(each for each in PROJECT["dependencies"] if each.startswith("jax=="))
RELEASE = f"jaxspec-decoding[gcs]=={PROJECT['version']}"
WHERE = "--project=my-project --zone=us-west4-a"
QUEUED = "gcloud compute tpus queued-resources"
DESCRIBE = f"{QUEUED} describe batch {WHERE} '--format=value(state.state)'\n"
CREATE = (
    f"{QUEUED} create batch {WHERE} --node-id=batch --accelerator-type=v5litepod-8 "
    "--runtime-version=v2-alpha-tpuv5-lite --valid-until-duration="
)
COPY = "gcloud compute tpus tpu-vm scp {} batch:{} " + WHERE + " --worker=all\n"
ON_ALL = f"gcloud compute tpus tpu-vm ssh batch {WHERE} --worker=all '--command="
INSTALL = (
    "set -eo pipefail\n"
    "[ -x .local/bin/uv ] || curl -LsSf https://astral.sh/uv/0.9.26/install.sh | sh\n"
    "[ -d jaxspec-venv ] || .local/bin/uv venv --python 3.12 jaxspec-venv\n"
    ".local/bin/uv pip install --python jaxspec-venv/bin/python --reinstall-package "
    rf"jaxspec-decoding '\''REQUIREMENT'\'' '\''{JAX.replace('jax', 'jax[tpu]')}'\''"
    "\njaxspec-venv/bin/jaxspec --help > /dev/null'\n"
)
START = (
    "flock -n jaxspec.lock true || { echo "
    r"'\''a job runs here already: see logs.sh'\'' >&2; exit 1; }"
    "\nnohup flock -n jaxspec.lock jaxspec-venv/bin/jaxspec batch jaxspec.yaml --input "
    "gs://b/in.jsonl --output gs://b/out.jsonl --distributed >> jaxspec.log 2>&1 "
    "< /dev/null &'\n"
)
CACHE = (
    'export HF_TOKEN_PATH="$HOME/.cache/huggingface/token"\n'
    "export HF_HOME=/dev/shm/models\n"
)
TAIL = 'tail -n 100 -F jaxspec.log | sed -u "s/^/$(hostname): /"\'\n'
XPK = (
    f"xpk workload create {WHERE} --cluster=my-cluster --workload=batch "
    "--tpu-type=v5litepod-8 --num-slices=1 --docker-image=gcr.io/p/jaxspec:1 "
    "--max-restarts=10 --restart-on-user-code-failure '--command=echo "
    f"{base64.b64encode(b'model: m').decode()} | base64 -d > job.yaml && jaxspec "
    "batch job.yaml --input gs://b/in.jsonl --output gs://b/out.jsonl --distributed "
    "--timeout 900' --spot\n"
)
# How a script is called, and what it prints.
EXPECTED = {
    "create": f"{CREATE}3660s\n{DESCRIBE}",
    "SPOT=1 POLLS=2 POLL_SECONDS=5 create -- --network=mine": (
        f"{CREATE}70s --spot --network=mine\n{DESCRIBE}"
    ),
    "setup": ON_ALL + INSTALL.replace("REQUIREMENT", RELEASE),
    "WHEEL=dist/own.whl HF_TOKEN_FILE=token setup": (
        COPY.format("dist/own.whl", "")
        + f"{ON_ALL}install -d -m 700 .cache/huggingface'\n"
        + COPY.format("token", ".cache/huggingface/token")
        + f"{ON_ALL}{INSTALL.replace('REQUIREMENT', './own.whl[gcs]')}"
    ),
    "run": COPY.format("job.yaml", "jaxspec.yaml") + ON_ALL + START,
    "MODEL_CACHE=/dev/shm/models run -- --timeout 600": (
        COPY.format("job.yaml", "jaxspec.yaml")
        + f"{ON_ALL}{CACHE}{START.replace(' >> ', ' --timeout 600 >> ')}"
    ),
    "logs": ON_ALL.replace("all", "0") + TAIL,
    "WORKER=all logs": ON_ALL + TAIL,
    "status": DESCRIBE,
    "delete": f"{QUEUED} delete batch {WHERE} --force --quiet\n",
    "xpk -- --spot": XPK,
}
# Says the next of the states, or fails where it is a word that no state is.
FAKE = r"""#!/bin/sh
printf '%s\0' "${0##*/}" "$@" >> calls; printf '\1' >> calls
case "$*" in *" describe "*) ;; *) [ ! -e broken ]; exit ;; esac
state=$(head -n 1 states); [ "$(wc -l < states)" -lt 2 ] || sed -i 1d states
[ "$state" != fails ] && echo "$state"
"""


@pytest.fixture
def call(tmp_path):
    """Runs a script in a folder that has the fakes and the files."""
    for name, text in {
        **{"bin/gcloud": FAKE, "bin/xpk": FAKE, "states": "ACTIVE\n"},
        **{"job.yaml": "model: m", "dist/own.whl": "", "token": "secret"},
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def call(script, *arguments, **values):
        path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        return subprocess.run(
            [CONFIGS / "scripts" / f"{script}.sh", *arguments],
            **{"cwd": tmp_path, "env": path | VALUES | values},
            **{"capture_output": True, "text": True, "timeout": 30},
        )

    return call


def calls(folder):
    recorded = folder / "calls"
    text = recorded.read_text() if recorded.exists() else ""
    return [each.split("\0")[:-1] for each in text.split("\1")[:-1]]


def commands(text):
    """What a shell would make of it."""
    words = shlex.split(text)
    starts = [i for i, word in enumerate(words) if word in ("gcloud", "xpk")]
    pairs = zip(starts, [*starts[1:], None], strict=True)
    return [words[start:end] for start, end in pairs]


@pytest.mark.parametrize("line", EXPECTED)
def test_what_is_printed_is_what_is_run(call, tmp_path, line):
    before, script, arguments = re.fullmatch(r"(.*=\S+ )?(\w+)(.*)", line).groups()
    values = dict(each.split("=") for each in (before or "").split())
    dry = call(script, "--dry-run", *arguments.split(), **values)
    assert (dry.stdout, dry.stderr, dry.returncode) == (EXPECTED[line], "", 0)
    assert calls(tmp_path) == []
    assert call(script, *arguments.split(), **values).returncode == 0
    assert calls(tmp_path) == commands(EXPECTED[line])


@pytest.mark.parametrize(
    ("script", "missing"),
    [(script, name) for script, names in REQUIRED.items() for name in names],
)
def test_what_is_missing_is_named(call, tmp_path, script, missing):
    refused = call(script, **{missing: ""})
    assert refused.returncode == 2
    assert f"{script}.sh: {missing} is not set: " in refused.stderr
    assert "such as" in refused.stderr and refused.stderr.count("\n") == 1
    assert calls(tmp_path) == []


@pytest.mark.parametrize(
    ("script", "values"),
    [
        ("run", {"NAME": "--force", "INPUT": "in.jsonl", "CONFIG": "nowhere.yaml"}),
        *(("create", {name: "x"}) for name in ("SPOT", "POLLS", "POLL_SECONDS")),
        *(("setup", {name: "nowhere"}) for name in ("WHEEL", "HF_TOKEN_FILE")),
        *(("logs", {"WORKER": "0;"}), ("xpk", {"MAX_RESTARTS": "-1"})),
    ],
)
def test_what_cannot_be_right_is_listed(call, tmp_path, script, values):
    refused = call(script, **values)
    assert refused.returncode == 2
    for name, value in values.items():
        assert f"{script}.sh: {name} is {value}, expected " in refused.stderr
    assert refused.stderr.count("\n") == len(values)
    assert calls(tmp_path) == []


@pytest.mark.parametrize("script", REQUIRED)
def test_arguments(call, tmp_path, script):
    unknown = call(script, "--dryrun")
    assert unknown.returncode == 2
    assert unknown.stderr == f"{script}.sh: unknown argument --dryrun; see --help\n"
    helped = call(script, "--help", PROJECT="")
    assert (helped.returncode, helped.stderr) == (0, "")
    example = helped.stdout.partition("example:")[2]
    assert [name for name in REQUIRED[script] if f"{name}=" not in example] == []
    if "-- " not in helped.stdout.splitlines()[0]:
        assert call(script, "--", "--flag").returncode == 2
    assert calls(tmp_path) == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_the_scripts_are_sound(path):
    subprocess.run(["bash", "-n", path], check=True)
    assert "\nset -euo pipefail\n" in path.read_text()
    assert os.access(path, os.X_OK) == (path.name != "common.sh")
    assert f"`scripts/{path.name}`" in README


@pytest.mark.parametrize(
    ("states", "polls", "code", "said"),
    [
        (["WAITING_FOR_RESOURCES", "fails", "ACTIVE"], 3, 0, "costs from now on"),
        (["PROVISIONING", "FAILED"], 2, 1, "delete.sh, then create.sh again"),
        (["WAITING_FOR_RESOURCES"], 4, 1, "WAITING_FOR_RESOURCES after 4 polls"),
    ],
)
def test_it_waits_so_long_as_it_may(call, tmp_path, states, polls, code, said):
    (tmp_path / "states").write_text("\n".join(states) + "\n")
    waited = call("create", POLLS="4", POLL_SECONDS="0")
    assert (waited.returncode, said in waited.stderr) == (code, True), waited.stderr
    assert [each[4] for each in calls(tmp_path)] == ["create", *["describe"] * polls]


@pytest.mark.parametrize("script", ["create", "setup", "run", "delete", "xpk"])
def test_what_fails_ends_it(call, tmp_path, script):
    (tmp_path / "broken").touch()
    assert call(script).returncode == 1
    assert len(calls(tmp_path)) == 1


@pytest.mark.skipif(shutil.which("flock") is None, reason="TPU VMs have flock")
def test_a_job_outlives_the_connection_and_is_alone(call, tmp_path):
    jaxspec = tmp_path / "jaxspec-venv/bin/jaxspec"
    jaxspec.parent.mkdir(parents=True)
    jaxspec.write_text(
        "#!/bin/sh\nprintf '%s\\n' \"$@\"; until [ -e stop ]; do sleep 0.05; done\n"
    )
    jaxspec.chmod(0o755)
    output = 'gs://b/it\'s a $(touch pwned) "name".jsonl'
    dry = call("run", "--dry-run", OUTPUT=output)
    remote = commands(dry.stdout)[-1][-1].removeprefix("--command=")

    def start():
        return subprocess.run(
            ["bash", "-c", remote], cwd=tmp_path, capture_output=True, timeout=10
        )

    assert start().returncode == 0
    log, until = tmp_path / "jaxspec.log", time.monotonic() + 10
    while "--distributed" not in log.read_text() and time.monotonic() < until:
        time.sleep(0.02)
    second = start()
    (tmp_path / "stop").touch()
    assert (second.returncode, b"runs here already" in second.stderr) == (1, True)
    given = ["batch", "jaxspec.yaml", "--input", VALUES["INPUT"], "--output", output]
    assert log.read_text().splitlines() == [*given, "--distributed"]
    assert not (tmp_path / "pwned").exists()


def test_the_manifest_of_gke():
    text = (CONFIGS / "gke/jobset.yaml.in").read_text()
    chosen = {"ACCELERATOR": "tpu-v5p-slice", "TOPOLOGY": "2x2x4"}
    values = {**VALUES, **chosen, "HOSTS": "4", "CHIPS": "4"}
    job = yaml.safe_load(string.Template(text).substitute(values))
    assert (job["kind"], job["metadata"]["name"]) == ("JobSet", "batch")
    job = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["parallelism"], job["completions"]) == (4, 4)
    pod = job["template"]["spec"]
    assert pod["nodeSelector"] == {
        f"cloud.google.com/gke-tpu-{name.lower()}": value
        for name, value in chosen.items()
    }
    (container,) = pod["containers"]
    tpus = {"google.com/tpu": 4}
    assert container["resources"] == {"requests": tpus, "limits": tpus}
    assert container["command"][-7:-2] == [
        *("--input", VALUES["INPUT"], "--output", VALUES["OUTPUT"], "--distributed"),
    ]
    assert pod["volumes"][0]["configMap"]["name"] == "batch"
    for name in set(re.findall(r"\$\{(\w+)\}", text)):
        assert f"{name}=" in README


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem
)
def test_the_table_of_slices(path):
    row = re.search(rf"^\| `{path.name}` .*$", README, re.MULTILINE)[0]
    job = yaml.safe_load(path.read_text())
    shape = job["topology"].partition(":")[2]
    chips = math.prod(map(int, shape.split("x")))
    hosts, own = map(int, re.search(r"\| (\d+) x (\d) chips? \|", row).groups())
    assert f"| {chips} ({shape}) |" in row and f", `{shape}`, " in row
    assert hosts * own == chips
    assert f"-{own}t`" in row
    mesh = math.prod(map(int, job["mesh"].split("x")))
    assert mesh <= own or mesh == chips
