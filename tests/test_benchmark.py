"""The benchmark's page: rows measured now take the place of earlier ones, and say when."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import benchmark  # noqa: E402

pytestmark = pytest.mark.once


def row(name, peer, commit, **numbers):
    row = {"row": name, "peer": peer, "ours": 1.0, "difference": 0.0, "commit": commit}
    return {**row, "repeats": 3, **numbers}


OLD = {
    "machine": "old",
    "rows": [row("a", "x", "c0ffee"), row("a", "y", "c0ffee"), row("b", "x", "c0ffee")],
    "startup": [{"row": "import", "seconds": 1.0, "ratio": 1.0, "commit": "c0ffee", "repeats": 3}],
}
NEW = {"machine": "new", "rows": [row("a", "y", "beef01", ours=2.0), row("c", "x", "beef01")]}


def test_rows_of_the_same_name_and_peer_are_replaced_and_others_kept():
    found = benchmark.merged(OLD, NEW)
    assert [(r["row"], r["peer"], r["commit"], r["ours"]) for r in found["rows"]] == [
        ("a", "x", "c0ffee", 1.0),
        ("a", "y", "beef01", 2.0),
        ("b", "x", "c0ffee", 1.0),
        ("c", "x", "beef01", 1.0),
    ]
    assert found["startup"] == OLD["startup"] and found["machine"] == "new"


def test_a_page_has_the_rows_between_its_marks_and_beside_it(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- hooked: measured --> <!-- hooked: end -->\nafter\n", "utf-8")
    for found in (OLD, NEW):
        benchmark.write_page(page, "hooked", found)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert text.count("| beef01 (3) |") == 2 and text.count("| c0ffee (3) |") == 3
    kept = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
    assert kept["hooked"] == benchmark.merged(OLD, NEW)
    with pytest.raises(SystemExit, match="has no lines"):
        benchmark.write_page(page, "bridge", NEW)


def test_the_page_of_this_project_is_what_its_numbers_say(tmp_path):
    docs = Path(__file__).resolve().parents[1] / "docs"
    text = (docs / "performance.md").read_text(encoding="utf-8")
    numbers = json.loads((docs / "performance.json").read_text(encoding="utf-8"))
    for found in numbers.values():
        assert benchmark.as_markdown(found).strip() in text
