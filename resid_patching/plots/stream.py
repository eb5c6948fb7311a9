"""Pictures of the running total: norms, shares and what is left of the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resid_patching.plots.base import at_token
from resid_patching.plots.depth import draw_lines
from resid_patching.stream import StreamReport

if TYPE_CHECKING:
    import plotly.graph_objects

_DRAWN = {  # column: what it is of, and its panel
    "mean_stream_norm": ("stream after the write", "norms"),
    "mean_write_norm": ("the write", "norms"),
    "mean_share": ("the write", "share (write / stream after it)"),
    "mean_cosine": ("stream after the write", "cosine of the stream with its start"),
}


def stream(report: StreamReport) -> plotly.graph_objects.Figure:
    """Norms of the writes and of the stream, shares, and cosine with the start, write by write.

    Args:
        report: clean or under an intervention.

    Returns:
        A figure of three rows; means over all positions, as in `report.table()`.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    table = report.table()
    frame = table.melt("write", list(_DRAWN), "column").rename(columns={"write": "place"})
    frame["name"] = [_DRAWN[column][0] for column in frame["column"]]
    frame["panel"] = [_DRAWN[column][1] for column in frame["column"]]
    over = report.averaged
    labels = report.axis("pos").labels
    if len(labels) == 1:
        place = "one position a prompt" if labels[0] == "own" else labels[0]
        there = at_token(place, [texts[0] for texts in report.token_texts])
        over = there if over == "one position" else f"{over}: {there}"
    units = "norms in the stream's own unit, share and cosine without unit"
    heading = [f"The running total, {report.how or 'clean'}", f"{units}; {over}"]
    return draw_lines(frame, heading, "")
