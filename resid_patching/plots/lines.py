"""Numbers along depth as lines, from the start at the left to the output at the right."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from resid_patching.address import MLP, Attn, AttnBias, Head, MLPBias, Neuron, parse
from resid_patching.attribution import Attribution
from resid_patching.lens.readout import LensReadout
from resid_patching.plots.base import (
    INK,
    SERIES,
    at_token,
    heading_of,
    lay_out,
    literal,
    require_plotly,
    sign_colours,
    template,
    under,
)
from resid_patching.plots.titles import (
    at_one_position,
    over_prompts,
    scored_after,
    what_is_scored,
)
from resid_patching.result import standard_error
from resid_patching.stream import StreamReport

if TYPE_CHECKING:
    import plotly.graph_objects

_WIDEST, _STEP, _TICK = 1180, 22, 15  # pixels of a figure, of a place along depth, of its name
_STREAM = {  # column of a stream's table: what it is of, and its panel
    "mean_stream_norm": ("stream after the write", "norms"),
    "mean_write_norm": ("the write", "norms"),
    "mean_share": ("the write", "share (write / stream after it)"),
    "mean_cosine": ("stream after the write", "cosine of the stream with its start"),
}
_QUANTITIES = {
    "kl": "KL(final || lens)",
    "entropy": "entropy of the lens",
    "cross_entropy": "-log p(next token)",
}


def lens_by_layer(
    *readouts: LensReadout, quantity: Literal["kl", "entropy", "cross_entropy"] = "kl"
) -> plotly.graph_objects.Figure:
    """KL from the model's output (or entropy, or cross-entropy) by layer, a line for each lens.

    Args:
        readouts: lenses on the same run, such as the logit and the tuned lens.
        quantity: what is averaged over all positions of all prompts.

    Returns:
        A figure with a trace for each lens; its last point is the model's own output.

    Raises:
        ValueError: no readout, another quantity, or other rows.
    """
    if quantity not in _QUANTITIES:
        raise ValueError(f"quantity is one of {', '.join(_QUANTITIES)}, got {quantity!r}")
    if not readouts or len({readout.labels for readout in readouts}) > 1:
        raise ValueError("a line for each lens needs lenses that read the same rows")
    import pandas

    tables = {}
    for readout in readouts:
        name = lens_name(readout.plan, tables)
        tables[name] = getattr(readout, quantity).table().assign(name=name)
    frame = pandas.concat(tables.values()).rename(columns={"layer": "place"})
    n, prompts = int(frame["n"].iloc[0]), len(readouts[0].run)
    over = f"mean over {n} positions of {prompts} prompt{'s' * (prompts > 1)}"
    heading = heading_of(
        f"{_QUANTITIES[quantity]} by layer",
        "nats",
        over,
        "norm recomputed at each layer",
        *under(getattr(readouts[0], quantity)),
    )
    return draw_lines(frame, heading, "nats")


def lens_name(plan: str, known: Mapping[str, object]) -> str:
    """Which lens a plan is of, numbered where one of that name is known."""
    name = "tuned lens" if "tuned lens" in plan else "logit lens"
    return name if name not in known else f"{name} {len(known) + 1}"


def kl_by_layer(
    columns: Mapping[str, Sequence[float]], labels: Sequence[str], *, over: str
) -> plotly.graph_objects.Figure:
    """KL from the model's output by layer, from numbers that were measured before.

    Args:
        columns: such as `logit lens` and `tuned`: a number for each layer, in nats.
        labels: the layers.
        over: what the numbers are means over.
    """
    import pandas

    wide = pandas.DataFrame({"place": list(labels), **columns})
    heading = heading_of("KL(final || lens) by layer", "nats", over)
    return draw_lines(wide.melt("place", var_name="name"), heading, "nats")


def stream(report: StreamReport) -> plotly.graph_objects.Figure:
    """Norms of the writes and of the stream, shares, and cosine with the start, write by write.

    Args:
        report: clean or under an intervention.

    Returns:
        A figure of three rows; means over all positions, as in `report.table()`.
    """
    table = report.table().rename(columns={"write": "place"})
    frame = table.melt("place", list(_STREAM), "column")
    if report.has_error:
        errors = [column.replace("mean", "se") for column in _STREAM]
        frame["se"] = table.melt("place", errors)["value"]
    frame["name"], frame["panel"] = zip(*frame["column"].map(_STREAM), strict=True)
    over, labels = report.averaged, report.axis("pos").labels
    if len(labels) == 1:
        there = at_token(labels[0], [texts[0] for texts in report.token_texts])
        over = there if over == "one position" else f"{over}: {there}"
    units = "norms in the stream's own unit, share and cosine without unit"
    changes = [*([report.how] if report.how else []), *under(report)] or ["clean"]
    heading = [", ".join(["The running total", *changes]), f"{units}; {over}"]
    return draw_lines(frame, heading, "")


def accumulated(found: Attribution) -> plotly.graph_objects.Figure:
    """The running sum of the rows along depth, each layer's own part as a bar.

    Heads and neurons are added up to their layer; the constants of final norm and unembedding
    come last, so that the line ends at the model's own value.

    Args:
        found: at one position, by any grain.

    Returns:
        A figure with the running sum as a line and the parts as bars.

    Raises:
        ValueError: there are several positions.
    """
    import pandas

    at_one_position(found)
    places = ["constants" if c in found.constants else _layer_of(c) for c in found.components]
    each: Any = pandas.DataFrame(found.values[..., 0].detach().cpu().double().numpy())
    each = each.groupby(places, sort=False).sum()  # [place, prompt]
    parts = each.mean(axis=1)
    end = float(found.model_value.double().mean())
    heading = heading_of(
        f"{what_is_scored(found)}, accumulated along depth",
        found.unit,
        scored_after(found),
        over_prompts(found),
        f"it ends at {found.own_value}, {end:+.5g}",
    )
    sums = parts.cumsum().rename_axis("place").reset_index(name="value").assign(name="sum so far")
    if found.has_error:
        sums["se"] = standard_error(torch.tensor(each.cumsum().to_numpy())).numpy()
    figure = draw_lines(sums, heading, found.unit, colours=[INK], from_zero=False)
    figure.add_bar(
        x=[literal(place) for place in parts.index],
        y=parts,
        error_y={"array": standard_error(torch.tensor(each.to_numpy())).numpy()}
        if found.has_error
        else None,
        name="written here",
        marker_color=sign_colours(parts),
        hovertemplate=f"%{{x}} wrote %{{y:+.5g}} {literal(found.unit)}<extra></extra>",
    )
    return figure


def _layer_of(label: str) -> str:
    """The component that a row is a part of."""
    match parse(label):
        case Head(layer, _) | AttnBias(layer):
            return str(Attn(layer))
        case Neuron(layer, _) | MLPBias(layer):
            return str(MLP(layer))
        case whole:
            return str(whole)


def draw_lines(
    frame: Any,
    heading: Sequence[str],
    unit: str,
    *,
    colours: Sequence[str] = SERIES,
    from_zero: bool = True,
) -> plotly.graph_objects.Figure:
    """Numbers at each place along depth, every place and the last one named where there is room.

    Args:
        frame: the columns `place`, `value` and `name` of the line; NaN is a gap; `se` for standard
            errors; `panel` for several panels below each other.
        heading: the title, line by line.
        unit: of the numbers; none where each panel has its own.
        colours: of the lines.
        from_zero: whether the axis begins at 0.
    """
    px = require_plotly()
    panels = list(dict.fromkeys(frame.get("panel", [])))
    frame = frame.assign(place=frame["place"].map(literal), name=frame["name"].map(literal))
    places = frame["place"].unique().tolist()
    figure = px.line(
        frame,
        x="place",
        y="value",
        color="name",
        symbol="name",
        markers=True,
        error_y="se" if "se" in frame else None,
        custom_data=["panel"] if panels else None,
        facet_col="panel" if panels else None,
        facet_col_wrap=1,
        facet_row_spacing=0.07,
        color_discrete_sequence=colours,
        labels={"place": "", "value": literal(unit)},
        template=template(),
    )
    said = f"%{{fullData.name}}, %{{x}}: %{{y:.5g}} {literal(unit)}<extra></extra>"
    figure.update_traces(
        marker_size=7, hovertemplate=f"%{{customdata[0]}}<br>{said}" if panels else said
    )
    for note in figure.layout.annotations:  # "panel=norms"
        note.update(text=note.text.partition("=")[2], font={"size": 12}, x=0, xanchor="left")
    width = min(_WIDEST, max(560, 110 + _STEP * len(places)))
    lay_out(
        figure,
        heading,
        width=width,
        inside=180 * len(panels) or 280,
        above=20 if panels else 0,
        below=20 + round(6.4 * max(map(len, places))),
        least=min(_WIDEST, max(330, 110 + _TICK * len(places))),
        legend=True,
        legend_y=1.045 if panels else 1,
    )
    last = len(places) - 1
    step = max(1, math.ceil(len(places) * _TICK / (width - 110)))
    figure.update_xaxes(
        type="category",
        tickvals=[
            place
            for n, place in enumerate(places)
            if n == last or (n % step == 0 and n + step <= last)
        ],
        tickangle=-90,
        tickfont={"size": 11},
        range=[-0.6, last + 0.6],
        zeroline=False,
    )
    figure.update_yaxes(matches=None, rangemode="tozero" if from_zero else "normal")
    return figure
