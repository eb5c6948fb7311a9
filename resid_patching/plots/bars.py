"""Named numbers as horizontal bars, one below the other, with standard errors where there are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from resid_patching.ablation import Effect
from resid_patching.plots.base import (
    INK,
    LEGEND,
    LEGEND_HEIGHT,
    NEGATIVE,
    POSITIVE,
    SERIES,
    clipped,
    heading_of,
    lay_out,
    literal,
    require_plotly,
    short,
    template,
    why_empty,
)
from resid_patching.plots.heat import PARTS, about_effect, metric_words
from resid_patching.result import standard_error

if TYPE_CHECKING:
    import pandas
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
    import pandas

    heading = [title]
    shown = {name: float(value) for name, value in values.items() if not math.isnan(value)}
    if top is not None and top < len(shown):
        heading.append(f"the {top} largest of {len(shown)}")
        shown = dict(sorted(shown.items(), key=lambda item: -abs(item[1]))[:top])
    frame = pandas.DataFrame({"name": list(shown), "value": list(shown.values())})
    return draw_bars(frame, heading, unit, mark=mark)


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
    import pandas

    if effect.columns is not None:
        name = effect.columns.name
        raise ValueError(f"choose one {name} first: effect.{name}(...)")
    table = effect.table().dropna(subset=["value"])
    order = table["value"].abs().sort_values(ascending=False, kind="stable").index[:top].tolist()
    details = list(about_effect(effect))
    if len(order) < len(effect.targets):
        details.append(f"the {len(order)} largest of {len(effect.targets)}")
    drawn = []
    for part in PARTS:
        values = getattr(effect, part)[order]
        means = effect.mean(values)
        if part != "total" and order and (why := why_empty(means, effect.unit)):
            details.append(f"{part}: {why}")
            continue
        columns = {"name": [effect.targets[n] for n in order], "part": part}
        columns |= {"value": means.numpy(), "se": standard_error(values, effect.weights).numpy()}
        drawn.append(pandas.DataFrame(columns))
    first = f"Effects on {metric_words(effect)}: total, direct, indirect"
    heading = heading_of(first, effect.unit, *details)
    return draw_bars(pandas.concat(drawn), heading, effect.unit)


def draw_bars(
    frame: pandas.DataFrame, heading: Sequence[str], unit: str, *, mark: float | None = None
) -> plotly.graph_objects.Figure:
    """Rows of a data frame as bars.

    Args:
        frame: the columns `name` and `value`; `se` for error bars; `part` for several bars of one
            name, each of its own colour. Bars of one part are blue above 0 and red below, and
            their numbers stand beside them.
        heading: the title, line by line.
        unit: of the numbers.
        mark: where a dotted line is drawn, for comparison.

    Raises:
        MissingExtraError: plotly is not installed.
        ValueError: there is no number.
    """
    px = require_plotly()
    if frame.empty:
        raise ValueError("there is no number to draw")
    several = "part" in frame
    has_errors = "se" in frame and bool((frame["se"] > 0).any())
    numbers = frame["value"].tolist()
    digits = short(numbers, more=1)
    figure = px.bar(
        frame.assign(name=frame["name"].map(literal)),
        x="value",
        y="name",
        color="part" if several else None,
        error_x="se" if has_errors else None,
        orientation="h",
        barmode="group",
        color_discrete_map=dict(zip(PARTS, SERIES, strict=False)),
        labels={"value": literal(unit), "name": ""},
        template=template(),
    )
    figure.update_traces(
        error_x={"color": INK, "thickness": 1.5, "width": 3},
        textfont={"size": 11},
        cliponaxis=False,
        hovertemplate=f"%{{y}}: %{{fullData.name}} %{{x:+.6g}} {literal(unit)}<extra></extra>",
    )
    names = list(dict.fromkeys(frame["name"]))
    ticks = [clipped(name, 26) for name in names]
    if not several:
        colours = [POSITIVE if number >= 0 else NEGATIVE for number in numbers]
        hover = f"%{{y}}: %{{x:.6g}} {literal(unit)}<extra></extra>"
        figure.update_traces(marker_color=colours, hovertemplate=hover)
        if has_errors:  # the numbers stand beside the names, where no error bar crosses them
            ticks = [f"{name}  {n:{digits}}" for name, n in zip(ticks, numbers, strict=True)]
        else:
            figure.update_traces(texttemplate=f"%{{x:{digits}}}", textposition="outside")
    if mark is not None:
        figure.add_vline(x=mark, line={"dash": "dot", "color": INK, "width": 1})
    lay_out(
        figure,
        heading,
        width=640,
        inside=15 + (40 if several else 24) * len(names),
        below=50,
        above=LEGEND_HEIGHT if several else 0,
        least=330,
        legend={**LEGEND, "traceorder": "normal"},
        bargap=0.25,
    )
    figure.update_xaxes(automargin=True)
    if not several:  # room for the numbers beside the bars
        ends = [0.0, *numbers, *([] if mark is None else [mark])]
        low, high = min(ends), max(ends)
        room = 0.32 * (high - low or 1.0)
        figure.update_xaxes(range=[low - room * (low < 0), high + room * (high > 0)])
    figure.update_yaxes(
        type="category",  # 0.1 and 0.10 are two heads
        autorange="reversed",
        automargin=True,
        tickvals=[literal(name) for name in names],
        ticktext=[literal(tick) for tick in ticks],
    )
    return figure
