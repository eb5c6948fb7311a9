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
import contextlib
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
MORE_SECONDS, TIMES, WALL_LIMIT = 5.0, 5.0, 600
"""A test has this many times its own CPU seconds and so many more; seconds by the clock."""
NOT_APPLIED = "not applied"
TIERS = {"quick": "not real and not gpt2 and not full", "all": "not real and not gpt2"}


@dataclass(frozen=True)
class Mutant:
    """A change: bytes start to end of a file become `new`, in a statement on lines first to last.

    `shown` is the old code and the new.
    """

    file: str
    line: int
    first: int
    last: int
    start: int
    end: int
    new: str
    shown: str

    def source(self) -> bytes:
        """The file with the change; all lines keep their numbers."""
        old = Path(self.file).read_bytes()
        return old[: self.start] + self.new.encode() + old[self.end :]

    def __str__(self) -> str:
        return f"{os.path.relpath(self.file)}:{self.line}  {self.shown[:120]}"


def mutants_of(file: Path) -> Iterator[Mutant]:
    """Every mutant of a file."""
    source = file.read_bytes()
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    bodies = [f.body for f in ast.walk(ast.parse(source)) if isinstance(f, ast.FunctionDef)]
    inside = [node for body in bodies for top in body for node in ast.walk(top)]
    for statement in {
        (n.lineno, n.col_offset): n for n in inside if isinstance(n, ast.stmt)
    }.values():
        if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.Assert):
            continue
        parts = list(parts_of(statement))
        last = max(getattr(part, "end_lineno", 0) for part in parts[1:] or parts)
        for node, changed in itertools.chain.from_iterable(map(changes_of, parts)):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            new, rest = ast.unparse(changed), "\n" * (node.end_lineno - node.lineno)
            code = f"{new}{rest}" if isinstance(node, ast.stmt) else f"({new}{rest})"
            old = " ".join(source[start:end].decode().split())
            lines = node.lineno, statement.lineno, last
            yield Mutant(str(file), *lines, start, end, code, f"{old}  ->  {new}")


def parts_of(node: ast.AST) -> Iterator[ast.AST]:
    """A statement and the expressions in it, without the statements in it and what errors say."""
    yield node
    if not isinstance(node, ast.Raise | ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            is_guard = isinstance(child, ast.keyword) and child.arg == "strict"  # of zip
            is_left_out = is_guard or child is getattr(node, "annotation", None)
            if not isinstance(child, ast.stmt) and not is_left_out:
                yield from parts_of(child)


def changes_of(node: Any) -> Iterator[tuple[Any, ast.AST]]:
    """Parts of a node, and what may stand in their place."""
    if type(op := getattr(node, "op", None)) in SWAPS:
        yield node, _with(node, op=SWAPS[type(op)]())
    match node:
        case ast.Compare(ops=[op, *rest]) if type(op) in SWAPS:
            yield node, _with(node, ops=[SWAPS[type(op)](), *rest])
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
        case (
            ast.Expr(value=ast.Call() | ast.Yield() | ast.YieldFrom())
            | ast.Assign(targets=[ast.Attribute() | ast.Subscript()])
            | (ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break())
        ):
            yield node, ast.Pass()


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    return type(node)(**dict(ast.iter_fields(node)) | fields)


def apply(mutant: Mutant) -> bool:
    """Give the live functions their changed code; False where no function has another."""
    module = next(m for m in sys.modules.values() if getattr(m, "__file__", "") == mutant.file)
    compiled = module.__spec__.loader.source_to_code  # type: ignore[union-attr]
    old = dict(_codes(compiled(Path(mutant.file).read_bytes(), mutant.file)))
    new = dict(_codes(compiled(mutant.source(), mutant.file)))
    n_changed = 0
    for function in [f for f in gc.get_objects() if isinstance(f, types.FunctionType)]:
        code = function.__code__
        key = (code.co_qualname, code.co_firstlineno)
        if code.co_filename == mutant.file and key in new and new[key] != old[key]:
            if new[key].co_freevars == code.co_freevars:
                function.__code__ = new[key]
                n_changed += 1
    return n_changed > 0


def _codes(code: types.CodeType) -> Iterator[tuple[tuple[str, int], types.CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield (constant.co_qualname, constant.co_firstlineno), constant
            yield from _codes(constant)


def in_forks(works: list[Callable[[Path], Any]], jobs: int) -> Iterator[tuple[int, Any]]:
    """Do each work in a fork of its own, some at a time; its number and what it wrote to its file.

    A work is given the path of its file. Temporary files of the fork lie beside it.
    """
    waiting, running = list(enumerate(works)), {}
    with tempfile.TemporaryDirectory(prefix="mutate-") as scratch:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, work = waiting.pop(0)
                folder = Path(tempfile.mkdtemp(dir=scratch))
                pid = os.fork()
                if pid == 0:
                    _do(work, folder)
                running[pid] = number, folder
            pid, status = os.wait()
            number, folder = running.pop(pid)
            if os.WIFEXITED(status) and os.WEXITSTATUS(status):
                raise RuntimeError((folder / "error").read_text(encoding="utf-8"))
            found = json.loads((folder / "found").read_text(encoding="utf-8"))
            shutil.rmtree(folder)
            yield number, found


def _do(work: Callable[[Path], None], folder: Path) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(null, output)
    tempfile.tempdir = str(folder)
    try:
        work(folder / "found")
    except BaseException:
        (folder / "error").write_text(traceback.format_exc(), encoding="utf-8")
    os._exit((folder / "error").exists())


class Mutating:
    """A pytest plugin: it collects the tests, and tries mutants in place of running them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.files = [file for t in options.targets for file in sorted(t.rglob("*.py")) or [t]]
        self.failed: str | None = None
        self.report: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = report.nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        tests = self._map(session.items)
        for name in items.keys() - tests.keys():
            print("left out, as it fails on the package as it is:", name)
        mutants = [mutant for file in self.files for mutant in mutants_of(file)]
        if self.options.sample:
            mutants = random.Random(self.options.seed).sample(mutants, self.options.sample)
        full = {name for name, item in items.items() if item.get_closest_marker("full")}
        order = sorted(tests, key=lambda name: (name in full, tests[name]["seconds"]))
        works, n_tests = [], []
        for mutant in mutants:
            names = [name for name in order if _runs(tests[name]["lines"], mutant)]
            works.append(functools.partial(self._try, mutant, [items[n] for n in names], tests))
            n_tests.append(len(names))
        for number, killer in in_forks(works, self.options.jobs):
            row = {**asdict(mutants[number]), "mutant": str(mutants[number])}
            row |= {"tests": n_tests[number], "killed_by": killer, "by_full": killer in full}
            self.report.append(row)
            print(f"[{len(self.report)}/{len(mutants)}] {mutants[number]}: {killer}", flush=True)
        return True

    def _map(self, items: list[pytest.Item]) -> dict[str, Any]:
        """Of every test that passes: its CPU seconds and the lines that it runs."""
        works = [
            functools.partial(self._trace, list(some))
            for _, some in itertools.groupby(items, key=lambda item: item.path)
        ]
        tests: dict[str, Any] = {}
        for _, found in in_forks(works, self.options.jobs):
            for name, test in found.items():
                tests[name] = {**test, "lines": set(map(tuple, test["lines"]))}
            print(f"lines of {len(tests)} of {len(items)} tests", flush=True)
        return tests

    def _trace(self, items: list[pytest.Item], file: Path) -> None:
        files, lines, found = set(map(str, self.files)), set(), {}

        def each_call(frame: types.FrameType, *_: Any) -> Any:
            return each_line if frame.f_code.co_filename in files else None

        def each_line(frame: types.FrameType, *_: Any) -> Any:
            lines.add((frame.f_code.co_filename, frame.f_lineno))
            return each_line

        threading.settrace(each_call)
        sys.settrace(each_call)
        for item, after in itertools.pairwise([*items, None]):
            lines.clear()
            self.failed, began = None, time.process_time()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if self.failed is None:
                seconds = time.process_time() - began
                found[item.nodeid] = {"seconds": seconds, "lines": list(lines)}
        file.write_text(json.dumps(found), encoding="utf-8")

    def _try(self, mutant: Mutant, items: list[pytest.Item], tests: dict, file: Path) -> None:
        """Write the test that fails with this mutant, or that the process does not survive."""
        if items and not apply(mutant):
            file.write_text(json.dumps(NOT_APPLIED), encoding="utf-8")
            return
        for item, after in itertools.pairwise([*items, None]):
            file.write_text(json.dumps(item.nodeid), encoding="utf-8")
            limit = MORE_SECONDS + TIMES * tests[item.nodeid]["seconds"]
            signal.setitimer(signal.ITIMER_PROF, limit)
            signal.alarm(WALL_LIMIT)
            with contextlib.suppress(KeyboardInterrupt, pytest.exit.Exception):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                if self.failed is None:
                    continue
            return
        file.write_text("null", encoding="utf-8")


def _runs(lines: set[tuple[str, int]], mutant: Mutant) -> bool:
    return any((mutant.file, line) in lines for line in range(mutant.first, mutant.last + 1))


def summary(report: list[dict[str, Any]]) -> str:
    """What survived, and the figures."""
    rows = [row for row in report if row["killed_by"] != NOT_APPLIED]
    killed = [row for row in rows if row["killed_by"]]
    quick = [row for row in killed if not row["by_full"]]
    lines = [f"survived     {r['mutant']}" for r in rows if not r["killed_by"] and r["tests"]]
    lines += [f"no test runs {row['mutant']}" for row in rows if not row["tests"]]
    lines += [f"full alone   {r['mutant']}  ({r['killed_by']})" for r in killed if r["by_full"]]
    shares = [len(quick) / (len(some) or 1) for some in (rows, killed)]
    lines.append(f"{len(rows)} mutants, {len(killed)} killed; the quick tier kills {len(quick)}:")
    lines.append(f"{shares[0]:.1%} of all, and {shares[1]:.1%} of those that these tests kill")
    return "\n".join(lines)


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
    plugin = Mutating(options)
    words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--capture=sys"]
    code = pytest.main([*words, "-m", TIERS[options.tier], *options.tests], plugins=[plugin])
    if options.json:
        options.json.write_text(json.dumps(plugin.report, indent=1), encoding="utf-8")
    print(summary(plugin.report))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
