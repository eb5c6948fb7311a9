"""Users' own pairs of prompts, from tab-separated text or JSON lines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resid_patching.errors import PromptError
from resid_patching.files import read_json
from resid_patching.prompt_sets.pairs import PromptPairs

_PAIR_COLUMNS = ("base", "source", "answer", "foil")


def read_pairs(path: str | os.PathLike[str]) -> PromptPairs:
    """Reads pairs of prompts from a file.

    Cells are taken as they stand, leading spaces included. Empty lines are skipped.

    Args:
        path: UTF-8 text. Tab-separated with a first line that names the columns, `base` and
            `source`, with `answer` or `answer` and `foil` where there are some; cells are not
            quoted. Or, where the name ends in .jsonl, a JSON object a line with the same keys.

    Raises:
        PromptError: not UTF-8, or a line that is not as expected (it says which).
        OSError: the file cannot be read.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{file} is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from None
    lines = [(number, line.removesuffix("\r")) for number, line in enumerate(text.split("\n"), 1)]
    lines = [(number, line) for number, line in lines if line.strip()]
    if file.suffix.lower() == ".jsonl":
        rows = [(number, _json_row(file, number, line)) for number, line in lines]
    else:
        rows = _tabbed_rows(file, lines)
    if not rows:
        raise PromptError(f"{file} holds no pair of prompts; give one a line")
    columns = tuple(rows[0][1])
    for number, row in rows:
        _require_cells(file, number, row, columns)
    cells = {name: tuple(row[name] for _, row in rows) for name in columns}
    return PromptPairs(
        cells["base"],
        cells["source"],
        cells.get("answer"),
        cells.get("foil"),
        how=f"{len(rows)} pairs of {file.name}",
    )


def _json_row(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = read_json(line)
    except ValueError as error:
        raise PromptError(f"{file}, line {number}: this is no JSON: {error}") from None
    if not isinstance(row, dict):
        raise PromptError(
            f"{file}, line {number}: a JSON object was expected, such as "
            f'{{"base": "...", "source": "..."}}; found {line[:40]!r}'
        )
    _require_columns(file, number, list(row))
    return {name: row[name] for name in _PAIR_COLUMNS if name in row}


def _tabbed_rows(file: Path, lines: list[tuple[int, str]]) -> list[tuple[int, dict[str, Any]]]:
    if not lines:
        return []
    (first, header), *rest = lines
    columns = header.split("\t")
    _require_columns(file, first, columns)
    rows = []
    for number, line in rest:
        cells = line.split("\t")
        if len(cells) != len(columns):
            raise PromptError(
                f"{file}, line {number}: {len(columns)} cells were expected, separated by tabs "
                f"({', '.join(columns)}); found {len(cells)}"
            )
        rows.append((number, dict(zip(columns, cells, strict=True))))
    return rows


def _require_columns(file: Path, number: int, columns: list[str]) -> None:
    unknown = [name for name in columns if name not in _PAIR_COLUMNS]
    known = set(columns)
    wrong = unknown or not {"base", "source"} <= known or len(known) < len(columns)
    if wrong or ("foil" in known and "answer" not in known):
        raise PromptError(
            f"{file}, line {number}: the columns are base and source, with answer, or answer and "
            f"foil, where there are some; found {', '.join(map(repr, columns)) or 'none'}"
        )


def _require_cells(
    file: Path, number: int, row: Mapping[str, Any], columns: tuple[str, ...]
) -> None:
    if set(row) != set(columns):
        raise PromptError(
            f"{file}, line {number}: {', '.join(columns)} were expected, as in the first line; "
            f"found {', '.join(row)}"
        )
    for name, value in row.items():
        if not isinstance(value, str) or not value:
            raise PromptError(
                f"{file}, line {number}: {name} is a text of at least one character; found "
                f"{value!r}"
            )
