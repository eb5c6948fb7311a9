"""Numbers along depth as lines, from the start at the left to the output at the right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from resid_patching.plots.base import (
    LEGEND,
    LEGEND_HEIGHT,
    SERIES,
    lay_out,
    literal,
    require_plotly,
    template,
)

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

_WIDEST, _STEP, _TICK = 1180, 22, 15  # pixels


def draw_lines(
    frame: pandas.DataFrame,
    heading: Sequence[str],
    unit: str,
    *,
    colours: Sequence[str] = SERIES,
    from_zero: bool = True,
) -> plotly.graph_objects.Figure:
    """Numbers at each place along depth, every place and the last one named where there is room.

    Args:
        frame: the columns `place`, `value` and `name` of the line; NaN is a gap; `panel` for
            several panels below each other.
        heading: the title, line by line.
        unit: of the numbers; none where each panel has its own.
        colours: of the lines.
        from_zero: whether the axis begins at 0.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    px = require_plotly()
    panels = list(dict.fromkeys(frame.get("panel", [])))
    n_panels = max(1, len(panels))
    places = [literal(place) for place in dict.fromkeys(frame["place"])]
    figure = px.line(
        frame.assign(place=frame["place"].map(literal), name=frame["name"].map(literal)),
        x="place",
        y="value",
        color="name",
        symbol="name",
        markers=True,
        custom_data=["panel"] if panels else None,
        facet_col="panel" if panels else None,
        facet_col_wrap=1,
        facet_row_spacing=0.07,
        category_orders={"place": places, "panel": panels},
        color_discrete_sequence=colours,
        labels={"place": "", "value": literal(unit)},
        template=template(),
    )
    said = f"%{{fullData.name}}, %{{x}}: %{{y:.5g}} {literal(unit)}".rstrip()
    said = f"%{{customdata[0]}}<br>{said}" if panels else said
    figure.update_traces(cliponaxis=False, marker_size=7, hovertemplate=f"{said}<extra></extra>")
    figure.for_each_annotation(
        lambda note: note.update(
            text=literal(note.text.partition("=")[2]), font={"size": 12}, x=0, xanchor="left"
        )
    )
    width = min(_WIDEST, max(560, 110 + _STEP * len(places)))
    lay_out(
        figure,
        heading,
        width=width,
        inside=280 if n_panels == 1 else 180 * n_panels,
        above=LEGEND_HEIGHT + 20 * bool(panels),
        below=20 + round(6.4 * max(map(len, places))),
        least=min(_WIDEST, max(330, 110 + _TICK * len(places))),
        showlegend=True,
        legend={**LEGEND, "y": 1.045 if panels else 1},
    )
    last = len(places) - 1
    step = max(1, math.ceil(len(places) * _TICK / (width - 110)))
    ticks = [place for n, place in enumerate(places) if n % step == 0 and n + step <= last]
    figure.update_xaxes(
        type="category",
        tickvals=[*ticks, places[last]],
        tickangle=-90,
        tickfont={"size": 11},
        range=[-0.6, last + 0.6],
        zeroline=False,
    )
    figure.update_yaxes(automargin=True, matches=None)
    if from_zero:
        figure.update_yaxes(rangemode="tozero")
    return figure
