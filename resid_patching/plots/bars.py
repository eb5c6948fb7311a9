"""Named numbers as bars, and numbers along depth as lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from resid_patching.ablation import Effect
from resid_patching.plots.base import (
    INK,
    NEGATIVE,
    POSITIVE,
    SERIES,
    error_bars,
    heading_of,
    lay_out,
    listed,
    literal,
    require_plotly,
    short,
    why_empty,
)
from resid_patching.plots.heat import about_effect, metric_words
from resid_patching.result import standard_error

if TYPE_CHECKING:
    import plotly.graph_objects


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
    return draw_bars(values, [title], unit, top=top, mark=mark)


def draw_bars(
    values: Mapping[str, float],
    heading: Sequence[str],
    unit: str,
    *,
    top: int | None = None,
    mark: float | None = None,
    errors: Mapping[str, float] | None = None,
) -> plotly.graph_objects.Figure:
    """`bars` with a title of several lines, and with standard errors by name."""
    go = require_plotly()
    shown = {name: float(value) for name, value in values.items() if not math.isnan(value)}
    if not shown:
        raise ValueError("there is no number to draw")
    if top is not None and top < len(shown):
        heading = [*heading, f"the {top} largest of {len(shown)}"]
        shown = dict(sorted(shown.items(), key=lambda item: -abs(item[1]))[:top])
    numbers = list(shown.values())
    trace = go.Bar(
        x=numbers,
        y=[literal(name) for name in shown],
        orientation="h",
        error_x=error_bars([errors.get(name, 0.0) for name in shown]) if errors else None,
        marker={"color": [POSITIVE if number >= 0 else NEGATIVE for number in numbers]},
        texttemplate=None if errors else f"%{{x:{short(numbers, more=1)}}}",
        textposition="outside",
        textfont={"size": 11},
        cliponaxis=False,
        hovertemplate=f"%{{y}}: %{{x:.6g}} {literal(unit)}<extra></extra>",
    )
    figure = go.Figure(trace)
    if errors:  # the numbers stand beside the names, where no error bar crosses them
        digits = short(numbers, more=1)
        ticks = [f"{literal(name)}  {number:{digits}}" for name, number in shown.items()]
        figure.update_yaxes(ticktext=ticks, tickvals=[literal(name) for name in shown])
    _lay_out_bars(figure, numbers, heading, unit, mark)
    return figure


def _lay_out_bars(
    figure: Any, numbers: list[float], heading: Sequence[str], unit: str, mark: float | None
) -> None:
    low, high = min(0.0, *numbers), max(0.0, *numbers)
    if mark is not None:
        low, high = min(low, mark), max(high, mark)
        figure.add_vline(x=mark, line={"dash": "dot", "color": INK, "width": 1})
    room = 0.32 * (high - low or 1.0)  # for the numbers beside the bars
    inside = 15 + 24 * len(numbers)
    lay_out(figure, heading, width=640, inside=inside, below=50, least=330, showlegend=False)
    reach = [low - room * (low < 0), high + room * (high > 0)]
    figure.update_xaxes(title={"text": literal(unit)}, range=reach, automargin=True)
    figure.update_yaxes(
        type="category",
        autorange="reversed",
        dtick=1,
        automargin=True,
        tickmode="array" if figure.layout.yaxis.ticktext else "linear",
    )


def effect_bars(effect: Effect, *, top: int = 20) -> plotly.graph_objects.Figure:
    """Total, direct and indirect effects of the largest targets, three bars each.

    Args:
        effect: of any targets; of one receiver, or not at each position in turn.
        top: how many targets, by size of their total effect.

    Returns:
        A figure with a trace for each of the three.

    Raises:
        MissingExtraError: plotly is not installed.
        ValueError: there are several receivers or positions, or no number.
    """
    go = require_plotly()
    if effect.columns is not None:
        name = effect.columns.name
        raise ValueError(f"choose one {name} first: effect.{name}(...)")
    parts = {"total": effect.total, "direct": effect.direct, "indirect": effect.indirect}
    means = {name: effect.mean(part) for name, part in parts.items()}
    sizes = means["total"].abs()
    known = [n for n in range(len(effect.targets)) if not bool(sizes[n].isnan())]
    if not known:
        raise ValueError("there is no number to draw")
    order = sorted(known, key=lambda n: -float(sizes[n]))[:top]
    labels = [_clipped(effect.targets[n]) for n in order]
    figure = go.Figure()
    notes = []
    for (name, values), colour in zip(means.items(), SERIES, strict=False):
        if name != "total" and (why := why_empty(values[order], effect.unit)):
            notes.append(f"{name}: {why}")
            continue
        errors = standard_error(parts[name], effect.weights)
        figure.add_bar(
            x=listed(values[order].tolist()),
            y=list(range(len(order))),
            customdata=[literal(effect.targets[n]) for n in order],
            name=name,
            orientation="h",
            marker={"color": colour},
            error_x=error_bars(errors[order].tolist()),
            hovertemplate=f"%{{customdata}}: {name} %{{x:+.5g}} {literal(effect.unit)}"
            "<extra></extra>",
        )
    more = len(effect.targets) - len(order)
    about = about_effect(effect)
    details = (*about, f"the {len(order)} largest of {len(effect.targets)}") if more else about
    details = (*details, *notes)
    first = f"Effects on {metric_words(effect)}: total, direct, indirect"
    lay_out(
        figure,
        heading_of(first, effect.unit, *details),
        width=640,
        inside=15 + 40 * len(order),
        above=26,
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        barmode="group",
        bargap=0.25,
    )
    figure.update_xaxes(title={"text": literal(effect.unit)}, automargin=True, zerolinecolor=INK)
    figure.update_yaxes(
        tickvals=list(range(len(order))), ticktext=labels, autorange="reversed", automargin=True
    )
    return figure


def _clipped(target: str) -> str:
    if len(target) > 26:
        target = f"{target[:20]} … ({target.count(' + ') + 1})"
    return literal(target)


def lines_by_depth(
    columns: Mapping[str, Sequence[float]],
    labels: Sequence[str],
    heading: Sequence[str],
    unit: str,
    *,
    errors: Mapping[str, Sequence[float]] | None = None,
    from_zero: bool = True,
) -> plotly.graph_objects.Figure:
    """Numbers at each layer as lines, every layer and the last one named where there is room.

    Args:
        columns: name -> a number for each label; NaN is a gap.
        labels: the layers, in order.
        heading: the title, line by line.
        unit: of the numbers.
        errors: name -> the standard error of each number.
        from_zero: whether the axis begins at 0.
    """
    go = require_plotly()
    figure = go.Figure()
    shown = [literal(label) for label in labels]
    for number, (name, values) in enumerate(columns.items()):
        figure.add_scatter(
            x=list(range(len(shown))),
            y=listed([float(value) for value in values]),
            error_y=error_bars(errors[name]) if errors else None,
            customdata=shown,
            name=literal(name),
            mode="lines+markers",
            line={"color": SERIES[number % len(SERIES)]},
            marker={"symbol": number, "size": 7},
            cliponaxis=False,
            hovertemplate=f"{literal(name)}, %{{customdata}}: %{{y:.5g}} {literal(unit)}"
            "<extra></extra>",
        )
    width = depth_width(len(shown), 26)
    lay_out(
        figure,
        heading,
        width=width,
        inside=280,
        above=26,
        below=20 + round(6.2 * max(map(len, labels))),
        least=least_depth(len(shown)),
        showlegend=True,
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
    )
    depth_axis(figure, shown, width)
    figure.update_yaxes(title={"text": literal(unit)}, automargin=True)
    if from_zero:
        figure.update_yaxes(rangemode="tozero")
    return figure


_WIDEST, _TICK = 1180, 15  # pixels


def depth_width(n: int, step: int = 18) -> int:
    """The width of a figure of n places along depth, `step` pixels each where there is room."""
    return min(_WIDEST, max(560, 110 + step * n))


def least_depth(n: int) -> int:
    """The width at which n names along depth still stand apart."""
    return min(_WIDEST, max(330, 110 + _TICK * n))


def depth_axis(figure: Any, shown: Sequence[str], width: int, **where: Any) -> None:
    """Names places along depth: as many as fit, and always the last.

    Args:
        figure: is changed.
        shown: the names, as plotly shows them.
        width: of the figure, in pixels.
        where: which of its axes.
    """
    last = len(shown) - 1
    step = max(1, math.ceil(len(shown) * _TICK / (width - 110)))
    ticks = [n for n in range(last + 1) if n % step == 0 and n + step <= last] + [last]
    figure.update_xaxes(
        tickvals=ticks,
        ticktext=[shown[n] for n in ticks],
        tickangle=-90,
        tickfont={"size": 11},
        range=[-0.6, last + 0.6],
        zeroline=False,
        **where,
    )
