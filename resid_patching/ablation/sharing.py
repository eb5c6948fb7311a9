"""One sweep in several processes, or in several parts: rows are dealt out, saved and collected.

Whole pieces are dealt (see `rerun.share`), so the numbers are those of one unbroken process, to
the last bit. All processes hold all prompts, and so the same means and the same pairs of rows;
what is split is the work. With fewer groups of prompts than processes, several processes work one
group and each takes other stacks of its targets.

The processes work in steps: each computes some pieces, then all exchange what they found and the
first appends it to the file. So one process writes, and a lost one is noticed at the next step.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from resid_patching.ablation.kinds import Kind, Mean, Path, Resample
from resid_patching.errors import (
    AblationError,
    LostProcessError,
    SweepMismatchError,
    UnequalProcessesError,
)
from resid_patching.files import as_json
from resid_patching.metrics import Metric
from resid_patching.models import ModelView
from resid_patching.processes import Team
from resid_patching.prompts import PositionIndex
from resid_patching.rerun import Piece, Reading, Route, Share
from resid_patching.result import Provenance
from resid_patching.rows import Row, RowFile, differing_entries
from resid_patching.run import Run

Cell = tuple[int, int, int]
"""A variant, a column, and the first prompt of a group."""
Name = tuple[str, "str | int | None"]
"""A target, and the receiver or position where there are several beside each other."""

# A step is as many pieces as take about so long, in seconds: less is spent on the way than worked.
_STEP = 1.0
# How far a clean run may be from the one that the rows were made with: other threads and other
# machines round otherwise.
_SAME_BASELINE = {torch.float64: 1e-7, torch.float32: 1e-3}


@dataclass(frozen=True)
class Rows:
    """Where the rows of a sweep are kept.

    Attributes:
        file: the file.
        part: the sweep's number among those of the file.
    """

    file: RowFile
    part: int = 0


class Shared(Share):
    """The part of one process, and what is known of the others'.

    Args:
        view: the model.
        team: the processes.
        names: [variant][column], what a cell is called in a row; None where nothing is asked.
        identity: what tells this sweep from every other.
        rows: gives where its rows are kept, or None for nowhere; asked in the first process alone.

    Raises:
        UnequalProcessesError: the processes were given different sweeps.
        SweepMismatchError: the rows there are of another sweep.
        ResultFormatError: the file is damaged, or no file of rows.
    """

    def __init__(
        self,
        view: ModelView,
        team: Team,
        names: Sequence[Sequence[Name | None]],
        identity: dict[str, Any],
        rows: Any,
    ) -> None:
        self.view, self.team, self.names = view, team, names
        self.cells = {
            name: (variant, column)
            for variant, beside in enumerate(names)
            for column, name in enumerate(beside)
            if name is not None
        }
        self.rows: Rows | None = None
        self.left: dict[int, int] = {}
        team.agree(self._unequal(identity))
        found = team.first(lambda: self._begun(identity, rows))
        self.known = {self._cell(row): row for row in found}
        self.kept = {row.prompts[0]: row for row in found}

    def _unequal(self, identity: dict[str, Any]) -> Exception | None:
        everyone = self.team.gather(as_json(identity))
        for rank, theirs in enumerate(everyone):
            for name, first, other in differing_entries(everyone[0], theirs):
                return UnequalProcessesError(
                    f"the processes were given different sweeps: {name} is {first} in process 0, "
                    f"but {other} in process {rank}. Give all processes the same arguments."
                )
        return None

    def _begun(self, identity: dict[str, Any], rows: Any) -> list[Row]:
        """The rows of this sweep that are already saved, by variant, column and group."""
        if rows is None:
            return []
        self.rows = rows if isinstance(rows, Rows) else Rows(RowFile(rows))
        found = self.rows.file.rows_of(self.rows.part, identity)
        self.rows.file.begin(self.rows.part, identity)
        return found

    def _cell(self, row: Row) -> Cell:
        return (*self.cells[row.target, row.column], row.prompts[0])

    def deal(self, chunks: list[slice]) -> list[slice]:
        """Those groups of prompts of which something is worked here."""
        self._require_same_groups(chunks)
        n_cells = len(self.cells)
        done = Counter(start for _, _, start in self.known)
        left = [rows for rows in chunks if done[rows.start] < n_cells]
        self.left = {rows.start: number for number, rows in enumerate(left)}
        return [rows for rows in left if self._place(rows) is not None]

    def _require_same_groups(self, chunks: list[slice]) -> None:
        groups = {rows.start: rows.stop for rows in chunks}
        for row in self.kept.values():
            start, stop = row.prompts
            if groups.get(start) != stop:
                raise SweepMismatchError(
                    f"the rows are of prompts worked in other groups: prompts {start} to "
                    f"{stop - 1} together, here {list(groups.items())[:3]}. Start again in a new "
                    "process, or with the max_bytes of the earlier one."
                )

    def _place(self, rows: slice) -> tuple[int, int] | None:
        """Which of how many processes at a group of prompts this one is; None for none of them."""
        number, n = self.left[rows.start], len(self.left)
        if n >= self.team.size:
            return (0, 1) if number % self.team.size == self.team.rank else None
        if self.team.rank % n != number:
            return None
        return self.team.rank // n, len(range(number, self.team.size, n))

    def begins(self, rows: slice, baseline: Tensor) -> None:
        """Compares a clean run with the one that the saved rows were made with."""
        row = self.kept.get(rows.start)
        if row is None:
            return
        found, kept = baseline.detach().to("cpu", torch.float64), row.values[0]
        tolerance = _SAME_BASELINE.get(self.view.dtype, 0.5)
        if not torch.allclose(found, kept, rtol=tolerance, atol=tolerance, equal_nan=True):
            worst = int((found - kept).abs().nan_to_num(torch.inf).argmax())
            raise SweepMismatchError(
                f"the rows are of a clean run with {float(kept[worst]):.6g} on prompt "
                f"{rows.start + worst}, but it is {float(found[worst]):.6g} now: the metric or the "
                "model has changed. Give another file to start again."
            )

    def wants(self, rows: slice, stack: int, variants: Sequence[int], column: int) -> bool:
        """Whether this process computes a piece: it is dealt to it, and not saved already."""
        place = self._place(rows)
        if place is None or stack % place[1] != place[0]:
            return False
        return any((variant, column, rows.start) not in self.known for variant in variants)

    def gather(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """The saved rows, then what all processes find, step by step."""
        for row in self.known.values():
            yield self._piece(row)
        n_pieces = 1
        while True:
            began = time.monotonic()
            found = self._found(itertools.islice(pieces, n_pieces))
            told = self.team.gather((found, time.monotonic() - began))
            everything = [row for rows, _ in told for row in rows]
            if not everything:
                return
            self.team.first(lambda rows=everything: self._keep(rows))
            for row in everything:
                yield self._piece(row)
            longest = max(seconds for _, seconds in told)
            n_pieces = 2 * n_pieces if longest < _STEP / 2 else n_pieces
            n_pieces = max(1, n_pieces // 2) if longest > 2 * _STEP else n_pieces

    def _found(self, pieces: Iterable[Piece]) -> list[Row]:
        """New rows; an error in one process is raised in all."""
        rows, error = [], None
        try:
            rows = list(self._new_rows(pieces))
        except LostProcessError:
            raise
        except Exception as raised:
            error = raised
        self.team.agree(error)
        return rows

    def _keep(self, rows: Iterable[Row]) -> None:
        if self.rows is not None:
            self.rows.file.add(self.rows.part, rows)

    def _new_rows(self, pieces: Iterable[Piece]) -> Iterator[Row]:
        for piece in pieces:
            parts = (piece.baseline.expand_as(piece.patched), piece.patched, piece.direct)
            values = torch.stack(parts, 1).detach().to("cpu", torch.float64)
            for variant, value in zip(piece.variants, values, strict=True):
                name = self.names[variant][piece.column]
                if name and (variant, piece.column, piece.rows.start) not in self.known:
                    yield Row(
                        *name,
                        prompts=(piece.rows.start, piece.rows.stop),
                        routes=piece.routes,
                        values=value.clone(),  # not the whole stack that it lies in
                    )

    def _piece(self, row: Row) -> Piece:
        variant, column, _ = self._cell(row)
        values = row.values.to(self.view.device, self.view.compute_dtype)
        routes = tuple(route for route in get_args(Route) if route in row.routes)
        rows = slice(*row.prompts)
        return Piece(rows, [variant], column, values[0], values[1:2], values[2:3], routes)


# What tells a sweep from every other


def identity_of(
    run: Run,
    kind: Kind,
    metric: Metric,
    reading: Reading,
    places: Sequence[PositionIndex],
    targets: Sequence[str],
    origin: Provenance,
    routes: Sequence[Route],
) -> dict[str, Any]:
    """What must be the same for two sweeps to have the same rows, to the last bit.

    Raises:
        AblationError: a run that reads a cache of the caller's, of which nothing can be known.
    """
    run.view.require_unchanged(whole=True)
    using = kind.using if isinstance(kind, Path) else kind
    other, at = None, None
    match using:
        case Mean():
            other, at = using.reference, using.at
        case Resample():
            other, at = using.source, using.at
    for one in (run, other):
        if one is not None and one.cache is not None:
            raise AblationError(
                "a sweep that is shared or kept in rows reads no cache; capture the prompts "
                "without one"
            )
    named = None if other is None or at is None else other.prompts.locate_spans(at).index
    interventions = [one and one.intervention and one.intervention.digest() for one in (run, other)]
    return {
        "kind": str(kind),
        "metric": str(metric),
        "model": origin.model,
        "revision": origin.revision,
        "processing": origin.processing,
        "dtype": origin.dtype,
        "device": run.view.device.type,
        "backend": f"{origin.backend}, TransformerLens {origin.transformer_lens}",
        "weights": run.view.state.digest,
        "prompts": f"{origin.n_prompts} prompts, sha256 {origin.tokens}",
        "other prompts": None if other is None else f"sha256 {other.prompts.hash}",
        "other positions": None if named is None else _hash_of([named]),
        "targets": list(targets),
        "receivers": list(kind.ends.labels) if isinstance(kind, Path) else [],
        "plan": origin.plan,
        "positions": _hash_of([place.index for place in places]),
        "tokens scored": _hash_of([reading.positions.index, reading.columns, reading.tokens]),
        "routes": list(routes),
        "max_bytes": [one.max_bytes for one in (run, other) if one is not None],
        "hooks": list(origin.user_hooks),
        "torch": torch.__version__,
        "resid_patching": origin.resid_patching,
        **({"interventions": interventions} if any(interventions) else {}),
    }


def _hash_of(tensors: Sequence[Tensor | None]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        numbers = None if tensor is None else tensor.tolist()
        digest.update(f"{numbers};".encode())
    return f"sha256 {digest.hexdigest()}"
