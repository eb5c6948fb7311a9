"""Attacks the package until the time is up: identities, command lines, damaged files.

    python scripts/fuzz.py --minutes 30 --seed 7
    python scripts/fuzz.py --only files --seed 7 --first 1234 --count 1     one case again

Three sections, each in a process of its own, two of them at a time:

    identities      the hypothesis tests of tests/, many more examples of each
    command lines   random arguments from the parsers' own options, good and hostile
    files           damaged checkpoints, results, states, pairs and models

Every case is drawn from the seed and its number, so that a finding says how to see it again. The
last line has the counts. The exit code is 0 where nothing was found and the counts were reached.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import inspect
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
LEAST = {"identities": 10_000, "lines": 500, "files": 2_000}
"""Cases in 30 minutes; in less time in proportion."""
_SHARE = {"identities": 0.95, "lines": 0.6, "files": 0.35}
"""Of the time: lines and files take turns on one core while the identities have the other."""
_FINDINGS_SHOWN = 20
_MODULES = ("test_properties", "test_address", "test_prompts", "test_result")


# Sections: each yields a finding, or None, for each case


def identities(seed: int, first: int, deadline: float) -> Iterator[str | None]:
    """Rounds of every hypothesis test, each with a seed of its own."""
    import hypothesis

    tests = {
        f"{name}.{test}": getattr(module, test)
        for name in _MODULES
        for module in [importlib.import_module(name)]
        for test in dir(module)
        if test.startswith("test_")
        and hasattr(getattr(module, test), "hypothesis")
        and not inspect.signature(getattr(module, test)).parameters
    }
    number = first
    while True:
        order = random.Random(seed * 1_000_003 + number).sample(sorted(tests), len(tests))
        for name, test in ((name, tests[name]) for name in order):
            if time.time() > deadline:
                return
            hypothesis.seed(seed * 1_000_003 + number)(test)
            problem = None
            with _counting(test) as calls:
                try:
                    test()
                except Exception as error:
                    notes = "".join(f"\n    {note}" for note in getattr(error, "__notes__", ()))
                    problem = f"round {number}, {name}: {type(error).__name__}: {error}{notes}"
            yield from [None] * (len(calls) - 1)
            yield problem
        number += 1


@contextlib.contextmanager
def _counting(test: Any) -> Iterator[list[int]]:
    """A list to which each example of a hypothesis test adds one entry."""
    plain, calls = test.hypothesis.inner_test, []

    @functools.wraps(plain)
    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return plain(*args, **options)

    test.hypothesis.inner_test = counted
    try:
        yield calls
    finally:
        test.hypothesis.inner_test = plain


def lines(seed: int, first: int, deadline: float) -> Iterator[str | None]:
    """Random command lines, in this process."""
    command_lines = importlib.import_module("command_lines")
    number = first
    with command_lines.Ground() as ground:
        while time.time() < deadline:
            problem = ground.attack(seed * 1_000_003 + number)
            yield problem and f"line {number}: {problem}"
            number += 1


def files(seed: int, first: int, deadline: float) -> Iterator[str | None]:
    """Damaged files, one victim after the other; the model, which is slow, now and then."""
    attacks, zoo = (importlib.import_module(name) for name in ("attacks", "zoo"))
    number = first
    while time.time() < deadline:
        victim = attacks.VICTIMS[number % len(attacks.VICTIMS)]
        if number % 20 == 19:
            victim = attacks.MODEL
        problem = attacks.attack(victim, zoo.scratch() / "victim", seed * 1_000_003 + number)
        yield problem and f"file {number}: {problem}"
        number += 1


SECTIONS = {"identities": identities, "lines": lines, "files": files}


# One section, in this process


def section(name: str, seed: int, first: int, count: int | None, seconds: float) -> int:
    """Runs one section and prints its count and findings as JSON."""
    os.environ["HYPOTHESIS_PROFILE"] = "round"
    sys.path.insert(0, str(TESTS))
    importlib.import_module("conftest")
    found: list[str] = []
    cases = 0
    began = time.time()
    cap = 20 * LEAST[name]
    for problem in SECTIONS[name](seed, first, began + seconds):
        cases += 1
        if problem:
            found.append(problem)
            print(f"{name}: {problem}", file=sys.stderr, flush=True)
        if cases == (count or cap) or len(found) == _FINDINGS_SHOWN:
            break
    summary = {"cases": cases, "findings": len(found), "seconds": time.time() - began}
    print(json.dumps(summary))
    return bool(found)


# All of them


def start(name: str, seed: int, seconds: float) -> subprocess.Popen[str]:
    """A section in a child."""
    argv = [sys.executable, __file__, "--only", name, "--seed", str(seed)]
    argv += ["--minutes", str(seconds / 60)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment)


def finish(child: subprocess.Popen[str]) -> dict[str, Any]:
    """What a child found; one that died is a finding."""
    output, _ = child.communicate()
    try:
        return json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        print(f"a section ended with {child.returncode} and no summary", file=sys.stderr)
        return {"cases": 0, "findings": 1, "seconds": 0.0}


def everything(minutes: float, seed: int) -> int:
    """All sections, and the summary line."""
    seconds = 60 * minutes
    first = start("identities", seed, seconds * _SHARE["identities"])
    found = {}
    for name in ("lines", "files"):
        found[name] = finish(start(name, seed, seconds * _SHARE[name]))
    found["identities"] = finish(first)
    share = min(1.0, minutes / 30)
    short = [name for name, least in LEAST.items() if found[name]["cases"] < share * least]
    wrong = sum(one["findings"] for one in found.values())
    print(
        f"fuzz: {found['identities']['cases']:,} examples of identities, "
        f"{found['lines']['cases']:,} command lines, {found['files']['cases']:,} damaged files; "
        f"{wrong} findings; seed {seed}, {minutes:g} minutes"
    )
    for name in short:
        print(f"fuzz: too few {name}: {found[name]['cases']} of {share * LEAST[name]:.0f}")
    if wrong:
        print(f"fuzz: again: python scripts/fuzz.py --only SECTION --seed {seed} --first NUMBER")
    return 1 if wrong or short else 0


def main() -> int:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="(default: 30)")
    parser.add_argument("--seed", type=int, help="of every case (default: from the clock)")
    parser.add_argument("--only", choices=tuple(SECTIONS), help="one section, in this process")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of --only")
    parser.add_argument("--count", type=int, help="cases of --only")
    given = parser.parse_args()
    seed = int(time.time()) % 100_000 if given.seed is None else given.seed
    if given.only is None:
        return everything(given.minutes, seed)
    return section(given.only, seed, given.first, given.count, 60 * given.minutes)


if __name__ == "__main__":
    sys.exit(main())
