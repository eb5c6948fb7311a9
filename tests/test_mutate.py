"""The mutation driver: what tests notice is killed, what they don't notice survives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.once, pytest.mark.full]

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "mutate.py"
TOY = """
def larger(a, b):
    if a > b:
        return a
    return b


def count(n):
    steps = []
    while len(steps) < n:
        steps.append(n)
    return steps


def unused(x):
    return x + 1
"""
TESTS = """
import pytest
import toy


def test_larger():
    assert toy.larger(1, 2) == 2 and toy.larger(3, 1) == 3


@pytest.mark.full
def test_count():
    assert toy.count(2) == [2, 2]
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What happened to every mutant of the toy, and what was printed."""
    folder = tmp_path_factory.mktemp("mutate")
    (folder / "toy.py").write_text(TOY)
    (folder / "test_toy.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = full\n")
    words = ["--tier", "all", "--targets", "toy.py", "--tests", "test_toy.py", "--json", "o.json"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "toy.py").read_text() == TOY
    rows = json.loads((folder / "o.json").read_text())
    return {row["shown"]: row for row in rows}, done.stdout


@pytest.mark.parametrize(
    ("change", "killer"),
    [
        ("return a  ->  return None", "test_toy.py::test_larger"),
        ("return b  ->  return None", "test_toy.py::test_larger"),
        ("a > b  ->  a >= b", None),
        ("len(steps) < n  ->  len(steps) <= n", "test_toy.py::test_count"),
        ("steps.append(n)  ->  pass", "test_toy.py::test_count"),  # which never ends
        ("x + 1  ->  x - 1", None),
    ],
)
def test_a_mutant_is_killed_by_the_test_that_notices_it(found, change, killer):
    row = found[0][change]
    assert row["killed_by"] == killer
    assert row["by_full"] == (killer == "test_toy.py::test_count")
    assert row["tests"] == (0 if "x + 1" in change else 1)


def test_survivors_and_shares_are_reported(found):
    rows, out = found
    killed = [row for row in rows.values() if row["killed_by"]]
    quick = [row for row in killed if not row["by_full"]]
    assert "survived     toy.py:3  a > b  ->  a >= b" in out
    assert "no test runs toy.py:16  x + 1  ->  x - 1" in out
    assert "full alone   toy.py:11  steps.append(n)  ->  pass  (test_toy.py::test_count)" in out
    assert f"{len(rows)} mutants, {len(killed)} killed; the quick tier kills {len(quick)}:" in out
    assert out.rstrip().endswith(
        f"{len(quick) / len(rows):.1%} of all, and "
        f"{len(quick) / len(killed):.1%} of those that these tests kill"
    )
