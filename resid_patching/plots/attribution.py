"""Pictures of direct logit attribution: rows, running sum along depth, position by position."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resid_patching.address import MLP, Attn, AttnBias, Head, MLPBias, Neuron, parse
from resid_patching.attribution import Attribution
from resid_patching.plots.bars import draw_bars
from resid_patching.plots.base import (
    INK,
    NEGATIVE,
    POSITIVE,
    heading_of,
    literal,
    mean,
    over_prompts,
)
from resid_patching.plots.depth import draw_lines
from resid_patching.plots.grids import Grid, draw_grids, pivoted
from resid_patching.plots.heat import scored_after, what_is_scored
from resid_patching.result import standard_error

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects


def attribution_bars(found: Attribution, *, top: int = 20) -> plotly.graph_objects.Figure:
    """The largest rows as bars, with what all others add up to.

    Args:
        found: at one position.
        top: how many rows, by size.

    Returns:
        A figure with one trace.

    Raises:
        MissingExtraError: plotly is not installed.
        ValueError: there are several positions.
    """
    import pandas

    table = _at_one_position(found)
    ranked = table.sort_values("value", key=abs, ascending=False, kind="stable")
    shown = ranked[:top].rename(columns={"component": "name"})
    if others := ranked.index[top:].tolist():
        rest = {"name": f"{len(others)} other rows", "value": ranked["value"][top:].sum()}
        rest["se"] = float(standard_error(found.values[others, :, 0].sum(0)))
        shown = pandas.concat([shown, pandas.DataFrame([rest])])
    whole = f"all rows add up to {table['value'].sum():+.5g}"
    details = (scored_after(found), over_prompts(found), whole)
    return draw_bars(shown, heading_of(what_is_scored(found), found.unit, *details), found.unit)


def accumulated(found: Attribution) -> plotly.graph_objects.Figure:
    """The running sum of the rows along depth, each layer's own part as a bar.

    Heads and neurons are added up to their layer; the constants of final norm and unembedding
    come last, so that the line ends at the model's own value.

    Args:
        found: at one position, by any grain.

    Returns:
        A figure with the parts as bars and their running sum as a line.

    Raises:
        MissingExtraError: plotly is not installed.
        ValueError: there are several positions.
    """
    table = _at_one_position(found)
    places = ["constants" if c in found.constants else _layer_of(c) for c in table["component"]]
    parts = table["value"].groupby(places, sort=False).sum()
    sums = parts.cumsum().rename_axis("place").reset_index().assign(name="sum so far")
    end = float(mean(found.model_value[..., 0]))
    heading = heading_of(
        f"{what_is_scored(found)}, accumulated along depth",
        found.unit,
        scored_after(found),
        over_prompts(found),
        f"it ends at the model's own difference, {end:+.5g}",
    )
    figure = draw_lines(sums, heading, found.unit, colours=[INK], from_zero=False)
    unit = literal(found.unit)
    figure.add_bar(
        x=[literal(place) for place in parts.index],
        y=parts,
        name="written here",
        marker={"color": [POSITIVE if value >= 0 else NEGATIVE for value in parts]},
        hovertemplate=f"%{{x}} wrote %{{y:+.5g}} {unit}<extra></extra>",
    )
    figure.update_traces(
        line_width=1.5,
        marker_size=5,
        hovertemplate=f"after %{{x}}: %{{y:+.5g}} {unit}<extra></extra>",
        selector={"type": "scatter"},
    )
    return figure


def by_position(
    found: Attribution, *, batch: int = 0, top: int = 30
) -> plotly.graph_objects.Figure:
    """What the largest components wrote at each position of one prompt.

    Args:
        found: at several positions.
        batch: which prompt.
        top: how many rows, by their largest size at any position, in the order they write.

    Returns:
        A figure whose first trace holds the numbers.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    frame = found.to_frame()
    frame = frame.loc[frame["prompt"] == batch].rename(columns={"component": "row"})
    plane = pivoted(frame, "row", "position", "value")
    sizes = plane.abs().max(axis=1).sort_values(ascending=False, kind="stable")
    details = [f"prompt {batch}"]
    if top < len(sizes):
        details.append(f"the {top} largest of {len(sizes)} rows")
    heading = heading_of(what_is_scored(found), found.unit, *details)
    kept = plane.index.isin(sizes.index[:top])
    return draw_grids({"": Grid(plane.loc[kept])}, found.unit, heading)


def _at_one_position(found: Attribution) -> pandas.DataFrame:
    """Means over prompts, a row for each component."""
    if len(found.axis("pos").labels) != 1:
        raise ValueError("this picture is of one position; choose one, such as positions=-1")
    return found.table()


def _layer_of(label: str) -> str:
    """The component that a row is a part of."""
    match parse(label):
        case Head(layer, _) | AttnBias(layer):
            return str(Attn(layer))
        case Neuron(layer, _) | MLPBias(layer):
            return str(MLP(layer))
        case whole:
            return str(whole)
