"""Runs docs/tour.ipynb and docs/notebooks again and keeps their outputs: `make tour`.

Every figure is kept twice, for plotly and as a PNG that needs no script (drawn by kaleido with
Chrome or Chromium). `execute` alone draws no PNG and needs neither.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

DOCS = Path(__file__).resolve().parent.parent / "docs"
NOTEBOOKS = [DOCS / "tour.ipynb", *sorted((DOCS / "notebooks").glob("*.ipynb"))]
FIGURE = "application/vnd.plotly.v1+json"


def execute(path: Path, *, renderer: str = "plotly_mimetype") -> Any:
    """A notebook with the outputs of a fresh run.

    Args:
        path: the notebook.
        renderer: what plotly shows a figure as.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    environment = {**os.environ, "PLOTLY_RENDERER": renderer, "TQDM_DISABLE": "1"}
    client = NotebookClient(notebook, timeout=300, record_timing=False)
    client.execute(env=environment, cwd=str(path.parent))
    return notebook


def main() -> None:
    """Writes the notebooks with their outputs: those that are named, or all."""
    for path in map(Path, sys.argv[1:] or NOTEBOOKS):
        keep_outputs(path)


def keep_outputs(path: Path) -> None:
    """Writes a notebook with its outputs."""
    notebook = execute(path.resolve(), renderer="plotly_mimetype+png")
    for cell in notebook.cells:
        if "outputs" in cell:  # warnings name folders of this machine
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
        for output in cell.get("outputs", []):
            figure = output.get("data", {}).get(FIGURE)
            if figure is not None and "image/png" not in output["data"]:
                sys.exit("a figure has no PNG: kaleido needs Chrome or Chromium")
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
