"""The notebooks of ``examples/`` run from the first cell to the last, in an empty folder."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_a_notebook_runs_and_tells_no_path_of_the_machine_that_wrote_it(file, tmp_path, monkeypatch):
    notebook = nbformat.read(file, as_version=4)
    shown = str([cell.get("outputs") for cell in notebook.cells])
    assert "/tmp/" not in shown and "/home/" not in shown and "Traceback" not in shown
    monkeypatch.setenv("FEDTAR_HOME", str(tmp_path / "home"))
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
