"""Named numbers as horizontal bars, one below the other, with standard errors where there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from resid_patching.ablation import Effect
from resid_patching.attribution import Attribution
from resid_patching.plots.base import (
    INK,
    SERIES,
    clipped,
    heading_of,
    lay_out,
    literal,
    require_plotly,
    short,
    sign_colours,
    template,
    why_empty,
)
from resid_patching.plots.heat import PARTS
from resid_patching.plots.titles import (
    about_effect,
    at_one_position,
    metric_words,
    over_prompts,
    scored_after,
    what_is_scored,
)
from resid_patching.result import standard_error
from resid_patching.shown import ranked

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
        ValueError: there is no number.
    """
    import pandas

    frame: Any = pandas.DataFrame({"name": list(values), "value": list(values.values())})
    frame, heading = frame.dropna(), [title]
    if top is not None and top < len(frame):
        heading.append(f"the {top} largest of {len(frame)}")
        frame = ranked(frame)[:top]
    return draw_bars(frame, heading, unit, mark=mark)


def effect_bars(effect: Effect, *, top: int = 20) -> plotly.graph_objects.Figure:
    """Total, direct and indirect effects of the largest targets, three bars each.

    Args:
        effect: of any targets; of one receiver, or not at each position in turn.
        top: how many targets, by size of their total effect.

    Returns:
        A figure with a trace for each of the three.

    Raises:
        ValueError: there are several receivers or positions, or no number.
    """
    import pandas

    if effect.columns is not None:
        name = effect.columns.name
        raise ValueError(f"choose one {name} first: effect.{name}(...)")
    names = ranked(effect.table())["target"][:top].tolist()
    rows = [effect.targets.index(name) for name in names]
    details = list(about_effect(effect))
    if len(rows) < len(effect.targets):
        details.append(f"the {len(rows)} largest of {len(effect.targets)}")
    drawn = [pandas.DataFrame()]
    for part in PARTS if rows else ():
        values = getattr(effect, part)[rows]
        means, errors = effect.mean(values), standard_error(values, effect.weights)
        if part != "total" and (why := why_empty(means, effect.unit)):
            details.append(f"{part}: {why}")
            continue
        columns = {"name": names, "value": means.numpy(), "se": errors.numpy(), "part": part}
        drawn.append(pandas.DataFrame(columns))
    first = f"Effects on {metric_words(effect)}: total, direct, indirect"
    return draw_bars(pandas.concat(drawn), heading_of(first, effect.unit, *details), effect.unit)


def attribution_bars(found: Attribution, *, top: int = 20) -> plotly.graph_objects.Figure:
    """The largest rows as bars, with what all others add up to.

    Args:
        found: at one position.
        top: how many rows, by size.

    Returns:
        A figure with one trace.

    Raises:
        ValueError: there are several positions.
    """
    import pandas

    table = at_one_position(found)
    order = table["value"].abs().sort_values(ascending=False, kind="stable").index
    shown = table.loc[order[:top]].rename(columns={"component": "name"})
    if others := order[top:].tolist():
        rest = {"name": f"{len(others)} other rows", "value": table["value"][others].sum()}
        rest["se"] = float(standard_error(found.values[others, :, 0].sum(0)))
        shown = pandas.concat([shown, pandas.DataFrame([rest])])
    whole = f"all rows add up to {table['value'].sum():+.5g}"
    details = (scored_after(found), over_prompts(found), whole)
    return draw_bars(shown, heading_of(what_is_scored(found), found.unit, *details), found.unit)


def draw_bars(
    frame: Any, heading: Sequence[str], unit: str, *, mark: float | None = None
) -> plotly.graph_objects.Figure:
    """Rows of a data frame as bars.

    Args:
        frame: the columns `name` and `value`; `se` for error bars; `part` for several bars of one
            name, each of its own colour. Bars of one part are blue above 0 and red below, and
            their numbers stand beside the names, where no error bar crosses them.
        heading: the title, line by line.
        unit: of the numbers.
        mark: where a dotted line is drawn, for comparison.

    Raises:
        ValueError: there is no number.
    """
    px = require_plotly()
    if frame.empty:
        raise ValueError("there is no number to draw")
    several, names, values = "part" in frame, frame["name"].unique(), frame["value"]
    has_errors = "se" in frame and bool((frame["se"] > 0).any())
    figure = px.bar(
        frame.assign(name=frame["name"].map(literal)),
        x="value",
        y="name",
        color="part" if several else None,
        error_x="se" if has_errors else None,
        barmode="group",
        color_discrete_map=dict(zip(PARTS, SERIES, strict=False)),
        labels={"value": literal(unit), "name": ""},
        template=template(),
    )
    part = ": %{fullData.name}" if several else ":"
    hover = f"%{{y}}{part} %{{x:+.6g}} {literal(unit)}<extra></extra>"
    figure.update_traces(hovertemplate=hover, orientation="h")
    ticks = [clipped(name, 26) for name in names]
    if not several:
        figure.update_traces(marker_color=sign_colours(values))
        digits = short(values, more=1)
        ticks = [f"{name}  {v:{digits}}" for name, v in zip(ticks, values, strict=True)]
    if mark is not None:
        figure.add_vline(x=mark, line={"dash": "dot", "color": INK, "width": 1})
    lay_out(
        figure,
        heading,
        width=640,
        inside=15 + (40 if several else 24) * len(names),
        below=50,
        least=330,
        legend=several,
        bargap=0.25,
    )
    figure.update_yaxes(
        type="category",  # 0.1 and 0.10 are two heads
        autorange="reversed",
        tickvals=[literal(name) for name in names],
        ticktext=ticks,
    )
    return figure
