"""Times this package beside other routes to the same numbers, and beside the machine's limit.

Both sides of a row run in one process, in turn, with one thread setting; the medians and their
ratio are reported, after checking that both sides computed the same numbers. `limit` is the
floating-point operations that the answer needs, over what a 2048 x 2048 matrix product reaches in
the same turns, as a share of our time. Peaks are of resident memory, in a process of their own
whose allocator gives freed blocks back at once, so that what is held counts and nothing else.
The model has GPT-2 small's shape and random weights, so that nothing is downloaded.

    python scripts/benchmark.py [--repeats N] [--threads N] [--backend hooked|bridge]
        [--rows capture attribution lens ...] [--json FILE] [--write docs/performance.md]

Every row says on which commit it was measured and how often. `--write` replaces the rows measured
now in a page and in the JSON file beside it, and keeps the others.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from bench import common, growth, lenses, routes, startup, streams, sweeps  # noqa: E402
from marks import put_between  # noqa: E402

CASES: dict[str, Callable[[Any], Iterator[common.Case]]] = {
    "capture": streams.captures,
    "attribution": streams.attributions,
    "lens": lenses.reading,
    "sweeps": sweeps.ablations,
    "long-sweeps": sweeps.long_ablations,
    "patching": sweeps.activation_patching,
    "paths": routes.paths,
    "fitting": lenses.fitting,
    "grids": routes.grids,
    "edges": routes.edges,
}
OTHERS = ("growth", "startup")
# TransformerLens's attribution tool wants a bridge in compatibility mode; the rest runs raw.
PROCESSED = {"attribution"}


def cases(backend: str, wanted: list[str]) -> Iterator[common.Case]:
    """The cases of the groups that are wanted, each group on a model of its own."""
    for group, make in CASES.items():
        if group in wanted:
            model = common.gpt2_shaped(backend, processed=group in PROCESSED)
            yield from make(model)
            del model
            gc.collect()


def main() -> None:
    """Runs the rows, prints them as Markdown, and writes what was asked for."""
    arguments = _parse()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    if arguments.peaks:
        print(json.dumps(peaks(arguments.backend, arguments.rows)))
        return
    found: dict[str, Any] = {"machine": machine(arguments), "rows": []}
    if "startup" in arguments.rows:
        found["startup"] = startup.measure_startup(arguments.repeats)
    for case in cases(arguments.backend, arguments.rows):
        found["rows"].append(common.measure(case, arguments.repeats))
        print(json.dumps(found["rows"][-1]), file=sys.stderr, flush=True)
    if "growth" in arguments.rows:
        model = common.gpt2_shaped(arguments.backend)
        found["growth"] = growth.measure_growth(model, arguments.repeats)
    if found["rows"] or "growth" in found:
        measured = _peaks_elsewhere(arguments)
        for row in (*found["rows"], *found.get("growth", ())):
            row |= measured.get(row["row"], {})
    for part in PARTS:
        for row in found.get(part, ()):
            row |= {"commit": commit(), "repeats": arguments.repeats}
    print(as_markdown(found))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if arguments.write:
        write_page(Path(arguments.write), arguments.backend, found)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    groups = (*CASES, *OTHERS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--backend", choices=("hooked", "bridge"), default="bridge")
    parser.add_argument(
        "--rows", nargs="+", choices=groups, default=list(groups), help="the grids take minutes"
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument(
        "--write", metavar="FILE", help="put the tables between their marks in a Markdown file"
    )
    parser.add_argument("--peaks", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def peaks(backend: str, wanted: list[str]) -> dict[str, dict[str, Any]]:
    """Peak memory of both sides of each row, in MB over where the process stood."""
    found: dict[str, dict[str, Any]] = {}
    for case in cases(backend, wanted):
        if case.once:
            continue
        case.ours()
        row = {"ours_mb": common.peak_mb(case.ours)}
        if case.theirs is not None:
            row["theirs_mb"] = common.peak_mb(case.theirs)
        found[case.name] = row
    if "growth" in wanted:
        found |= growth.peaks(common.gpt2_shaped(backend))
    return found


# glibc otherwise keeps what was freed, up to blocks of 32 MB.
_FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}


def _peaks_elsewhere(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    command = [sys.executable, __file__, "--peaks", "--backend", arguments.backend]
    command += ["--threads", str(arguments.threads), "--rows", *arguments.rows]
    done = subprocess.run(
        command,
        check=True,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env={**os.environ, **_FREED_AT_ONCE},
    )
    return json.loads(done.stdout.splitlines()[-1])


def machine(arguments: argparse.Namespace) -> str:
    """What the numbers were measured on."""
    import transformer_lens

    version = getattr(transformer_lens, "__version__", None)
    if version is None:
        from importlib.metadata import version as installed

        version = installed("transformer-lens")
    cores = os.cpu_count()
    return (
        f"{arguments.backend}, TransformerLens {version}, torch {torch.__version__}, float32, "
        f"{arguments.threads} of {cores} cores ({_processor()})"
    )


def commit() -> str:
    """The commit that is checked out, with a + where the package or this script was edited."""
    root = Path(__file__).resolve().parent.parent

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, encoding="utf-8").stdout.strip()

    edited = git("status", "--porcelain", "--", "resid_patching", "scripts")
    return git("rev-parse", "--short", "HEAD") + ("+" if edited else "")


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    names = re.findall(r"model name\s*: (.*)", text)
    return names[0].strip() if names else platform.machine()


# Markdown


def as_markdown(found: dict[str, Any]) -> str:
    """The tables."""
    parts = [f"Measured on {found['machine']}.\n"]
    if found.get("rows"):
        parts.append(_table(_HEADS, [_cells(row) for row in found["rows"]]))
    if "growth" in found:
        heads = ("sweep", "grows 1x, 2x, 4x", "seconds", "4x over 1x", "slope", "peak, MB", "at")
        parts.append(_table(heads, [_growth_cells(row) for row in found["growth"]]))
    if "startup" in found:
        rows = [
            (r["row"], f"{r['seconds']:.2f}", f"{r['ratio']:.2f}", _at(r)) for r in found["startup"]
        ]
        heads = ("command", "seconds", "over import transformer_lens", "at")
        parts.append(_table(heads, rows))
    return "\n".join(parts)


_HEADS = (
    "row",
    "ours, s",
    "peer, s",
    "ratio",
    "forwards",
    "limit",
    "MB",
    "peer MB",
    "diff",
    "peer",
    "at",
)
PARTS = ("rows", "growth", "startup")


def _at(row: dict[str, Any]) -> str:
    return f"{row['commit']} ({row['repeats']})"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    def shown(name: str, form: str) -> str:
        return format(row[name], form) if row.get(name) is not None else ""

    ratio = f"{shown('ratio', '.1f' if row.get('ratio', 0) >= 10 else '.2f')}x"
    return (
        row["row"],
        _seconds(row["ours"]),
        _seconds(row["theirs"]) if "theirs" in row else "",
        ratio if "ratio" in row else "",
        shown("forwards", ".2f"),
        shown("limit", ".0%"),
        shown("ours_mb", ".0f"),
        shown("theirs_mb", ".0f"),
        shown("difference", ".0e"),
        row["peer"],
        _at(row),
    )


def _growth_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        *row["row"].split("; "),
        " / ".join(map(_seconds, row["seconds"])),
        f"{row['total']:.2f}",
        f"{row['slopes']:.2f}",
        " / ".join(f"{peak:.0f}" for peak in row["peaks"]),
        _at(row),
    )


def _seconds(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_page(path: Path, backend: str, found: dict[str, Any]) -> None:
    """Replaces rows between a backend's marks in a page, and in the JSON file beside it.

    Raises:
        SystemExit: the page has no such marks.
    """
    data = path.with_suffix(".json")
    kept = json.loads(data.read_text(encoding="utf-8")) if data.exists() else {}
    kept[backend] = merged(kept.get(backend, {}), found)
    start, end = f"<!-- {backend}: measured -->", f"<!-- {backend}: end -->"
    put_between(path, start, end, as_markdown(kept[backend]))
    data.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Rows of one run put in the place of rows of the same name of earlier ones."""
    found: dict[str, Any] = {"machine": new["machine"]}
    for part in PARTS:
        rows = {_key(row): row for row in (*old.get(part, ()), *new.get(part, ()))}
        if rows:
            found[part] = list(rows.values())
    return found


def _key(row: dict[str, Any]) -> tuple[str, str]:
    return row["row"], row.get("peer", "")


if __name__ == "__main__":
    main()
