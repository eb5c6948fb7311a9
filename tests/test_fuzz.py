"""The fuzz driver: what it runs, and that it sees what it is there to see."""

import importlib.util
import itertools
import json
import math
import random
import sys
from pathlib import Path

import command_lines
import pytest

pytestmark = [pytest.mark.once, pytest.mark.full]

PATH = Path(__file__).resolve().parent.parent / "scripts" / "fuzz.py"


@pytest.fixture(scope="module")
def fuzz():
    spec = importlib.util.spec_from_file_location("fuzz", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ground():
    with command_lines.Ground() as made:
        yield made


def test_a_seed_and_a_number_are_one_case(ground):
    lines = [ground.line(random.Random(f"line {seed}")) for seed in range(1000)]
    assert lines == [ground.line(random.Random(f"line {seed}")) for seed in range(1000)]
    assert {word for line in lines for word in line[:1]} >= {
        "dla",
        "ablate",
        "path-patch",
        "tuned-lens",
        "stream",
    }
    flags = {word for line in lines for word in line if word.startswith("--")}
    assert flags >= {"--json", "--csv", "--html", "--joint", "--dtype", "--mid", "--debug"}


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: 1, "exit code 1"),
        (lambda: 2, "0 lines on stderr, 0 of them an error"),
        (lambda: print("Traceback (most recent call last):", file=sys.stderr) or 0, "a traceback"),
        (lambda: print("\x1b[31m") or 0, r"stdout holds \['\\\\x1b'\]"),
    ],
)
def test_a_line_that_misbehaves_is_a_finding_that_shows_the_line(
    monkeypatch, ground, does, message
):
    monkeypatch.setattr(command_lines, "main", lambda argv: does())
    seed = next(s for s in range(99) if "--debug" not in ground.line(random.Random(f"line {s}")))
    with pytest.raises(AssertionError, match=message):
        problem = ground.attack(seed)
        assert problem is None, problem


@pytest.mark.parametrize(
    ("place", "code", "message"),
    [
        ("out/old.json", 2, "old.json was written by a line that failed"),
        ("out/new.json", 0, "new.json is not whole"),
        ("out/.new.json.x1", 0, "new.json.x1 was left"),
        ("in/text.txt", 0, "an input file was changed"),
    ],
)
def test_files_that_a_line_should_not_touch_are_findings(monkeypatch, ground, place, code, message):
    def write(argv):
        (ground.folder / place).write_text("{", encoding="utf-8")
        if code:
            print("x: error: y", file=sys.stderr)
        return code

    monkeypatch.setattr(command_lines, "main", write)
    assert message in ground.attack(0)


def test_files_are_damaged_one_kind_after_the_other(fuzz):
    found = list(itertools.islice(fuzz.files(seed=1, first=0, deadline=math.inf), 28))
    assert found == [None] * 28


def test_examples_of_identities_are_counted_and_a_failure_is_a_finding(fuzz, monkeypatch):
    import test_address
    from hypothesis import given, settings
    from hypothesis import strategies as st

    @given(st.integers())
    @settings(max_examples=7, database=None)
    def test_planted(number):
        assert number != 0

    monkeypatch.setattr(fuzz, "_MODULES", ("test_address",))
    for name in [n for n in dir(test_address) if n.startswith("test_")]:
        monkeypatch.delattr(test_address, name)
    monkeypatch.setattr(test_address, "test_planted", test_planted, raising=False)
    found = list(itertools.islice(fuzz.identities(5, 0, math.inf), 100))
    problems = [problem for problem in found if problem]
    assert problems and "round 0, test_address.test_planted: AssertionError" in problems[0]


def test_a_section_with_a_finding_fails_and_says_how_many_cases_it_ran(fuzz, monkeypatch, capsys):
    monkeypatch.setenv("HYPOTHESIS_PROFILE", "default")  # and put back
    cases = [None, "case 1: wrong", None]
    monkeypatch.setitem(fuzz.SECTIONS, "files", lambda *args: iter(cases))
    assert fuzz.section("files", 0, 0, None, 1.0) == 1
    out, err = capsys.readouterr()
    assert {k: v for k, v in json.loads(out).items() if k != "seconds"} == {
        "cases": 3,
        "findings": 1,
    }
    assert "files: case 1: wrong" in err


@pytest.mark.parametrize(("cases", "findings", "code"), [(10**5, 0, 0), (10**5, 1, 1), (100, 0, 1)])
def test_the_summary_counts_and_fails_on_findings_and_on_too_few(
    fuzz, monkeypatch, capsys, cases, findings, code
):
    monkeypatch.setattr(fuzz, "start", lambda *args: None)
    monkeypatch.setattr(fuzz, "finish", lambda child: {"cases": cases, "findings": findings})
    assert fuzz.everything(30, 7) == code
    out = capsys.readouterr().out
    assert f"{cases:,} command lines" in out and "seed 7, 30 minutes" in out
    assert ("too few" in out) == (cases == 100) and ("again:" in out) == (findings > 0)
