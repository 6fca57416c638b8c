"""Imports go one way, and importing jaxspec costs no I/O library."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent / "jaxspec"
# Each layer may import the layers before it, never one after it.
LAYERS = [
    {
        "assets",
        "distributed",
        "rendezvous",
        "errors",
        "pictures",
        "progress",
        "ring",
        "scratch",
        "split",
        "types",
    },
    {"core"},
    {"cache"},
    {"rows", "sharding"},
    {"models"},
    {"drafters", "decoding"},
    {"checkpoints", "tokenizer", "chat_template"},
    {
        "loading",
        "programs",
        "pins",
        "prompt_records",
        "row_options",
        "requests",
        "results",
        "batching",
    },
    {"stopping", "arguments", "acceptance_watch", "shipped"},
    {"drafter_names"},
    {"generator"},
    {"certify", "train", "job"},
    {"tpu", "batch"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# Protocols only: the loop sees no concrete model or drafter, nor a drafter the loop.
# A drafter may be made of a model's layers, as a trained head is.
FORBIDDEN = {"decoding": {"models", "drafters"}, "drafters": {"decoding"}}
IO_LIBRARIES = {
    "tokenizers",
    "gguf",
    "safetensors",
    "huggingface_hub",
    "jinja2",
    "rich",
}


def imports_of(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def wrong_imports(package, source):
    for name in imports_of(ast.parse(source)):
        parts = name.split(".")
        if parts[0] != "jaxspec" or parts[1] not in LEVEL:
            continue
        imported = parts[1]
        is_later = LEVEL[imported] > LEVEL[package]
        if is_later or imported in FORBIDDEN.get(package, ()):
            yield name


def package_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


MODULES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT) + sorted(
    path for path in ROOT.glob("*.py") if path.name != "__init__.py"
)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_only_what_stands_before_it(path):
    assert package_of(path) in LEVEL, "a new module needs its place in LAYERS"
    assert not list(wrong_imports(package_of(path), path.read_text()))


def test_core_knows_no_flax():
    for path in (ROOT / "core").glob("*.py"):
        assert not [n for n in imports_of(ast.parse(path.read_text())) if "flax" in n]


def test_a_wrong_import_is_seen():
    source = "from jaxspec.models.decoder import Decoder"
    assert list(wrong_imports("decoding", source)) == ["jaxspec.models.decoder.Decoder"]
    assert list(wrong_imports("core", "from jaxspec import cache"))


def test_importing_jaxspec_loads_no_io_library():
    # flax has its own taste in imports (rich, IPython): only what we add counts.
    code = (
        "import sys, flax.nnx, jaxtyping; before = set(sys.modules); import jaxspec;"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "jaxspec" in run.stdout.split()
    assert not IO_LIBRARIES & set(run.stdout.split())
