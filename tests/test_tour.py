"""The notebooks: they run, hold the outputs of that run, and are seen without JavaScript too."""

import json
import re
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "scripts"))

pytestmark = pytest.mark.once
FIGURE = "application/vnd.plotly.v1+json"
NUMBER = re.compile(r"[-+−]?\d+\.?\d*(?:e[-+]\d+)?")


DOCS = REPOSITORY / "docs"
# Each notebook, and how many figures it has.
FIGURES = {
    "tour.ipynb": 8,
    "notebooks/ablation.ipynb": 1,
    "notebooks/attribution.ipynb": 1,
    "notebooks/lenses.ipynb": 2,
    "notebooks/path-patching.ipynb": 1,
}

each = pytest.mark.parametrize("name", FIGURES)


def read(name):
    return json.loads((DOCS / name).read_text(encoding="utf-8"))


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def texts_of(cell):
    """What a cell shows in words and numbers: printed text, tables, titles of figures."""
    found = []
    for output in cell["outputs"]:
        if output.get("name") == "stderr":  # warnings of this machine
            continue
        data = output.get("data", {"text/plain": output.get("text", "")})
        if FIGURE in data:
            found.append(" ".join(data[FIGURE]["layout"]["meta"]["heading"]))
        else:
            found.append("".join(data.get("text/html", data["text/plain"])))
    return " ".join("\n".join(found).split())  # a stream may come in one piece or in several


def test_no_notebook_is_left_out():
    assert {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.ipynb")} == set(FIGURES)


@each
def test_every_cell_was_run_in_turn_and_none_failed(name):
    kept = read(name)
    assert [cell["execution_count"] for cell in code_cells(kept)] == list(
        range(1, len(code_cells(kept)) + 1)
    )
    kinds = {output["output_type"] for cell in code_cells(kept) for output in cell["outputs"]}
    assert kinds <= {"stream", "display_data", "execute_result"}


@each
def test_every_figure_has_a_picture_that_needs_no_script(name):
    kept = read(name)
    figures = [
        output["data"]
        for cell in code_cells(kept)
        for output in cell["outputs"]
        if FIGURE in output.get("data", {})
    ]
    assert len(figures) >= FIGURES[name]
    assert all(len(data["image/png"]) > 5000 for data in figures)
    assert "<script" not in json.dumps(kept)


@pytest.mark.full
@each
def test_it_runs_in_minutes_and_shows_the_numbers_that_it_holds(name):
    kept = read(name)
    tour = pytest.importorskip("tour", reason="nbclient and ipykernel are not installed")
    start = time.monotonic()
    fresh = tour.execute(DOCS / name)
    assert time.monotonic() - start < 300
    for old, new in zip(code_cells(kept), code_cells(fresh), strict=True):
        before, now = texts_of(old), texts_of(new)
        assert NUMBER.sub("#", before) == NUMBER.sub("#", now), old["source"]
        pairs = zip(NUMBER.findall(before), NUMBER.findall(now), strict=True)
        for one, other in pairs:
            one, other = float(one.replace("−", "-")), float(other.replace("−", "-"))
            assert one == pytest.approx(other, rel=1e-2, abs=2e-3), old["source"]
