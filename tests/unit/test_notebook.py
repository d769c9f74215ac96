"""The notebook runs from top to bottom."""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.nightly
def test_the_notebook_runs() -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(EXAMPLES / "what_a_scheme_does.ipynb", 4)
    client.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": EXAMPLES}}).execute()
    printed = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", []))
    assert "gradients - updates - residuals: 0.0e+00" in printed
    assert (
        sum("image/png" in out.get("data", {}) for c in notebook.cells for out in c.get("outputs", [])) == 2
    )
