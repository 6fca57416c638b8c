"""Notebooks: paired with their scripts, stored with outputs, and really executed."""

import pathlib

import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
# What each one prints if it has shown what it set out to show.
SHOWS = {
    "01_quickstart": ["same tokens: True"],
    "02_losslessness": [
        "within 0.01 of the target: True",
        "control within 0.01: False",
    ],
}
NEED_THE_DEFAULT_MODEL = {"01_quickstart"}
pytestmark = [
    pytest.mark.notebook,
    pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem),
]


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def assert_shows(path, notebook):
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    for line in SHOWS[path.stem]:
        assert line in text.splitlines()


def test_the_script_and_the_notebook_say_the_same(path):
    import jupytext

    cells = [
        [(cell.cell_type, cell.source) for cell in jupytext.read(file).cells]
        for file in (path, path.with_suffix(".py"))
    ]
    assert cells[0] == cells[1]


def test_outputs_are_stored(path):
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.output_type == "error"]
    streams = [o for o in outputs if o.output_type == "stream" and o.name == "stderr"]
    assert not streams, "a stored notebook shows no warnings"
    assert_shows(path, notebook)


def test_it_runs(path, tmp_path):
    import nbclient
    import nbformat

    if path.stem in NEED_THE_DEFAULT_MODEL:
        from tests import models_on_disk

        models_on_disk.path("smollm2-135m-instruct")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    assert_shows(path, notebook)
