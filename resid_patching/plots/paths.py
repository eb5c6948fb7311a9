"""Paths from senders to receivers as a drawing, layer below layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resid_patching.ablation import Effect
from resid_patching.address import (
    MLP,
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
    Stream,
    parse,
)
from resid_patching.errors import AddressError
from resid_patching.plots.base import (
    INK,
    NEGATIVE,
    POSITIVE,
    clipped,
    heading_of,
    lay_out,
    literal,
    require_plotly,
    template,
)
from resid_patching.plots.heat import about_effect, metric_words

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

_ROW, _COLUMN = 64, 76  # pixels
_WIDEST_LINE = 9.0  # pixels


def path_diagram(effect: Effect, *, top: int = 30) -> plotly.graph_objects.Figure:
    """The largest paths as lines from senders down to receivers, layer below layer.

    A line is as wide as its effect is large, blue above 0 and red (dashed) below.

    Args:
        effect: of a path to receivers side by side.
        top: how many paths, by the size of their total effect.

    Returns:
        A figure with a trace for each path; the numbers are at the points in the middle.

    Raises:
        MissingExtraError: plotly is not installed.
        ValueError: there are no receivers side by side, or no path has an effect.
    """
    px = require_plotly()
    if not effect.receivers:
        raise ValueError(
            "a diagram is of paths to receivers side by side, "
            "such as to=rp.receivers('9.9.q', 'logits')"
        )
    known = effect.table().dropna(subset=["value"])
    paths = known.sort_values("value", key=abs, ascending=False, kind="stable")[:top]
    paths = paths[paths["value"] != 0].reset_index(drop=True)
    if paths.empty:
        raise ValueError("no path from these senders to these receivers has an effect")
    nodes, bands = _nodes(paths)
    paths = _with_ends(paths, nodes)
    figure = _lines(px, paths)
    figure.add_traces([*_middles(px, paths, effect.unit), *_ends(px, nodes)])
    details = [*about_effect(effect), "width: size; blue: above 0; red, dashed: below 0"]
    if len(paths) < len(known):
        details.insert(2, f"the {len(paths)} largest of {len(known)} paths")
    heading = heading_of(
        f"Paths by their total effect on {metric_words(effect)}", effect.unit, *details
    )
    several = len({label.rpartition(".")[2] for label in paths["receiver"]} & {"q", "k", "v"}) > 1
    left, right = nodes["x"].min(), nodes["x"].max()
    width = max(640, 190 + round(_COLUMN * (1.5 if several else 1) * (right - left + 1)))
    lay_out(
        figure,
        heading,
        width=width,
        inside=_ROW * len(bands),
        below=20,
        least=width,
        showlegend=False,
    )
    figure.update_xaxes(visible=False, range=[left - 0.7, right + 0.7])
    figure.update_yaxes(
        title="",
        tickvals=list(range(len(bands))),
        ticktext=bands,
        range=[len(bands) - 0.45, -0.55],
        zeroline=False,
        automargin=True,
    )
    return figure


# Where nodes stand


def _nodes(paths: pandas.DataFrame) -> tuple[pandas.DataFrame, list[str]]:
    """Senders and receivers with their places, and the names of the rows that they stand in.

    Heads stand by their number, everything else in the middle.
    """
    import pandas

    ends = [
        pandas.DataFrame({"label": paths[column], "end": end})
        for column, end in (("target", "sender"), ("receiver", "receiver"))
    ]
    nodes = pandas.concat(ends).drop_duplicates().sort_values("label", ignore_index=True)
    nodes["band"] = [_band(label) for label in nodes["label"]]
    bands = sorted(set(nodes["band"]))
    nodes["y"] = [float(bands.index(band)) for band in nodes["band"]]
    heads = pandas.Series([_head_column(label) for label in nodes["label"]], dtype=float)
    middle = (heads.min() + heads.max()) / 2 if heads.notna().any() else 0.0
    others = nodes[heads.isna()].groupby("y")["y"]
    spread = others.cumcount() - (others.transform("size") - 1) / 2
    # A little aside, so that lines of one column do not hide each other.
    nodes["x"] = (heads + 0.1 * (nodes["y"] % 3 - 1)).fillna(middle + spread)
    return nodes, [name for _, _, name in bands]


def _band(label: str) -> tuple[int, int, str]:
    """The row of a node: when it writes or reads, and what stands at the row."""
    try:
        address = parse(label)
    except AddressError:  # several together
        return (10**6, 0, "several together")
    match address:
        case Embed() | PosEmbed():
            return (-1, 0, "start")
        case HeadInput(layer, _, _):
            return (layer, 1, f"into heads, layer {layer}")
        case Head(layer, _) | Attn(layer) | AttnBias(layer):
            return (layer, 2, f"attention, layer {layer}")
        case MLPIn(layer):
            return (layer, 4, f"into MLP, layer {layer}")
        case MLP(layer) | MLPBias(layer) | Neuron(layer, _):
            return (layer, 5, f"MLP, layer {layer}")
        case Stream(layer, place):
            stage = {"pre": 0, "mid": 3, "post": 6}[place]
            return (layer, stage, f"resid_{place}.{layer}")
        case Logits():
            return (10**6, 1, "output")
        case _:
            return (10**6, 2, "other")


def _head_column(label: str) -> float | None:
    """The number of a head; what its query, key and value read stand beside each other."""
    try:
        address = parse(label)
    except AddressError:
        return None
    if isinstance(address, HeadInput):
        return address.head + {"q": -0.33, "k": 0.0, "v": 0.33}[address.which]
    return float(address.head) if isinstance(address, Head) else None


def _with_ends(paths: pandas.DataFrame, nodes: pandas.DataFrame) -> pandas.DataFrame:
    """Paths with the places of their ends and of their middle, and their colour."""
    for column, end in (("target", "sender"), ("receiver", "receiver")):
        here = nodes[nodes["end"] == end].set_index("label")[["x", "y"]]
        paths = paths.join(here.add_prefix(f"{end}_"), on=column)
    colours = [POSITIVE if value > 0 else NEGATIVE for value in paths["value"]]
    return paths.assign(
        x=(paths["sender_x"] + paths["receiver_x"]) / 2,
        y=(paths["sender_y"] + paths["receiver_y"]) / 2,
        colour=colours,
    )


# What is drawn


def _lines(px: Any, paths: pandas.DataFrame) -> Any:
    """A line for each path, the largest on top."""
    import pandas

    upwards = paths[::-1]
    ends = [
        pandas.DataFrame(
            {"path": upwards.index, "x": upwards[f"{end}_x"], "y": upwards[f"{end}_y"]}
        )
        for end in ("sender", "receiver")
    ]
    figure = px.line(
        pandas.concat(ends),
        x="x",
        y="y",
        color="path",
        color_discrete_sequence=upwards["colour"].tolist(),
        template=template(),
    )
    for trace, value in zip(figure.data, upwards["value"], strict=True):
        share = abs(value) / abs(paths["value"][0])
        trace.line.update(width=max(0.8, _WIDEST_LINE * share))
        trace.line.dash = "solid" if value > 0 else "10px,5px"
        trace.update(opacity=0.35 + 0.6 * share, hoverinfo="skip", hovertemplate=None)
    return figure


def _middles(px: Any, paths: pandas.DataFrame, unit: str) -> Any:
    """Points in the middle of the lines, which show their numbers."""
    numbers = ["target", "receiver", "value", "direct", "indirect"]
    figure = px.scatter(paths, x="x", y="y", custom_data=numbers, template=template())
    figure.update_traces(
        marker={"size": 7, "color": paths["colour"], "line": {"width": 1, "color": "#ffffff"}},
        hovertemplate="%{customdata[0]} to %{customdata[1]}<br>total %{customdata[2]:+.5g} "
        f"{literal(unit)}<br>direct %{{customdata[3]:+.5g}}<br>"
        "indirect %{customdata[4]:+.5g}<extra></extra>",
    )
    return figure.data


def _ends(px: Any, nodes: pandas.DataFrame) -> Any:
    """A circle for each sender and a square for each receiver, with their names."""
    shown = nodes.assign(
        whole=nodes["label"].map(literal),
        brief=[literal(clipped(label, 16)) for label in nodes["label"]],
    )
    figure = px.scatter(
        shown,
        x="x",
        y="y",
        text="brief",
        symbol="end",
        custom_data=["whole"],
        template=template(),
        symbol_map={"sender": "circle", "receiver": "square"},
    )
    figure.update_traces(
        textfont_size=11,
        marker={"size": 10, "color": INK},
        hovertemplate="%{customdata[0]}<extra></extra>",
    )
    for trace in figure.data:
        trace.textposition = "top center" if trace.name == "sender" else "bottom center"
    return figure.data
