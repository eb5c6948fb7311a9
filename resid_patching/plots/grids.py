"""Grids of numbers as colours, one alone or several beside or below each other on one scale.

Depth and every other ordered axis is shown whole; depth runs downwards. A panel that would be empty
or a copy of one before it is not drawn, and the title says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from resid_patching.markup import quoted
from resid_patching.plots.base import (
    CHARACTER,
    clipped,
    largest_of,
    lay_out,
    literal,
    require_plotly,
    short,
    template,
    why_empty,
)

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

_WIDEST_CELL, _NARROW, _SLANTED, _THIN_CELL = 46, 40, 12, 6  # pixels of a cell; below 40 no numbers
_ROW, _THIN_ROW, _MANY_ROWS = 23, 15, 40  # pixels of a row, of one of many rows
_SCREEN, _BAR, _GAP = 1200, 90, 26  # what panels take side by side; the colour bar; between panels
_LONGEST_ROW, _LONGEST_COLUMN = 26, 18  # characters of a label
_ABSENT = "rgba(128,128,128,0.5)"  # cells without a number, on a white and on a dark page
_BEHIND = "rgba(128,128,128,0.2)"  # cells that cannot exist


@dataclass(frozen=True, eq=False)
class Grid:
    """Numbers on two axes; NaN where there is none.

    Attributes:
        values: the numbers; the index and the columns have labels and a name.
        texts: what stands in each cell instead of its number [row, column].
        hovers: what hovering also shows of each cell [row, column], as plotly reads it.
    """

    values: pandas.DataFrame
    texts: Any = None
    hovers: Any = None

    @property
    def numbers(self) -> torch.Tensor:
        """The numbers alone [row, column]."""
        return torch.tensor(self.values.to_numpy(dtype=float))


def pivoted(frame: Any, row: str, column: str, value: str) -> pandas.DataFrame:
    """A column of a data frame as a grid, in the frame's own order.

    Positions carry their tokens where the frame has them.
    """
    if column == "position" and "token" in frame:
        frame = frame.assign(position=with_tokens(frame["position"], frame["token"]))
    order = {"index": frame[row].unique(), "columns": frame[column].unique()}
    return frame.pivot(index=row, columns=column, values=value).reindex(**order)


def with_tokens(positions: Iterable[int], tokens: Iterable[object]) -> list[str]:
    """Positions as they stand on an axis, `3 " day"`; alone where no token is known."""
    pairs = zip(positions, tokens, strict=True)
    return [f"{p} {quoted(token)}" if isinstance(token, str) else str(p) for p, token in pairs]


def draw_grids(
    grids: Mapping[str, Grid],
    unit: str,
    heading: Sequence[str],
    *,
    signed: bool = True,
    end: float | None = None,
    cell: int | None = None,
    triangle: bool = False,
) -> plotly.graph_objects.Figure:
    """Grids of the same rows and columns on one scale, beside each other where they fit.

    Args:
        grids: what stands above each, and the grid.
        unit: of their numbers.
        heading: the title, line by line.
        signed: whether the scale runs from -end to end rather than from 0.
        end: of the scale; None for the largest size, or the unit's floor (0.01, probabilities
            0.001) where all are smaller.
        cell: pixels of a cell's width; None for as wide as fits.
        triangle: cells without a number cannot exist, and are not drawn at all.
    """
    px = require_plotly()
    grids, notes = _distinct(grids, unit)
    first, names = next(iter(grids.values())), [literal(name) for name in grids]
    planes = torch.stack([grid.numbers for grid in grids.values()])
    sizes = _Sizes(first.values, len(grids), cell)
    figure = px.imshow(
        planes.numpy(),
        x=[literal(label) for label in first.values.columns],
        y=[literal(label) for label in first.values.index],
        labels={"x": first.values.columns.name, "y": first.values.index.name},
        facet_col=0,
        aspect="auto",
        template=template(),
        **sizes.facets,
    )
    digits = "" if sizes.thin else f"%{{z:{short(planes.nan_to_num().flatten().tolist())}}}"
    where = f"{first.values.index.name} %{{y}}<br>{first.values.columns.name} %{{x}}<br>"
    number = f"%{{z:+.5g}} {literal(unit)}"
    for trace, grid in zip(figure.data, grids.values(), strict=True):
        more = "" if grid.hovers is None else "<br>%{customdata}"
        if grid.texts is None:
            trace.update(texttemplate=digits)
        else:
            trace.update(text=grid.texts, texttemplate="%{text}", textfont_size=11)
        trace.update(customdata=grid.hovers, hovertemplate=f"{where}{number}{more}<extra></extra>")
    if not triangle and bool(planes.isnan().any()):
        notes.append("grey ×: no value")
        _mark_absent(figure, planes, f"{where}no value<extra></extra>")
    end = largest_of(planes, unit) if end is None else end
    bar = {
        "title": {"text": f"{literal(unit)}<br>&nbsp;"},
        "len": max(100, min(300, sizes.inside + 20)),
    }
    figure.layout.coloraxis = {"cmin": -end if signed else 0, "cmax": end, "colorbar": bar}
    shrinks = len(grids) == 1 and first.texts is None
    lay_out(
        figure,
        [*heading[:-1], "; ".join([heading[-1], *notes])],
        width=sizes.width,
        inside=sizes.inside,
        above=24 if len(grids) > 1 else 0,
        below=50 + sizes.slant,
        least=sizes.least if shrinks else sizes.width,
    )
    if triangle:  # 0 is a white cell, and what cannot exist is none
        figure.update_layout(plot_bgcolor=_BEHIND)
    _label_axes(figure, first.values, sizes)
    figure.layout.annotations = figure.layout.annotations if len(names) > 1 else ()
    for note in figure.layout.annotations:  # "facet_col=0"
        note.update(text=names[int(note.text.rpartition("=")[2])], font={"size": 13})
        note.update({} if sizes.across else {"x": 0, "xanchor": "left"})
    return figure


class _Sizes:
    """How large cells are, and whether panels stand beside or below each other.

    Attributes:
        across: beside each other.
        cell: pixels of a cell's width.
        thin: whether cells have no room for numbers.
        slant: pixels that column labels take at a slant; 0 where they stand level.
        width, inside: of the figure, and the height of what is drawn.
        least: the width at which labels still stand apart.
        facets: what plotly.express is told.
    """

    def __init__(self, values: pandas.DataFrame, n: int, cell: int | None) -> None:
        n_rows, n_columns = values.shape
        longest_row, longest = (max(len(str(la)) for la in a) for a in (values.index, values))
        longest = min(_LONGEST_COLUMN, longest)
        around = 45 + round(CHARACTER * min(_LONGEST_ROW, longest_row)) + _BAR
        beside = ((_SCREEN - around + _GAP) // n - _GAP) // n_columns
        self.across = beside >= (cell or 19)
        fits = beside if self.across else (_SCREEN - around) // n_columns
        self.cell = cell or min(_WIDEST_CELL, max(_THIN_CELL, fits))
        self.thin = n_rows > _MANY_ROWS or self.cell < _NARROW
        self.slant = round(longest * 5.8) if longest * CHARACTER > self.cell else 0
        wide = max(self.cell * n_columns, 90)
        high = n_rows * (_THIN_ROW if n_rows > _MANY_ROWS else _ROW)
        one, gap = (wide, _GAP) if self.across else (high, 60 + self.slant)
        whole = one * n + gap * (n - 1)
        self.width = max(440, around + (whole if self.across else wide))
        self.inside = max(110, high if self.across else whole)
        self.least = around + 20 + n_columns * min(self.cell, 20)
        spacing = "facet_col_spacing" if self.across else "facet_row_spacing"
        self.facets = {"facet_col_wrap": n if self.across else 1, spacing: (n > 1) * gap / whole}


def _distinct(grids: Mapping[str, Grid], unit: str) -> tuple[dict[str, Grid], list[str]]:
    """The grids that say something of their own, and what is said of the others."""
    kept: dict[str, Grid] = {}
    notes = []
    for name, grid in grids.items():
        copied = [other for other, known in kept.items() if _is_copy(known, grid, unit)]
        if copied:
            notes.append(f"{name}: the same as {copied[0]}")
        elif kept and (why := why_empty(grid.numbers, unit)):
            notes.append(f"{name}: {why}")
        else:
            kept[name] = grid
    return kept, notes


def _is_copy(known: Grid, grid: Grid, unit: str) -> bool:
    near = 1e-6 * largest_of(known.numbers, unit)
    same = torch.allclose(known.numbers, grid.numbers, rtol=0, atol=near, equal_nan=True)
    return same and np.array_equal(known.texts, grid.texts)


def _mark_absent(figure: Any, planes: torch.Tensor, hover: str) -> None:
    """Grey cells with a cross where there is no number, over each panel."""
    for trace, absent in zip(list(figure.data), planes.isnan().numpy(), strict=True):
        if absent.any():
            figure.add_heatmap(
                **{name: trace[name] for name in ("x", "y", "xaxis", "yaxis")},
                z=np.where(absent, 0.0, np.nan),
                text=np.where(absent, "×", ""),
                texttemplate="%{text}",
                colorscale=[_ABSENT, _ABSENT],
                showscale=False,
                hovertemplate=hover,
            )


def _label_axes(figure: Any, values: pandas.DataFrame, sizes: _Sizes) -> None:
    """Names every row and column, or as many columns as stand apart."""
    # Labels such as 10.1 and 10.10 are names, not numbers.
    common = {"type": "category", "tickfont": {"size": 11}, "showgrid": False, "zeroline": False}
    columns = list(values.columns)[:: max(1, -(-_SLANTED // sizes.cell))]
    figure.update_xaxes(
        **common,
        tickvals=[literal(label) for label in columns],
        ticktext=[clipped(label, _LONGEST_COLUMN) for label in columns],
        tickangle=-60 if sizes.slant else 0,
        showticklabels=True,
        title_standoff=4,
    )
    figure.update_yaxes(
        **common,
        tickvals=[literal(label) for label in values.index],
        ticktext=[clipped(label, _LONGEST_ROW) for label in values.index],
        autorange="reversed",
        title_standoff=10,
    )
