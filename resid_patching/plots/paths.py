"""Paths from senders to receivers as a drawing, layer below layer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from resid_patching.ablation import Effect
from resid_patching.address import (
    MLP,
    Address,
    Attn,
    AttnBias,
    Embed,
    Head,
    HeadInput,
    Logits,
    MLPBias,
    MLPIn,
    Neuron,
    PosEmbed,
    parse,
    read_stage,
    write_stage,
)
from resid_patching.errors import AddressError
from resid_patching.plots.base import (
    INK,
    clipped,
    heading_of,
    lay_out,
    literal,
    require_plotly,
    sign_colours,
)
from resid_patching.plots.titles import about_effect, metric_words
from resid_patching.shown import ranked

if TYPE_CHECKING:
    import plotly.graph_objects

_ROW, _COLUMN, _WIDEST_LINE = 64, 76, 9.0  # pixels
_SIDES = {1: -1.0, 3: 1.0}  # of attention and of MLPs, by the stage in which only they write
_ROWS = {
    **dict.fromkeys((Embed, PosEmbed), "start"),
    HeadInput: "into heads, layer {}",
    **dict.fromkeys((Head, Attn, AttnBias), "attention, layer {}"),
    MLPIn: "into MLP, layer {}",
    **dict.fromkeys((MLP, MLPBias, Neuron), "MLP, layer {}"),
    Logits: "output",
}


def path_diagram(effect: Effect, *, top: int = 30) -> plotly.graph_objects.Figure:
    """The largest paths as lines from senders down to receivers, layer below layer.

    A line is as wide as its effect is large, blue above 0 and red (dashed) below.

    Args:
        effect: of a path to receivers side by side.
        top: how many paths, by the size of their total effect.

    Returns:
        A figure with a trace for each path; the numbers are at the points in the middle.

    Raises:
        ValueError: there are no receivers side by side, or no path has an effect.
    """
    require_plotly()
    from plotly.graph_objects import Figure

    if not effect.receivers:
        raise ValueError(
            "a diagram is of paths to receivers side by side, "
            "such as to=rp.receivers('9.9.q', 'logits')"
        )
    known: Any = ranked(effect.table())
    paths = known[known["value"] != 0][:top]
    if paths.empty:
        raise ValueError("no path from these senders to these receivers has an effect")
    nodes, bands = _nodes(paths)
    place = nodes.set_index(["end", "label"])[["x", "y"]]
    starts = place.loc["sender"].loc[paths["target"]].to_numpy()
    ends = place.loc["receiver"].loc[paths["receiver"]].to_numpy()
    paths[["x", "y"]] = (starts + ends) / 2
    figure = Figure()
    for row in reversed(range(len(paths))):  # the largest on top
        share = float(paths["value"][row] / paths["value"].abs().max())
        figure.add_scatter(
            x=[starts[row][0], ends[row][0]],
            y=[starts[row][1], ends[row][1]],
            mode="lines",
            line={
                "width": max(0.8, _WIDEST_LINE * abs(share)),
                "color": sign_colours([share])[0],
                "dash": "solid" if share > 0 else "10px,5px",
            },
            opacity=0.45 + 0.5 * abs(share),
            hoverinfo="skip",
        )
    _add_points(figure, paths, nodes, effect.unit)
    details = [*about_effect(effect), "width: size; blue: above 0; red, dashed: below 0"]
    if len(paths) < len(known):
        details.insert(2, f"the {len(paths)} largest of {len(known)} paths")
    first = f"Paths by their total effect on {metric_words(effect)}"
    kinds = {label.rpartition(".")[2] for label in paths["receiver"]} & {"q", "k", "v"}
    left, right = nodes["x"].min(), nodes["x"].max()
    column = _COLUMN * (1.5 if len(kinds) > 1 else 1)
    width = max(640, 190 + round(column * (right - left + 1)))
    lay_out(
        figure,
        heading_of(first, effect.unit, *details),
        width=width,
        inside=_ROW * len(bands),
        below=20,
        least=width,
    )
    figure.update_xaxes(visible=False, range=[left - 0.7, right + 0.7])
    figure.update_yaxes(
        title="",
        tickvals=list(range(len(bands))),
        ticktext=bands,
        range=[len(bands) - 0.45, -0.55],
        zeroline=False,
    )
    return figure


def _add_points(figure: Any, paths: Any, nodes: Any, unit: str) -> None:
    """Points in the middle of lines, which show their numbers; senders and receivers, named."""
    figure.add_scatter(
        x=paths["x"],
        y=paths["y"],
        customdata=paths[["target", "receiver", "value", "direct", "indirect"]],
        mode="markers",
        marker={"size": 7, "color": sign_colours(paths["value"])},
        marker_line={"width": 1, "color": "#ffffff"},
        hovertemplate="%{customdata[0]} to %{customdata[1]}<br>total %{customdata[2]:+.5g} "
        f"{literal(unit)}<br>direct %{{customdata[3]:+.5g}}<br>"
        "indirect %{customdata[4]:+.5g}<extra></extra>",
    )
    for end, symbol, side in (("sender", "circle", "top"), ("receiver", "square", "bottom")):
        shown = nodes[nodes["end"] == end]
        figure.add_scatter(
            x=shown["x"],
            y=shown["y"],
            text=[clipped(label, 16) for label in shown["label"]],
            mode="markers+text",
            marker={"symbol": symbol, "size": 10, "color": INK},
            textposition=f"{side} center",
            hovertemplate=[f"{literal(label)}<extra></extra>" for label in shown["label"]],
        )


def _nodes(paths: Any) -> tuple[Any, list[str]]:
    """Senders and receivers with their places, and the names of the rows that they stand in.

    Heads stand by their number, other receivers in the middle, attention layers left of it and
    MLPs right of it, so that lines do not run along one another.
    """
    import pandas

    ends = {"sender": paths["target"], "receiver": paths["receiver"]}
    pairs = sorted({(label, end) for end, labels in ends.items() for label in labels})
    nodes: Any = pandas.DataFrame(pairs, columns=["label", "end"])
    bands = [_band(*pair) for pair in pairs]
    rows = sorted(set(bands))
    nodes["y"] = [float(rows.index(band)) for band in bands]
    sides = pandas.Series(_SIDES.get(stage, 0.0) for _, stage, _ in bands)
    heads = pandas.Series([_head_column(label) for label, _ in pairs], dtype=float)
    middle = (heads.min() + heads.max()) / 2 if heads.notna().any() else 0.0
    others = nodes[heads.isna()].groupby("y")["y"]
    spread = others.cumcount() - (others.transform("size") - 1) / 2
    # Heads a little aside, so that lines of one column do not hide each other.
    nodes["x"] = (heads + 0.1 * (nodes["y"] % 3 - 1)).fillna(middle + spread + sides)
    return nodes, [name for *_, name in rows]


def _band(label: str, end: str) -> tuple[int | float, int, str]:
    """The row of a node: when it writes or reads, as (layer, stage), and the row's name."""
    address: Any = _address(label)
    if address is None:
        return (math.inf, -1, "several together")
    layer, stage = write_stage(address) if end == "sender" else read_stage(address)
    return layer, stage, _ROWS.get(type(address), str(address)).format(layer)


def _head_column(label: str) -> float | None:
    """The number of a head; what its query, key and value read stand beside each other."""
    address = _address(label)
    if isinstance(address, HeadInput):
        return address.head + {"q": -0.33, "k": 0.0, "v": 0.33}[address.which]
    return float(address.head) if isinstance(address, Head) else None


def _address(label: str) -> Address | None:
    try:
        return parse(label)
    except AddressError:  # several together
        return None
