"""Rows of a long sweep in a file: appended as they are found, read when the sweep continues.

JSON Lines. The first line says which sweep the rows are of; each further line is one target's
values for one group of prompts:

    {"format": "resid_patching.rows", "version": 1, "part": 0, "identity": {...}, "sha256": ...}
    {"sweep": "3f5a...", "target": "9.9", "prompts": [0, 21], "routes": ["plain"],
     "baseline": [...], "patched": [...], "frozen": [...], "sha256": ...}

`frozen` is the metric with the change carried to the last state, all later writes frozen: an
effect's `direct` is frozen - baseline, its `total` patched - baseline.

Every line carries the checksum of the rest of it, and every row the mark of its sweep. A file is
only ever added to, by whole lines that are on the disk before the work goes on. What a kill leaves
behind the last line end is dropped; any other damage is refused by its line.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from resid_patching.errors import ResultFormatError, SweepMismatchError
from resid_patching.files import as_json, checksum, read_json

FORMAT, VERSION = "resid_patching.rows", 1
_BEGIN = json.dumps({"format": FORMAT})[:-1].encode()
_VALUES = ("baseline", "patched", "frozen")
_SHOWN = 60


@dataclass(frozen=True, eq=False)
class Row:
    """What replacing one target does to some prompts.

    Attributes:
        target: the target's address, as text.
        column: the receiver or the position, where there are several beside each other.
        prompts: the first prompt, and the one behind the last.
        routes: how it was run.
        values: baseline, patched and frozen: the metric, not differences of it.
    """

    target: str
    column: str | int | None
    prompts: tuple[int, int]
    routes: tuple[str, ...]
    values: Float64[Tensor, "3 prompts"]


class RowFile:
    """A file of rows: what it holds is read and checked, and new rows are appended.

    Args:
        path: the file; it need not exist. A symbolic link stays, and the file it names is used.

    Raises:
        OSError: it cannot be read, or is a folder.
        ResultFormatError: it is no file of rows, or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._target = Path(os.path.realpath(path))
        self._identities: dict[int, dict[str, Any]] = {}
        self._rows: dict[int, list[Row]] = {}
        self._marks: dict[str, int] = {}
        if self._target.is_dir():
            raise IsADirectoryError(f"{self.path} is a folder; rows go to a file")
        if self._target.exists() and not self._target.is_file():
            raise ResultFormatError(
                f"{self.path} is a pipe or device; rows are read again, so give a file"
            )
        content = self._target.read_bytes() if self._target.exists() else b""
        whole = content.rfind(b"\n") + 1
        self._seen, self._whole = len(content), whole
        if not _begins_alike(content):
            raise ResultFormatError(f"{self.path} is no file of rows; nothing of it was changed")
        for number, line in enumerate(content[:whole].split(b"\n")[:-1], start=1):
            self._read(number, line)

    def rows_of(self, part: int, identity: dict[str, Any]) -> list[Row]:
        """The rows of a sweep that are there.

        Args:
            part: its number among the sweeps of this file.
            identity: what must be the same for rows to be of this sweep.

        Raises:
            SweepMismatchError: the rows there are of another sweep.
        """
        found = self._identities.get(part)
        if found is None:
            return []
        for name, theirs, ours in differing_entries(found, as_json(identity)):
            raise SweepMismatchError(
                f"{self.path} holds rows of another sweep: its {name}: {theirs}; this sweep's: "
                f"{ours}. Repeat the same sweep to continue, or give another file to start again."
            )
        return self._rows[part]

    def begin(self, part: int, identity: dict[str, Any]) -> None:
        """Prepares the file for the rows of a sweep: writes what the sweep is, if it is new.

        Raises:
            OSError, SweepMismatchError: as `add`.
        """
        if part in self._identities:
            self._write(b"")
            return
        head = {"format": FORMAT, "version": VERSION, "part": part, "identity": as_json(identity)}
        self._write(_json_line(head))
        self._note(head)

    def add(self, part: int, rows: Iterable[Row]) -> None:
        """Appends rows to the file, and waits until they are on the disk.

        Raises:
            OSError: the file cannot be written.
            SweepMismatchError: something else has written to the file meanwhile.
        """
        mark = next(mark for mark, number in self._marks.items() if number == part)
        self._write(b"".join(_json_line({"sweep": mark, **_encoded(row)}) for row in rows))

    def _write(self, lines: bytes) -> None:
        handle = os.open(self._target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            if os.fstat(handle).st_size != self._seen:
                raise SweepMismatchError(
                    f"something else has written to {self.path} since this sweep read it, and "
                    "nothing was added. Give each sweep a file of its own."
                )
            if self._seen != self._whole:
                os.ftruncate(handle, self._whole)
                self._seen = self._whole
            rest = memoryview(lines)
            while rest:
                n = os.write(handle, rest)
                self._seen += n
                rest = rest[n:]
            os.fsync(handle)
            self._whole = self._seen
        finally:
            os.close(handle)

    # Reading

    def _read(self, number: int, line: bytes) -> None:
        try:
            body = read_json(line.decode())
            sha256 = body.pop("sha256")
            if sha256 != checksum(body):
                raise ValueError("its numbers or names are not those that were written")
            if "format" in body:
                self._note(body)
            else:
                self._rows[self._marks[body["sweep"]]].append(_decoded(body))
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            if isinstance(error, ResultFormatError):
                raise
            raise ResultFormatError(
                f"{self.path}, line {number}, is damaged: {_reason(error, line)}. Take the line "
                "out to have it computed again; nothing was changed."
            ) from None

    def _note(self, head: dict[str, Any]) -> None:
        if head["version"] != VERSION:
            raise ResultFormatError(
                f"{self.path} is of version {head['version']}; this version of the package reads "
                f"{VERSION}"
            )
        part = int(head["part"])
        self._identities[part], self._rows[part] = dict(head["identity"]), []
        self._marks[checksum(head)[:16]] = part


def differing_entries(
    left: dict[str, Any], right: dict[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """Entries that differ, by name, with both sides in words."""
    for name in [*left, *(name for name in right if name not in left)]:
        ours, theirs = left.get(name), right.get(name)
        if ours == theirs:
            continue
        if isinstance(ours, list) and isinstance(theirs, list):
            n = len(ours) if len(ours) != len(theirs) else None
            if n is None:
                ours, theirs = next(
                    pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]
                )
            else:
                ours, theirs = f"{n} of them", f"{len(theirs)} of them"
        yield name, _shortened(ours), _shortened(theirs)


def _shortened(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]} ... {text[-_SHOWN:]}"


def _begins_alike(content: bytes) -> bool:
    """Whether this is the beginning of a file of rows, even if its first line was cut short."""
    n = min(len(content), len(_BEGIN))
    return content[:n] == _BEGIN[:n]


def _json_line(body: dict[str, Any]) -> bytes:
    return json.dumps({**body, "sha256": checksum(body)}, allow_nan=False).encode() + b"\n"


def _encoded(row: Row) -> dict[str, Any]:
    body: dict[str, Any] = {"target": row.target}
    if row.column is not None:
        body["position" if isinstance(row.column, int) else "receiver"] = row.column
    body |= {"prompts": list(row.prompts), "routes": list(row.routes)}
    for name, values in zip(_VALUES, row.values.tolist(), strict=True):
        body[name] = [_json_number(value) for value in values]
    return body


def _json_number(value: float) -> float | str | None:
    """JSON cannot write NaN or infinity."""
    if math.isfinite(value):
        return value
    return None if math.isnan(value) else str(value)


def _decoded(body: dict[str, Any]) -> Row:
    start, stop = body["prompts"]
    values = [
        [math.nan if value is None else float(value) for value in body[name]] for name in _VALUES
    ]
    if {len(part) for part in values} != {stop - start}:
        raise ValueError(f"it holds {len(values[0])} values for {stop - start} prompts")
    return Row(
        target=body["target"],
        column=body.get("receiver", body.get("position")),
        prompts=(start, stop),
        routes=tuple(body["routes"]),
        values=torch.tensor(values, dtype=torch.float64),
    )


def _reason(error: Exception, line: bytes) -> str:
    if isinstance(error, KeyError):
        return f"it lacks {error}" if b"sweep" in line else f"{error} is missing"
    return str(error)
