"""Grids of numbers as colours, one alone or several beside or below each other on one scale.

Depth and every other ordered axis is shown whole; depth runs downwards. A panel that would be empty
or a copy of one before it is not drawn, and the title says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from resid_patching.plots.base import (
    ABSENT,
    CHARACTER,
    bar_size,
    largest_of,
    lay_out,
    listed,
    literal,
    names,
    quoted,
    require_plotly,
    short,
    why_empty,
)
from resid_patching.result import Axis

if TYPE_CHECKING:
    import plotly.graph_objects

_CELL_WIDTH, _ROW_HEIGHT, _THIN_ROW = 46, 23, 15  # pixels
_NARROW = 40  # cells narrower than this show no numbers
_MANY_ROWS = 40  # from here on rows are thinner, and cells show no numbers
_THIN_CELL, _SLANTED_LABEL = 6, 12  # of a long row of positions; a label at a slant
_SCREEN = 1200  # what panels side by side may take
_BEHIND = "rgba(128,128,128,0.2)"  # cells that cannot exist
_LONGEST = 11  # characters of a token


@dataclass(frozen=True, eq=False)
class Grid:
    """Numbers on two axes; NaN where there is none.

    Attributes:
        rows: downwards.
        columns: to the right.
        values: [row, column].
        beside: what is also shown when hovering, each as values.
        tokens: of the columns, where they are positions.
        row_tokens: of the rows, where they are positions.
        texts: what stands in each cell instead of its number.
        hovers: what hovering shows of each cell, instead of labels and numbers.
        hidden: [row, column], cells that cannot exist and are not drawn at all.
    """

    rows: Axis
    columns: Axis
    values: Tensor
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    tokens: Sequence[str] | None = None
    row_tokens: Sequence[str] | None = None
    texts: list[list[str]] | None = None
    hovers: list[list[str]] | None = None
    hidden: Tensor | None = None

    @property
    def is_tall(self) -> bool:
        """Whether there are so many rows that they are drawn thin."""
        return len(self.rows.labels) > _MANY_ROWS

    @property
    def height(self) -> int:
        """In pixels."""
        return len(self.rows.labels) * (_THIN_ROW if self.is_tall else _ROW_HEIGHT)

    @property
    def absent(self) -> Tensor:
        """Cells that could exist and have no number."""
        absent = self.values.isnan()
        return absent if self.hidden is None else absent & ~self.hidden


def draw_grids(
    grids: Mapping[str, Grid],
    unit: str,
    heading: Sequence[str],
    *,
    signed: bool = True,
    end: float | None = None,
    cell: int | None = None,
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

    Raises:
        MissingExtraError: plotly is not installed.
    """
    go = require_plotly()
    from plotly.subplots import make_subplots

    grids, notes = _distinct(grids, unit)
    first, n = next(iter(grids.values())), len(grids)
    planes = torch.stack([grid.values for grid in grids.values()])
    end = largest_of([planes], unit) if end is None else end
    row_names, column_names = (
        _names(first.rows, first.row_tokens),
        _names(first.columns, first.tokens),
    )
    left = 45 + round(CHARACTER * max(map(len, row_names)))
    n_columns, longest = len(column_names), max(map(len, column_names))
    fits = (_SCREEN - left - 90 - 26 * (n - 1)) // n // n_columns
    across = fits >= (cell or (15 if first.is_tall else 19))
    if cell is None:
        least = _THIN_CELL if n_columns > _MANY_ROWS else _CELL_WIDTH
        room = fits if across else max(least, (_SCREEN - left - 90) // n_columns)
        cell = min(_CELL_WIDTH, room)
    slant = round(longest * 5.8) if longest * CHARACTER > cell else 0
    wide, gap = max(cell * n_columns, 90), 26 if across else 60 + slant
    whole = (wide if across else first.height) * n + (n - 1) * gap
    figure = make_subplots(
        rows=1 if across else n,
        cols=n if across else 1,
        subplot_titles=[literal(name) for name in grids] if n > 1 else None,
        shared_yaxes=across,
        **{"horizontal_spacing" if across else "vertical_spacing": gap / whole},  # type: ignore[arg-type]
    )
    digits = (
        None if first.is_tall or cell < _NARROW else short([float(planes.nan_to_num().abs().max())])
    )
    for number, grid in enumerate(grids.values()):
        row, col = (1, number + 1) if across else (number + 1, 1)
        figure.add_trace(_cells(go, grid, unit, digits), row=row, col=col)
        if bool(grid.absent.any()):
            figure.add_trace(_absent_cells(go, grid), row=row, col=col)
    if any(bool(grid.absent.any()) for grid in grids.values()):
        notes.append("grey ×: no value")
    inside = max(110, first.height if across else whole)
    lay_out(
        figure,
        [*heading[:-1], "; ".join([heading[-1], *notes])],
        width=max(440, left + (whole if across else wide) + 90),
        inside=inside,
        above=24 if n > 1 else 0,
        below=50 + slant,
        least=left + (whole if across else wide) + 90
        if n > 1 or first.texts
        else 110 + left + n_columns * min(cell, 20),
        coloraxis={
            "cmin": -end if signed else 0,
            "cmax": end,
            "autocolorscale": True,  # the template's, for numbers of both signs or from 0
            "colorbar": {"title": {"text": literal(unit)}, "thickness": 12, **bar_size(inside)},
        },
    )
    if first.hidden is not None:  # 0 is a white cell, and what cannot exist is none
        figure.update_layout(plot_bgcolor=_BEHIND)
    _label_axes(figure, first, (row_names, column_names), cell, slant > 0, across, n)
    return figure


def _distinct(grids: Mapping[str, Grid], unit: str) -> tuple[dict[str, Grid], list[str]]:
    """The grids that say something of their own, and what is said of the others."""
    kept: dict[str, Grid] = {}
    notes = []
    for name, grid in grids.items():
        copied = [other for other, known in kept.items() if _is_copy(known, grid, unit)]
        if copied:
            notes.append(f"{name}: the same as {copied[0]}")
        elif kept and (why := why_empty(grid.values, unit)):
            notes.append(f"{name}: {why}")
        else:
            kept[name] = grid
    return kept, notes


def _is_copy(known: Grid, grid: Grid, unit: str) -> bool:
    size = largest_of([known.values], unit)
    same = torch.allclose(known.values, grid.values, rtol=0, atol=1e-6 * size, equal_nan=True)
    return same and known.texts == grid.texts


def _names(axis: Axis, tokens: Sequence[str] | None) -> list[str]:
    if tokens is None:
        return names(axis)
    pairs = zip(names(axis), tokens, strict=True)
    return [f"{label} {quoted(token, _LONGEST)}" for label, token in pairs]


def _cells(go: Any, grid: Grid, unit: str, digits: str | None) -> Any:
    """The numbers on the scale that all grids share."""
    lines = [
        f"{grid.rows.name} %{{y}}",
        f"{grid.columns.name} %{{x}}",
        f"%{{z:+.5g}} {literal(unit)}",
    ]
    custom: Any = None
    if grid.hovers is not None:
        custom, lines = grid.hovers, ["%{customdata}"]
    elif grid.tokens is not None:
        rows = grid.row_tokens or [""] * len(grid.rows.labels)
        custom = [[[quoted(row), quoted(token)] for token in grid.tokens] for row in rows]
        lines[0] += " %{customdata[0]}" * (grid.row_tokens is not None)
        lines[1] += " %{customdata[1]}"
    elif len(grid.beside) > 1:
        custom = listed(torch.stack(list(grid.beside.values()), -1).tolist())
        lines += [f"{name} %{{customdata[{n}]:+.5g}}" for n, name in enumerate(grid.beside)]
    template = "%{text}" if grid.texts else digits and f"%{{z:{digits}}}"
    return go.Heatmap(
        z=listed(grid.values.tolist()),
        x=names(grid.columns),
        y=names(grid.rows),
        text=grid.texts,
        texttemplate=template,
        textfont={"size": 11 if grid.texts else 10},
        customdata=custom,
        hovertemplate="<br>".join(lines) + "<extra></extra>",
        coloraxis="coloraxis",
        hoverongaps=False,
        xgap=1,
        ygap=1,
    )


def _absent_cells(go: Any, grid: Grid) -> Any:
    """Grey cells with a cross where there is no number."""
    absent = grid.absent.tolist()
    where = f"{grid.rows.name} %{{y}}<br>{grid.columns.name} %{{x}}"
    return go.Heatmap(
        z=[[0 if cell else None for cell in row] for row in absent],
        x=names(grid.columns),
        y=names(grid.rows),
        colorscale=[[0, ABSENT], [1, ABSENT]],
        showscale=False,
        text=[["×" if cell else "" for cell in row] for row in absent],
        texttemplate="%{text}",
        textfont={"size": 10, "color": "#000000"},
        hovertemplate=f"{where}<br>no value<extra></extra>",
        hoverongaps=False,
        xgap=1,
        ygap=1,
    )


def _label_axes(
    figure: Any,
    grid: Grid,
    shown: tuple[list[str], list[str]],
    cell: int,
    slanted: bool,
    across: bool,
    n: int,
) -> None:
    """Names every row and column, or as many columns as stand apart, and the axes themselves."""
    # Labels such as 10.1 and 10.10 are names, not numbers.
    common = {"type": "category", "tickfont": {"size": 11}, "automargin": True}
    common |= {"showgrid": False, "zeroline": False, "tickmode": "array"}
    step = max(1, -(-_SLANTED_LABEL // cell))
    columns = {"tickvals": names(grid.columns)[::step], "ticktext": shown[1][::step]}
    figure.update_xaxes(**common, **columns, tickangle=-60 if slanted else 0)
    figure.update_yaxes(
        **common, tickvals=names(grid.rows), ticktext=shown[0], autorange="reversed"
    )
    title = {"text": grid.columns.name, "standoff": 4}
    figure.update_xaxes(title=title, row=None if across else n)
    figure.update_yaxes(title={"text": grid.rows.name, "standoff": 10}, col=1)
    figure.update_annotations(font={"size": 13})
    if not across:
        figure.update_annotations(x=0, xanchor="left")
