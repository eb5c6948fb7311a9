"""Paths from senders to receivers as a drawing, layer below layer."""

from __future__ import annotations

from dataclasses import dataclass
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
    heading_of,
    lay_out,
    literal,
    require_plotly,
)
from resid_patching.plots.heat import about_effect, metric_words

if TYPE_CHECKING:
    import plotly.graph_objects

_ROW, _COLUMN = 64, 76  # pixels
_WIDEST_LINE = 9.0  # pixels


@dataclass(frozen=True)
class _Edge:
    sender: str
    receiver: str
    total: float
    direct: float


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
    go = require_plotly()
    if not effect.receivers:
        raise ValueError(
            "a diagram is of paths to receivers side by side, "
            "such as to=rp.receivers('9.9.q', 'logits')"
        )
    paths, n_known = _largest(effect, top)
    if not paths:
        raise ValueError("no path from these senders to these receivers has an effect")
    bands = sorted(
        {_band(p.sender, True) for p in paths} | {_band(p.receiver, False) for p in paths}
    )
    rows = {band: number for number, band in enumerate(bands)}
    places = _places(paths, rows)
    figure = go.Figure()
    largest = abs(paths[0].total)
    for path in reversed(paths):  # the largest on top
        figure.add_scatter(**_line(path, places, largest))
    figure.add_scatter(**_middles(paths, places, effect.unit))
    for is_sender in (True, False):
        figure.add_scatter(**_nodes(places, is_sender))
    left_out = n_known - len(paths)
    about = (f"the {len(paths)} largest of {n_known} paths",) if left_out else ()
    heading = heading_of(
        f"Paths by their total effect on {metric_words(effect)}",
        effect.unit,
        *about_effect(effect),
        *about,
        "width: size; blue: above 0; red, dashed: below 0",
    )
    columns = [x for x, _ in places.values()]
    several = len({path.receiver.rpartition(".")[2] for path in paths} & {"q", "k", "v"}) > 1
    column = _COLUMN * (1.5 if several else 1)
    width = max(640, 190 + round(column * (max(columns) - min(columns) + 1)))
    lay_out(
        figure,
        heading,
        width=width,
        inside=_ROW * len(rows),
        below=20,
        least=width,
        showlegend=False,
    )
    figure.update_xaxes(visible=False, range=[min(columns) - 0.7, max(columns) + 0.7])
    figure.update_yaxes(
        tickvals=list(rows.values()),
        ticktext=[band[2] for band in bands],
        range=[len(rows) - 0.45, -0.55],
        zeroline=False,
        automargin=True,
    )
    return figure


def _largest(effect: Effect, top: int) -> tuple[list[_Edge], int]:
    """The paths of the largest effects, and how many there are that have one."""
    total, direct = effect.mean(effect.total), effect.mean(effect.direct)
    found = [
        _Edge(sender, receiver, float(total[row, column]), float(direct[row, column]))
        for row, sender in enumerate(effect.targets)
        for column, receiver in enumerate(effect.receivers)
        if not bool(total[row, column].isnan())
    ]
    known = sorted(found, key=lambda path: -abs(path.total))
    return [path for path in known[:top] if path.total != 0], len(found)


_Band = tuple[int, int, str]


def _band(label: str, is_sender: bool) -> _Band:
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


def _places(
    paths: list[_Edge], rows: dict[_Band, int]
) -> dict[tuple[str, bool], tuple[float, float]]:
    """X and y of every node: heads by their number, everything else in the middle."""
    nodes = {(p.sender, True) for p in paths} | {(p.receiver, False) for p in paths}
    heads = {label: x for label, _ in nodes if (x := _head_column(label)) is not None}
    middle = (min(heads.values()) + max(heads.values())) / 2 if heads else 0.0
    others: dict[int, list[tuple[str, bool]]] = {}
    found = {}
    for node in sorted(nodes):
        row = rows[_band(*node)]
        if node[0] in heads:
            # A little aside, so that lines of one column do not hide each other.
            found[node] = (heads[node[0]] + 0.1 * (row % 3 - 1), float(row))
        else:
            others.setdefault(row, []).append(node)
    for row, members in others.items():
        for number, node in enumerate(members):
            found[node] = (middle + number - (len(members) - 1) / 2, float(row))
    return found


def _head_column(label: str) -> float | None:
    """The number of a head; what its query, key and value read stand beside each other."""
    try:
        address = parse(label)
    except AddressError:
        return None
    if isinstance(address, HeadInput):
        return address.head + {"q": -0.33, "k": 0.0, "v": 0.33}[address.which]
    return float(address.head) if isinstance(address, Head) else None


def _line(path: _Edge, places: Any, largest: float) -> dict[str, Any]:
    (x0, y0), (x1, y1) = places[path.sender, True], places[path.receiver, False]
    share = abs(path.total) / largest
    return {
        "x": [x0, x1],
        "y": [y0, y1],
        "mode": "lines",
        "line": {
            "width": max(0.8, _WIDEST_LINE * share),
            "color": POSITIVE if path.total > 0 else NEGATIVE,
            "dash": "solid" if path.total > 0 else "10px,5px",
        },
        "opacity": 0.35 + 0.6 * share,
        "hoverinfo": "skip",
    }


def _middles(paths: list[_Edge], places: Any, unit: str) -> dict[str, Any]:
    """Points in the middle of the lines, which show their numbers."""
    ends = [(places[path.sender, True], places[path.receiver, False]) for path in paths]
    return {
        "x": [(a[0] + b[0]) / 2 for a, b in ends],
        "y": [(a[1] + b[1]) / 2 for a, b in ends],
        "customdata": [
            [literal(p.sender), literal(p.receiver), p.total, p.direct, p.total - p.direct]
            for p in paths
        ],
        "mode": "markers",
        "marker": {
            "size": 7,
            "color": [POSITIVE if p.total > 0 else NEGATIVE for p in paths],
            "line": {"width": 1, "color": "#ffffff"},
        },
        "hovertemplate": "%{customdata[0]} to %{customdata[1]}<br>total %{customdata[2]:+.5g} "
        f"{literal(unit)}<br>direct %{{customdata[3]:+.5g}}<br>"
        "indirect %{customdata[4]:+.5g}<extra></extra>",
    }


def _nodes(places: Any, is_sender: bool) -> dict[str, Any]:
    shown = {label: place for (label, sender), place in places.items() if sender == is_sender}
    return {
        "x": [x for x, _ in shown.values()],
        "y": [y for _, y in shown.values()],
        "text": [literal(_brief(label)) for label in shown],
        "mode": "markers+text",
        "textposition": "top center" if is_sender else "bottom center",
        "textfont": {"size": 11},
        "marker": {
            "symbol": "circle" if is_sender else "square",
            "size": 10,
            "color": "#ffffff",
            "line": {"width": 1.5, "color": INK},
        },
        "hovertemplate": [f"{literal(label)}<extra></extra>" for label in shown],
    }


def _brief(label: str) -> str:
    return label if len(label) <= 14 else f"{label[:10]} … ({label.count(' + ') + 1})"
