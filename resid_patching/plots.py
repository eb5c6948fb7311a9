"""Pictures of results, as plotly figures: `pip install 'resid-patching[plots]'`.

    heatmap(ablate(run, heads(model), ...))          layer × head
    heatmap(ablate(run, senders, Path(to=readers(...), ...)), of="direct")   sender × reader
    heatmap(direct_logit_attribution(run, ..., by="head"))                   layer × head
    bars({"0.1": -9.9, "2.3": -0.8}, title="Total effect", unit="logits", top=10)

A cell or bar is the mean over prompts of the result's own numbers, blue above 0 and red below, on
a scale that runs as far to one side of 0 as to the other. A value that does not exist (NaN) is a
grey cell with a cross, or no bar; 0 is white. The unit and the kind of ablation are in the title.

Figures carry their own template, and no global theme is read or changed.
"""

from __future__ import annotations

import html
import importlib
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from resid_patching.ablation import Effect
from resid_patching.address import Head, parse
from resid_patching.attribution import Attribution
from resid_patching.errors import AddressError, MissingExtraError
from resid_patching.result import Axis, Result

if TYPE_CHECKING:
    import plotly.graph_objects

Of: TypeAlias = Literal["total", "direct", "indirect"]

# ColorBrewer's RdBu, which the colour-blind tell apart: red below 0, blue above.
_RED_TO_BLUE = (
    "#67001f #b2182b #d6604d #f4a582 #fddbc7 #f7f7f7 #d1e5f0 #92c5de #4393c3 #2166ac #053061"
).split()
_NEGATIVE, _POSITIVE, _ABSENT = "#b2182b", "#2166ac", "#bdbdbd"
_CELL_WIDTH, _ROW_HEIGHT, _LINE_HEIGHT = 46, 23, 20  # pixels
_MANY_ROWS = 40  # from here on rows are thinner, and cells show no numbers
_CHARACTER = 6.6  # pixels, about


def require_plotly() -> Any:
    """The module `plotly.graph_objects`.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    try:
        return importlib.import_module("plotly.graph_objects")
    except ImportError as error:
        raise MissingExtraError(
            "pictures are drawn with plotly, which is not installed; "
            "pip install 'resid-patching[plots]'"
        ) from error


def heatmap(
    result: Result, *, of: Of = "total", title: str | None = None
) -> plotly.graph_objects.Figure:
    """A grid of numbers as colours: layer × head, sender × reader, or a result's own two axes.

    Args:
        result: an `Effect` of heads, one at a time (layer × head), or of a path to readers side by
            side (sender × reader); an `Attribution` by head at one position (layer × head; the
            other rows are left out); or a `Result` with two axes besides `batch`.
        of: which numbers of an `Effect`: total, direct or indirect; hovering shows all three.
        title: the title's first line; None says what the numbers are. Unit, kind and number of
            prompts stand below it in either case.

    Returns:
        A figure whose first trace holds the numbers, None where there is none.

    Raises:
        MissingExtraError: plotly is not installed.
        ValueError: another number of axes, no heads, or `of` for what is no `Effect`.
    """
    go = require_plotly()
    if of not in ("total", "direct", "indirect"):
        raise ValueError(f"of is 'total', 'direct' or 'indirect', got {of!r}")
    if of != "total" and not isinstance(result, Effect):
        raise ValueError(f"of={of!r} is a choice between the numbers of an Effect")
    grid = _grid(result, of)
    figure = go.Figure([_cells(go, grid, result.unit), *_absent_cells(go, grid)])
    _lay_out_grid(figure, grid, _heading(result, of, title))
    return figure


def bars(
    values: Mapping[str, float],
    *,
    title: str,
    unit: str,
    top: int | None = None,
    mark: float | None = None,
) -> plotly.graph_objects.Figure:
    """Named numbers as horizontal bars, one below the other.

    Args:
        values: name -> number; NaN is left out.
        title: the title's first line, with the kind of ablation where there is one.
        unit: of the numbers.
        top: only so many, largest first by size, so that strong negative ones are seen; None
            shows all in the order given.
        mark: where a dotted line is drawn, for comparison.

    Returns:
        A figure with one trace.

    Raises:
        MissingExtraError: plotly is not installed.
        ValueError: there is no number.
    """
    go = require_plotly()
    shown = {name: float(value) for name, value in values.items() if not math.isnan(value)}
    if not shown:
        raise ValueError("there is no number to draw")
    if top is not None:
        shown = dict(sorted(shown.items(), key=lambda item: -abs(item[1]))[:top])
    numbers = list(shown.values())
    trace = go.Bar(
        x=numbers,
        y=[_literal(name) for name in shown],
        orientation="h",
        marker={"color": [_POSITIVE if number >= 0 else _NEGATIVE for number in numbers]},
        texttemplate=f"%{{x:{_short(numbers, more=1)}}}",
        textposition="outside",
        cliponaxis=False,
        hovertemplate=f"%{{y}}: %{{x:.6g}} {_literal(unit)}<extra></extra>",
    )
    figure = go.Figure(trace)
    _lay_out_bars(figure, numbers, title, unit, mark)
    return figure


# What is shown


@dataclass(frozen=True, eq=False)
class _Grid:
    """Numbers on two axes, means over prompts; NaN where there is none."""

    rows: Axis
    columns: Axis
    values: Tensor
    beside: Mapping[str, Tensor]  # shown when hovering

    @property
    def largest(self) -> float:
        """The largest size, or 1 where all are 0: what the scale runs to on either side."""
        return float(self.values.nan_to_num().abs().max()) or 1.0

    @property
    def is_tall(self) -> bool:
        return len(self.rows.labels) > _MANY_ROWS


def _grid(result: Result, of: Of) -> _Grid:
    if isinstance(result, Effect):
        parts = {"total": result.total, "direct": result.direct, "indirect": result.indirect}
        means = {name: result.mean(part) for name, part in parts.items()}
        if result.readers:
            return _Grid(result.axis("target"), result.axis("reader"), means[of], means)
        return _by_layer(result.targets, means, of)
    if isinstance(result, Attribution):
        if len(result.axis("pos").labels) != 1:
            raise ValueError("a picture of heads is of one position; choose one, such as -1")
        return _by_layer(result.components, {"written": _mean(result.values[..., 0])}, "written")
    names = [axis.name for axis in result.axes]
    axes = [axis for axis in result.axes if axis.name != "batch"]
    if len(axes) != 2:
        raise ValueError(f"a heat map has two axes besides batch; this has {', '.join(names)}")
    values = result.values
    values = _mean(values.movedim(names.index("batch"), -1)) if "batch" in names else values
    return _Grid(axes[0], axes[1], values.detach().double().cpu(), {})


def _mean(values: Tensor) -> Tensor:
    """Mean over prompts [..., batch] -> [...]."""
    return values.detach().double().cpu().mean(-1)


def _by_layer(labels: Sequence[str], means: Mapping[str, Tensor], shown: str) -> _Grid:
    """The heads among labels as layer × head."""
    heads = {number: head for number, label in enumerate(labels) if (head := _head(label))}
    if not heads:
        raise ValueError(
            f"this picture is of heads one at a time; these are {', '.join(labels[:4])}"
        )
    n_layers = 1 + max(head.layer for head in heads.values())
    n_heads = 1 + max(head.head for head in heads.values())
    planes = {}
    for name, mean in means.items():
        planes[name] = plane = mean.new_full((n_layers, n_heads), math.nan)
        for number, head in heads.items():
            plane[head.layer, head.head] = mean[number]
    layers, columns = tuple(range(n_layers)), tuple(range(n_heads))
    return _Grid(Axis("layer", layers), Axis("head", columns), planes[shown], planes)


def _head(label: str) -> Head | None:
    try:
        address = parse(label)
    except AddressError:  # several targets together
        return None
    return address if isinstance(address, Head) else None


def _heading(result: Result, of: Of, title: str | None) -> list[str]:
    """What the numbers are; then unit, kind, place and prompts."""
    n = result.provenance.n_prompts
    over = f"mean over {n} prompts" if n > 1 else "one prompt"
    if isinstance(result, Effect):
        if result.weights is not None:
            over = f"mean over {int(result.weights.sum())} tokens of {n} prompt{'s' * (n > 1)}"
        first = f"{of.capitalize()} effect on {result.metric}"
        below = f"in {result.unit}; {result.how}, at {result.positions}; {over}"
    else:
        plan = result.provenance.plan
        first, below = plan[:1].upper() + plan[1:], f"in {result.unit}; {over}"
        if title is not None:
            below = f"in {result.unit}; {plan}; {over}"
    return [first if title is None else title, below]


# How it is drawn


def _cells(go: Any, grid: _Grid, unit: str) -> Any:
    numbers = _listed(grid.values.tolist())
    known = [number for row in numbers for number in row if number is not None]
    beside = torch.stack(list(grid.beside.values()), -1) if len(grid.beside) > 1 else None
    lines = [f"{grid.rows.name} %{{y}}", f"{grid.columns.name} %{{x}}"]
    lines.append(f"%{{z:+.5g}} {_literal(unit)}")
    if beside is not None:
        lines += [f"{name} %{{customdata[{i}]:+.5g}}" for i, name in enumerate(grid.beside)]
    return go.Heatmap(
        z=numbers,
        x=_names(grid.columns),
        y=_names(grid.rows),
        customdata=None if beside is None else _listed(beside.tolist()),
        zmin=-grid.largest,
        zmid=0,
        zmax=grid.largest,
        colorscale=[[i / 10, colour] for i, colour in enumerate(_RED_TO_BLUE)],
        colorbar={"title": {"text": _literal(unit)}, "thickness": 12},
        texttemplate=None if grid.is_tall else f"%{{z:{_short(known)}}}",
        textfont={"size": 10},
        hovertemplate="<br>".join(lines) + "<extra></extra>",
        xgap=1,
        ygap=1,
    )


def _absent_cells(go: Any, grid: _Grid) -> list[Any]:
    """Grey cells with a cross where there is no number."""
    absent = grid.values.isnan()
    if not bool(absent.any()):
        return []
    trace = go.Heatmap(
        z=[[0 if cell else None for cell in row] for row in absent.tolist()],
        x=_names(grid.columns),
        y=_names(grid.rows),
        colorscale=[[0, _ABSENT], [1, _ABSENT]],
        showscale=False,
        text=[["×" if cell else "" for cell in row] for row in absent.tolist()],
        texttemplate="%{text}",
        textfont={"size": 10, "color": "#525252"},
        hovertemplate=f"{grid.rows.name} %{{y}}<br>{grid.columns.name} %{{x}}<br>"
        "no value<extra></extra>",
        xgap=1,
        ygap=1,
    )
    return [trace]


def _lay_out_grid(figure: Any, grid: _Grid, heading: list[str]) -> None:
    n_rows, n_columns = grid.values.shape
    labels = {"tickfont": {"size": 11}, "automargin": True, "showgrid": False, "zeroline": False}
    if bool(grid.values.isnan().any()):
        heading = [*heading[:-1], f"{heading[-1]}; grey ×: no value"]
    longest = max(map(len, _names(grid.columns)))
    width = max(440, 190 + n_columns * max(_CELL_WIDTH, round(longest * _CHARACTER)))
    title, top = _title(heading, width)
    inside = max(110, 15 + n_rows * (15 if grid.is_tall else _ROW_HEIGHT))  # for the scale beside
    figure.update_layout(
        template="plotly_white",
        title=title,
        width=width,
        height=top + inside + 55,
        margin={"l": 70, "r": 30, "t": top, "b": 55},
    )
    # Labels such as 10.1 and 10.10 are names, and each one is shown.
    both = {"type": "category", "tickmode": "linear", "dtick": 1, **labels}
    figure.update_xaxes(title={"text": grid.columns.name}, **both)
    figure.update_yaxes(title={"text": grid.rows.name}, autorange="reversed", **both)


def _lay_out_bars(
    figure: Any, numbers: list[float], title: str, unit: str, mark: float | None
) -> None:
    width = 640
    heading, top = _title([title], width)
    low, high = min(0.0, *numbers), max(0.0, *numbers)
    if mark is not None:
        low, high = min(low, mark), max(high, mark)
        figure.add_vline(x=mark, line={"dash": "dot", "color": "#525252", "width": 1})
    room = 0.15 * (high - low or 1.0)  # for the numbers beside the bars
    figure.update_layout(
        template="plotly_white",
        title=heading,
        width=width,
        height=top + 65 + 24 * len(numbers),
        margin={"l": 70, "r": 30, "t": top, "b": 50},
        showlegend=False,
    )
    reach = [low - room * (low < 0), high + room * (high > 0)]
    figure.update_xaxes(title={"text": _literal(unit)}, range=reach, automargin=True)
    figure.update_yaxes(
        type="category", autorange="reversed", dtick=1, tickmode="linear", automargin=True
    )


def _title(heading: list[str], width: int) -> tuple[dict[str, Any], int]:
    """A title wrapped to the figure's width, and the height that it needs."""
    first, *below = heading
    lines = [_literal(line) for line in textwrap.wrap(first, int(width / 8.2))]
    small = [
        f"<span style='font-size:12px'>{_literal(line)}</span>"
        for text in below
        for line in textwrap.wrap(text, int(width / _CHARACTER))
    ]
    text = "<br>".join([*lines, *small])
    title = {"text": text, "x": 0.01, "xanchor": "left", "y": 1, "yanchor": "top"}
    title |= {"pad": {"t": 10}, "font": {"size": 15}}
    return title, 30 + _LINE_HEIGHT * (len(lines) + len(small))


def _names(axis: Axis) -> list[str]:
    return [_literal(str(label)) for label in axis.labels]


def _literal(text: str) -> str:
    """Text that plotly shows as it is: it reads some tags, and entities."""
    return html.escape(text, quote=False)


def _listed(values: Any) -> Any:
    """Nested lists of numbers, None where there is none."""
    if isinstance(values, list):
        return [_listed(value) for value in values]
    return None if math.isnan(values) else values


def _short(numbers: Sequence[float], *, more: int = 0) -> str:
    """A format that leaves the largest number two or three digits, and `more`."""
    largest = max(map(abs, numbers), default=0.0)
    if 0 < largest < 1e-3:
        return f".{more}e"
    limits = (100.0, 10.0, 1.0, 0.1)
    return f".{more + sum(largest < limit for limit in limits)}f"
