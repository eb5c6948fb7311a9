"""A sweep in pieces: who works which, and what is found already.

A piece is what one stack of variants does to one chunk of prompts. Pieces know nothing of each
other: whichever of them are worked, in whatever order and by whichever process, each has the same
numbers to the last bit. So a sweep can be dealt out, and taken up where it was broken off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from resid_patching.models import ModelView

Route = Literal["plain", "replay", "full"]


@dataclass(frozen=True, eq=False)
class Piece:
    """What some variants do to the prompts of one chunk.

    Attributes:
        rows: which prompts of the batch.
        variants: numbers of the variants.
        column: which of several alternatives beside each other; 0 where there is one.
        baseline: the clean run's value [rows].
        patched: the value with the edits, the model run again [variant, rows].
        direct: the value with the change carried to the last state alone [variant, rows].
        routes: the routes that were taken.
    """

    rows: slice
    variants: Sequence[int]
    column: int
    baseline: Tensor
    patched: Tensor
    direct: Tensor
    routes: tuple[Route, ...]


class Share:
    """What is worked here: everything. Others take a part, and hear of the rest.

    Attributes:
        n_columns: alternatives beside each other.
    """

    def deal(self, chunks: list[slice]) -> list[slice]:
        """Those chunks of which something is worked here, in their order.

        Args:
            chunks: all of them, widest first.
        """
        return chunks

    def begins(self, rows: slice, baseline: Tensor) -> None:
        """Hears of a chunk's clean run."""

    def wants(self, rows: slice, stack: int, variants: Sequence[int], column: int) -> bool:
        """Whether a piece is worked here.

        Args:
            rows: its chunk.
            stack: the number of its stack among those of the chunk.
            variants: numbers of its variants.
            column: its alternative.
        """
        return True

    def gather(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """All pieces, those of others too; the generator that is given works those of here."""
        return pieces


EVERYTHING = Share()


def put_together(
    pieces: Iterable[Piece],
    view: ModelView,
    shape: tuple[int, int, int],
    progress: Callable[[int], object] | None,
) -> tuple[Tensor, Tensor, Tensor, tuple[Route, ...]]:
    """Baseline [batch], patched and direct [variant, column, batch], and the routes taken.

    Args:
        pieces: what was found.
        view: the model.
        shape: variants, columns, prompts.
        progress: called with the number of variants of each piece.
    """
    new = {"dtype": view.compute_dtype, "device": view.device}
    baseline = torch.full(shape[2:], torch.nan, **new)
    patched = torch.full(shape, torch.nan, **new)
    direct = patched.clone()
    taken: set[Route] = set()
    for piece in pieces:
        variants = list(piece.variants)
        baseline[piece.rows] = piece.baseline
        patched[variants, piece.column, piece.rows] = piece.patched
        direct[variants, piece.column, piece.rows] = piece.direct
        taken.update(piece.routes)
        if progress is not None:
            progress(len(variants))
    return baseline, patched, direct, tuple(sorted(taken))
