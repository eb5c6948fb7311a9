"""Grids of numbers as colours, one alone or several beside or below each other on one scale.

Depth and every other ordered axis is shown whole; depth runs downwards. A panel that would be empty
or a copy of one before it is not drawn, and the title says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from resid_patching.markup import quoted
from resid_patching.plots.base import (
    ABSENT,
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

_CELL_WIDTH, _ROW_HEIGHT, _THIN_ROW = 46, 23, 15  # pixels
_NARROW = 40  # cells narrower than this show no numbers
_MANY = 40  # from here on rows and columns are thinner, and cells show no numbers
_THIN_CELL, _SLANTED_LABEL = 6, 12  # of a long row of positions; a label at a slant
_SCREEN, _BAR = 1200, 90  # what panels side by side may take; the colour bar
_BEHIND = "rgba(128,128,128,0.2)"  # cells that cannot exist
_LONGEST_ROW, _LONGEST_COLUMN = 26, 18  # characters of a label


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


def pivoted(frame: pandas.DataFrame, row: str, column: str, value: str) -> pandas.DataFrame:
    """A column of a data frame as a grid, in the frame's own order.

    Positions carry their tokens where the frame has them.
    """
    if column == "position" and "token" in frame:
        places = places_with_tokens(frame["position"], frame["token"])
        frame = frame.assign(position=places)
    order = {"index": frame[row].unique(), "columns": frame[column].unique()}
    return frame.pivot(index=row, columns=column, values=value).reindex(**order)


def places_with_tokens(positions: Sequence[int], tokens: Sequence[str]) -> list[str]:
    """Positions as they stand on an axis: `3 " day"`."""
    return [f"{p} {quoted(token)}" for p, token in zip(positions, tokens, strict=True)]


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

    Raises:
        MissingExtraError: plotly is not installed.
    """
    px = require_plotly()
    grids, notes = _distinct(grids, unit)
    first = next(iter(grids.values())).values
    planes = torch.stack([grid.numbers for grid in grids.values()])
    place = _Place(first, len(grids), cell)
    figure = px.imshow(
        planes.numpy(),
        x=[literal(label) for label in first.columns],
        y=[literal(label) for label in first.index],
        labels={"x": literal(first.columns.name), "y": literal(first.index.name)},
        facet_col=0,
        aspect="auto",
        template=template(),
        **place.facets,
    )
    _fill_cells(figure, grids, unit, None if place.thin else short(planes.nan_to_num().flatten()))
    if not triangle and bool(planes.isnan().any()):
        notes.append("grey ×: no value")
        _mark_absent(figure, planes)
    end = largest_of([planes], unit) if end is None else end
    bar = {"len": max(100, min(300, place.inside + 20)), "lenmode": "pixels", "thickness": 12}
    lay_out(
        figure,
        [*heading[:-1], "; ".join([heading[-1], *notes])],
        width=place.width,
        inside=place.inside,
        above=24 if len(grids) > 1 else 0,
        below=50 + place.slant,
        least=place.width_at_least if len(grids) == 1 and not _has_texts(grids) else place.width,
        coloraxis={
            "colorscale": None,
            "cmin": -end if signed else 0,
            "cmax": end,
            "autocolorscale": True,  # the template's, for numbers of both signs or from 0
            "colorbar": {"title": {"text": literal(unit)}, "y": 1, "yanchor": "top", **bar},
        },
    )
    if triangle:  # 0 is a white cell, and what cannot exist is none
        figure.update_layout(plot_bgcolor=_BEHIND)
    _label_axes(figure, first, place)
    _name_panels(figure, list(grids), place)
    return figure


def _has_texts(grids: Mapping[str, Grid]) -> bool:
    return any(grid.texts is not None for grid in grids.values())


class _Place:
    """How large cells are, and whether panels stand beside or below each other.

    Attributes:
        across: beside each other.
        cell: pixels of a cell's width.
        thin: whether cells have no room for numbers.
        slant: pixels that column labels take at a slant; 0 where they stand level.
        width, inside: of the figure, and the height of what is drawn.
        width_at_least: where labels still stand apart.
        facets: what plotly.express is told.
    """

    def __init__(self, values: pandas.DataFrame, n: int, cell: int | None) -> None:
        n_rows, n_columns = values.shape
        tall = n_rows > _MANY
        rows, columns = ([str(label) for label in axis] for axis in (values.index, values.columns))
        left = 45 + round(CHARACTER * min(_LONGEST_ROW, max(map(len, rows))))
        room = _SCREEN - left - _BAR
        beside = (room - 26 * (n - 1)) // (n * n_columns)
        self.across = beside >= (cell or (15 if tall else 19))
        if cell is None:
            least = _THIN_CELL if n_columns > _MANY else _CELL_WIDTH
            cell = min(_CELL_WIDTH, beside if self.across else max(least, room // n_columns))
        self.cell, self.thin = cell, tall or cell < _NARROW
        longest = min(_LONGEST_COLUMN, max(map(len, columns)))
        self.slant = round(longest * 5.8) if longest * CHARACTER > cell else 0
        wide, high = max(cell * n_columns, 90), n_rows * (_THIN_ROW if tall else _ROW_HEIGHT)
        gap = 26 if self.across else 60 + self.slant
        whole = (wide if self.across else high) * n + (n - 1) * gap
        around = left + _BAR
        self.width = max(440, around + (whole if self.across else wide))
        self.width_at_least = around + 20 + n_columns * min(cell, 20)
        self.inside = max(110, high if self.across else whole)
        spacing = "facet_col_spacing" if self.across else "facet_row_spacing"
        self.facets = {"facet_col_wrap": n if self.across else 1, spacing: gap / whole}


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
    near = 1e-6 * largest_of([known.numbers], unit)
    same = torch.allclose(known.numbers, grid.numbers, rtol=0, atol=near, equal_nan=True)
    return same and np.array_equal(known.texts, grid.texts)


def _fill_cells(figure: Any, grids: Mapping[str, Grid], unit: str, digits: str | None) -> None:
    """What stands in the cells, and what hovering shows."""
    first = next(iter(grids.values())).values
    lines = [f"{literal(first.index.name)} %{{y}}", f"{literal(first.columns.name)} %{{x}}"]
    lines.append(f"%{{z:+.5g}} {literal(unit)}")
    for trace, grid in zip(figure.data, grids.values(), strict=True):
        more = [] if grid.hovers is None else ["%{customdata}"]
        trace.update(
            text=grid.texts,
            texttemplate="%{text}" if grid.texts is not None else digits and f"%{{z:{digits}}}",
            textfont={"size": 10 if grid.texts is None else 11},
            customdata=grid.hovers,
            hovertemplate="<br>".join([*lines, *more]) + "<extra></extra>",
            hoverongaps=False,
            xgap=1,
            ygap=1,
        )


def _mark_absent(figure: Any, planes: torch.Tensor) -> None:
    """Grey cells with a cross where there is no number, over each panel."""
    for trace, absent in zip(list(figure.data), planes.isnan().numpy(), strict=True):
        if absent.any():
            over = {"x": trace.x, "y": trace.y, "xaxis": trace.xaxis, "yaxis": trace.yaxis}
            figure.add_heatmap(
                z=np.where(absent, 0.0, np.nan),
                text=np.where(absent, "×", ""),
                **over,
                colorscale=[[0, ABSENT], [1, ABSENT]],
                showscale=False,
                texttemplate="%{text}",
                textfont={"size": 10, "color": "#000000"},
                hovertemplate=trace.hovertemplate.split("<br>%{z")[0]
                + "<br>no value<extra></extra>",
                hoverongaps=False,
                xgap=1,
                ygap=1,
            )


def _label_axes(figure: Any, values: pandas.DataFrame, place: _Place) -> None:
    """Names every row and column, or as many columns as stand apart."""
    # Labels such as 10.1 and 10.10 are names, not numbers.
    common = {"type": "category", "tickfont": {"size": 11}, "automargin": True}
    common |= {"showgrid": False, "zeroline": False, "tickmode": "array"}
    rows, columns = (
        list(values.index),
        list(values.columns)[:: max(1, -(-_SLANTED_LABEL // place.cell))],
    )
    figure.update_xaxes(
        **common,
        tickvals=[literal(label) for label in columns],
        ticktext=[literal(clipped(str(label), _LONGEST_COLUMN)) for label in columns],
        tickangle=-60 if place.slant else 0,
        showticklabels=True,
        title_standoff=4,
    )
    figure.update_yaxes(
        **common,
        tickvals=[literal(label) for label in rows],
        ticktext=[literal(clipped(str(label), _LONGEST_ROW)) for label in rows],
        autorange="reversed",
        title_standoff=10,
    )


def _name_panels(figure: Any, names: Sequence[str], place: _Place) -> None:
    """What stands above each panel; nothing above one that is alone."""
    if len(names) == 1:
        figure.layout.annotations = ()
    for note in figure.layout.annotations:
        number = int(note.text.rpartition("=")[2])
        note.update(text=literal(names[number]), font={"size": 13})
        if not place.across:
            note.update(x=0, xanchor="left")
