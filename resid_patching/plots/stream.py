"""Pictures of the running total: norms, shares and what is left of the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resid_patching.plots.bars import depth_axis, depth_width, least_depth
from resid_patching.plots.base import (
    SERIES,
    error_bars,
    lay_out,
    listed,
    literal,
    require_plotly,
    under,
)
from resid_patching.stream import StreamReport

if TYPE_CHECKING:
    import plotly.graph_objects


def stream(report: StreamReport) -> plotly.graph_objects.Figure:
    """Norms of the writes and of the stream, shares, and cosine with the start, write by write.

    Args:
        report: clean or under an intervention.

    Returns:
        A figure of three rows; means over all positions, as in `report.table()`.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    go = require_plotly()
    from plotly.subplots import make_subplots

    frame = report.table()
    writes = [literal(write) for write in frame["write"]]
    titles = ("norms", "share (write / stream after it)")
    figure = make_subplots(
        rows=3,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.07,
        subplot_titles=(*titles, "cosine of the stream with its start"),
    )
    drawn = (
        (1, "mean_stream_norm", "stream after the write", SERIES[0], "circle"),
        (1, "mean_write_norm", "the write", SERIES[1], "square"),
        (2, "mean_share", "share", SERIES[1], "square"),
        (3, "mean_cosine", "cosine", SERIES[0], "circle"),
    )
    for row, column, name, colour, symbol in drawn:
        errors = frame.get(column.replace("mean", "se"))
        line = go.Scatter(
            x=list(range(len(writes))),
            y=listed(frame[column].tolist()),
            error_y=None if errors is None else error_bars(errors.tolist()),
            customdata=writes,
            name=name,
            mode="lines+markers",
            line={"color": colour},
            marker={"symbol": symbol, "size": 6},
            cliponaxis=False,
            showlegend=row == 1,
            hovertemplate=f"{name}, %{{customdata}}: %{{y:.5g}}<extra></extra>",
        )
        figure.add_trace(line, row=row, col=1)
    n = int(frame["n"].iloc[0])
    over = f"mean over {n} positions" if n > 1 else "one position"
    changes = [*([report.how] if report.how else []), *under(report)] or ["clean"]
    width = depth_width(len(writes))
    lay_out(
        figure,
        [
            ", ".join(["The running total", *changes]),
            f"norms in the stream's own unit, share and cosine without unit; {over}",
        ],
        width=width,
        inside=540,
        above=46,
        below=20 + round(6.6 * max(map(len, writes))),
        least=least_depth(len(writes)),
        legend={"orientation": "h", "y": 1.045, "yanchor": "bottom", "x": 0},
    )
    figure.update_annotations(font={"size": 12}, x=0, xanchor="left")
    depth_axis(figure, writes, width, row=3, col=1)
    figure.update_xaxes(range=[-0.6, len(writes) - 0.4], zeroline=False)
    figure.update_yaxes(automargin=True, rangemode="tozero")
    return figure
