"""Mutation testing: changes the package in small ways, and says which changes no test notices.

    python scripts/mutate.py --sample 200 --seed 0            # the tests of `make test`
    python scripts/mutate.py --sample 200 --seed 0 --tier all # then those of `make test-all` too

A mutant is one change inside one function: another comparison or operator, another number, a
condition negated, a statement left out, None returned. The tests are collected once. A first pass
notes the lines that each test runs. Then every mutant is tried in a fork of this process, where
the function gets its changed code in memory; no file is touched. Only tests that run the changed
line are run, the quick tier first, the fastest first, until one fails. Code that runs at import
(defaults, decorators, constants of modules) is not mutated, and processes that a test starts
don't have the mutant.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import gc
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "resid_patching"
TARGETS = ("rerun", "paths", "ablation", "attribution.py", "decomposition.py")
TARGETS += ("lens/steps.py", "lens/loop.py", "lens/ridge.py")
SWAPS: dict[type, type] = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot}
SWAPS |= {ast.In: ast.NotIn, ast.Add: ast.Sub, ast.Mult: ast.Div, ast.BitAnd: ast.BitOr}
SWAPS |= {ast.And: ast.Or}
SWAPS |= {new: old for old, new in SWAPS.items()} | {ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult}
CPU_LIMIT, WALL_LIMIT = (5.0, 5.0), 600
"""A test has so many CPU seconds and so many times its own; so many seconds on the clock."""
NOT_APPLIED = "not applied"
TIERS = {"quick": "not real and not gpt2 and not full", "all": "not real and not gpt2"}


@dataclass(frozen=True)
class Mutant:
    """One change: bytes start to end of a file become `new`, in a statement on lines first to last.

    `text` is what is shown: the old code and the new.
    """

    file: str
    line: int
    first: int
    last: int
    start: int
    end: int
    new: str
    text: str

    def source(self) -> bytes:
        """The file with the change; all other lines keep their numbers."""
        old = Path(self.file).read_bytes()
        return old[: self.start] + self.new.encode() + old[self.end :]


def mutants_of(file: Path) -> Iterator[Mutant]:
    """Every mutant of a file."""
    source = file.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def made(node: Any, changed: ast.AST, lines: tuple[int, int]) -> Mutant:
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        new, rest = ast.unparse(changed), "\n" * (node.end_lineno - node.lineno)
        code = f"{new}{rest}" if isinstance(node, ast.stmt) else f"({new}{rest})"
        old = " ".join(source[start:end].decode().split())
        return Mutant(str(file), node.lineno, *lines, start, end, code, f"{old}  ->  {new}")

    for node, lines in inside_functions(ast.parse(source)):
        for part, changed in changes_of(node):
            yield made(part, changed, lines)


def inside_functions(tree: ast.AST) -> Iterator[tuple[Any, tuple[int, int]]]:
    """Every node of the functions' bodies, with the lines of its statement, or of its head."""

    def walk(node: Any, lines: tuple[int, int] | None) -> Iterator[tuple[Any, tuple[int, int]]]:
        if lines and isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            first = getattr(node, "lineno", lines[0])
            body = getattr(node, "body", None) or getattr(node, "cases", None)
            last = max(first, _line(body[0]) - 1) if body else node.end_lineno
            lines = first, last
        if lines:
            yield node, lines
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert):
            return  # what errors say
        is_function = isinstance(node, ast.FunctionDef)
        for name, value in ast.iter_fields(node):
            if name == "annotation" or (is_function and name != "body"):
                continue  # code that runs at import
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child, (0, 0) if is_function else lines)

    return walk(tree, None)


def _line(node: Any) -> int:
    return node.pattern.lineno if isinstance(node, ast.match_case) else node.lineno


def changes_of(node: Any) -> Iterator[tuple[Any, ast.AST]]:
    """Parts of a node, and what may stand in their place."""

    def with_(**fields: Any) -> tuple[Any, ast.AST]:
        changed = copy.copy(node)
        for name, value in fields.items():
            setattr(changed, name, value)
        return node, changed

    match node:
        case ast.Compare(ops=[op, *rest]) if type(op) in SWAPS:
            yield with_(ops=[SWAPS[type(op)](), *rest])
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPS:
            yield with_(op=SWAPS[type(op)]())
        case ast.BoolOp(op=op):
            yield with_(op=SWAPS[type(op)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield node, operand
        case ast.Constant(value=bool() as value):
            yield node, ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield node, ast.Constant(value + 1)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            if isinstance(test, ast.Name | ast.Attribute | ast.Call):
                yield test, ast.UnaryOp(ast.Not(), test)
        case ast.Return(value=value) if value and not isinstance(value, ast.Constant):
            yield node, ast.Return(ast.Constant(None))
        case ast.Slice(lower=lower, upper=upper):
            for bound in (lower, upper):
                if bound and not isinstance(bound, ast.Constant):
                    yield bound, ast.BinOp(bound, ast.Add(), ast.Constant(1))
        case ast.Subscript(slice=ast.Name() as index):
            yield index, ast.BinOp(index, ast.Sub(), ast.Constant(1))
    match node:
        case ast.Expr(value=ast.Call() | ast.Yield() | ast.YieldFrom()) | ast.AugAssign():
            yield node, ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.Raise():
            yield node, ast.Pass()
        case ast.Continue() | ast.Break():
            yield node, ast.Pass()


def apply(mutant: Mutant) -> bool:
    """Give the live functions their changed code; False where no function has another."""
    module = next(m for m in sys.modules.values() if getattr(m, "__file__", "") == mutant.file)
    compiled = module.__spec__.loader.source_to_code  # type: ignore[union-attr]
    old = dict(_codes(compiled(Path(mutant.file).read_bytes(), mutant.file)))
    new = dict(_codes(compiled(mutant.source(), mutant.file)))
    changed = {key: code for key, code in new.items() if code != old.get(key)}
    n_changed = 0
    for function in [f for f in gc.get_objects() if isinstance(f, types.FunctionType)]:
        code = function.__code__
        replacement = changed.get((code.co_qualname, code.co_firstlineno))
        if code.co_filename == mutant.file and replacement is not None:
            if replacement.co_freevars == code.co_freevars:
                function.__code__ = replacement
                n_changed += 1
    return n_changed > 0


def _codes(code: types.CodeType) -> Iterator[tuple[tuple[str, int], types.CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield (constant.co_qualname, constant.co_firstlineno), constant
            yield from _codes(constant)


def in_forks(works: list[Callable[[], Any]], jobs: int, folder: Path) -> Iterator[tuple[int, Any]]:
    """Do each work in a fork of its own, some at a time; its number and what it returned.

    What a fork returns passes through JSON. One that is killed by a signal returns its name.
    """
    waiting, running = list(enumerate(works)), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            number, work = waiting.pop(0)
            (folder / str(number)).mkdir()
            pid = os.fork()
            if pid == 0:
                _do(work, folder / str(number))
            running[pid] = number
        pid, status = os.wait()
        number = running.pop(pid)
        if os.WIFSIGNALED(status):
            found = signal.Signals(os.WTERMSIG(status)).name
        else:
            found = json.loads((folder / str(number) / "found").read_text(encoding="utf-8"))
        shutil.rmtree(folder / str(number))
        if isinstance(found, dict) and "error" in found:
            raise RuntimeError(found["error"])
        yield number, found


def _do(work: Callable[[], Any], folder: Path) -> None:
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        tempfile.tempdir = str(folder)
        (folder / "found").write_text(json.dumps(work()), encoding="utf-8")
    except BaseException:
        (folder / "found").write_text(json.dumps({"error": traceback.format_exc()}))
    finally:
        os._exit(0)


class Mutating:
    """A pytest plugin: it collects the tests, and tries mutants in place of running them."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.files = [file for t in options.targets for file in sorted(t.rglob("*.py")) or [t]]
        self.failed: str | None = None
        self.report: dict[str, Any] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = report.nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        full = {name for name, item in items.items() if item.get_closest_marker("full")}
        tests = self._map(session.items)
        mutants = [mutant for file in self.files for mutant in mutants_of(file)]
        if self.options.sample:
            mutants = random.Random(self.options.seed).sample(mutants, self.options.sample)
        order = sorted(tests, key=lambda name: (name in full, tests[name]["seconds"]))
        touching = [[name for name in order if _runs(tests[name], mutant)] for mutant in mutants]
        works = [
            functools.partial(self._try, mutant, [items[name] for name in names], tests)
            for mutant, names in zip(mutants, touching, strict=True)
        ]
        found: dict[int, str | None] = {}
        (self.folder / "mutants").mkdir()
        for number, killer in in_forks(works, self.options.jobs, self.folder / "mutants"):
            found[number] = killer
            print(
                f"[{len(found)}/{len(mutants)}] {_shown(asdict(mutants[number]))}: {killer}",
                flush=True,
            )
        self.report = {"tests": len(tests), "left_out": sorted(items.keys() - tests.keys())}
        self.report["mutants"] = [
            {
                **asdict(mutant),
                "tests": len(names),
                "killed_by": found[number],
                "by_quick": found[number] is not None and found[number] not in full,
            }
            for number, (mutant, names) in enumerate(zip(mutants, touching, strict=True))
        ]
        return True

    def _map(self, items: list[pytest.Item]) -> dict[str, Any]:
        """Of every test that passes: its CPU seconds and the lines that it runs, by file."""
        by_file: dict[Any, list[pytest.Item]] = {}
        for item in items:
            by_file.setdefault(item.path, []).append(item)
        works = [functools.partial(self._traced, some) for some in by_file.values()]
        (self.folder / "map").mkdir()
        tests: dict[str, Any] = {}
        for number, (_, found) in enumerate(
            in_forks(works, self.options.jobs, self.folder / "map")
        ):
            print(f"[{number + 1}/{len(works)}] files of tests mapped", flush=True)
            for name, test in found.items():
                tests[name] = {**test, "lines": set(map(tuple, test["lines"]))}
        return tests

    def _traced(self, items: list[pytest.Item]) -> dict[str, Any]:
        files, lines = set(map(str, self.files)), set()

        def each_call(frame: types.FrameType, *_: Any) -> Any:
            return each_line if frame.f_code.co_filename in files else None

        def each_line(frame: types.FrameType, event: str, _: Any) -> Any:
            lines.add((frame.f_code.co_filename, frame.f_lineno))
            return each_line

        threading.settrace(each_call)
        sys.settrace(each_call)
        found = {}
        for item, after in itertools.pairwise([*items, None]):
            lines.clear()
            self.failed, began = None, time.process_time()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if self.failed is None:
                seconds = time.process_time() - began
                found[item.nodeid] = {"seconds": seconds, "lines": list(lines)}
        return found

    def _try(self, mutant: Mutant, items: list[pytest.Item], tests: dict[str, Any]) -> str | None:
        """The test that fails with this mutant."""
        if items and not apply(mutant):
            return NOT_APPLIED
        for item, after in itertools.pairwise([*items, None]):
            seconds, times = CPU_LIMIT
            signal.setitimer(signal.ITIMER_PROF, seconds + times * tests[item.nodeid]["seconds"])
            signal.alarm(WALL_LIMIT)
            try:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            except (KeyboardInterrupt, pytest.exit.Exception):
                return item.nodeid
            if self.failed is not None:
                return self.failed
        return None


def _runs(test: dict[str, Any], mutant: Mutant) -> bool:
    return any((mutant.file, n) in test["lines"] for n in range(mutant.first, mutant.last + 1))


def summary(report: dict[str, Any]) -> str:
    """The figures, and what survived."""
    mutants = [m for m in report["mutants"] if m["killed_by"] != NOT_APPLIED]
    by_quick = [m for m in mutants if m["by_quick"]]
    killed = [m for m in mutants if m["killed_by"]]
    alive = [m for m in mutants if not m["killed_by"]]
    lines = [f"{len(report['left_out'])} tests left out: they fail, skip or don't return unchanged"]
    lines += [f"survived    {_shown(m)}" for m in alive if m["tests"]]
    lines += [f"not run     {_shown(m)}" for m in alive if not m["tests"]]
    lines += [f"full alone  {_shown(m)}  ({m['killed_by']})" for m in killed if not m["by_quick"]]
    untouched = sum(not m["tests"] for m in alive)
    lines += [
        f"{len(mutants)} mutants: {len(killed)} killed, {len(alive) - untouched} survived, "
        f"{untouched} on lines that no test runs",
        f"the quick tier kills {len(by_quick)} of {len(mutants)} "
        f"({len(by_quick) / max(1, len(mutants)):.1%}), "
        f"{len(by_quick) / max(1, len(killed)):.1%} of those that these tests kill",
    ]
    return "\n".join(lines)


def _shown(mutant: dict[str, Any]) -> str:
    return f"{os.path.relpath(mutant['file'], ROOT)}:{mutant['line']}  {mutant['text']}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tier", choices=TIERS, default="quick", help="which tests (quick)")
    parser.add_argument("--sample", type=int, help="so many mutants, drawn at random (all)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="forks at a time (cores)")
    parser.add_argument("--json", type=Path, help="write what happened to every mutant here")
    parser.add_argument("--targets", type=Path, nargs="+", help="files or folders to mutate")
    parser.add_argument("--tests", nargs="+", default=[str(ROOT / "tests")], help="for pytest")
    options = parser.parse_args()
    options.targets = [t.resolve() for t in options.targets or [PACKAGE / t for t in TARGETS]]
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        plugin = Mutating(options, Path(folder))
        words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--capture=sys"]
        code = pytest.main([*words, "-m", TIERS[options.tier], *options.tests], plugins=[plugin])
    if not plugin.report:
        return int(code)
    if options.json:
        options.json.write_text(json.dumps(plugin.report, indent=1), encoding="utf-8")
    print(summary(plugin.report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
