"""Pictures of direct logit attribution: rows, running sum along depth, position by position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from resid_patching.address import (
    MLP,
    Attn,
    AttnBias,
    Head,
    MLPBias,
    Neuron,
    parse,
)
from resid_patching.attribution import Attribution
from resid_patching.plots.bars import depth_axis, depth_width, draw_bars, least_depth
from resid_patching.plots.base import (
    INK,
    NEGATIVE,
    POSITIVE,
    error_bars,
    heading_of,
    lay_out,
    literal,
    mean,
    over_prompts,
    require_plotly,
)
from resid_patching.plots.grids import Grid, draw_grids
from resid_patching.plots.heat import what_is_scored
from resid_patching.result import Axis, standard_error

if TYPE_CHECKING:
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
    _require_one_position(found)
    values = mean(found.values[..., 0])
    order = sorted(range(len(values)), key=lambda n: -abs(float(values[n])))
    shown = {found.components[n]: float(values[n]) for n in order[:top]}
    each = standard_error(found.values[..., 0])
    errors = {found.components[n]: float(each[n]) for n in order[:top]}
    if others := order[top:]:
        shown[f"{len(others)} other rows"] = float(values[others].sum())
        error = standard_error(found.values[others, :, 0].sum(0))
        errors[f"{len(others)} other rows"] = float(error)
    whole = f"all rows add up to {float(values.sum()):+.5g}"
    heading = heading_of(what_is_scored(found), found.unit, over_prompts(found), whole)
    several = found.values.shape[1] > 1
    return draw_bars(shown, heading, found.unit, errors=errors if several else None)


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
    go = require_plotly()
    _require_one_position(found)
    parts: dict[str, Tensor] = {}  # [batch]
    for label, values in zip(found.components, found.values[..., 0].cpu().double(), strict=True):
        place = "constants" if label in found.constants else _layer_of(label)
        parts[place] = parts.get(place, 0.0) + values
    written = torch.stack(list(parts.values()))
    so_far = written.cumsum(0)
    own, sums = mean(written).tolist(), mean(so_far).tolist()
    shown = [literal(name) for name in parts]
    places = list(range(len(shown)))
    unit = literal(found.unit)
    figure = go.Figure()
    figure.add_bar(
        x=places,
        y=own,
        error_y=error_bars(standard_error(written).tolist()),
        customdata=shown,
        name="written here",
        marker={"color": [POSITIVE if value >= 0 else NEGATIVE for value in own]},
        hovertemplate=f"%{{customdata}} wrote %{{y:+.5g}} {unit}<extra></extra>",
    )
    figure.add_scatter(
        x=places,
        y=sums,
        error_y=error_bars(standard_error(so_far).tolist()),
        customdata=shown,
        name="sum so far",
        mode="lines+markers",
        line={"color": INK, "width": 1.5},
        marker={"size": 5},
        hovertemplate=f"after %{{customdata}}: %{{y:+.5g}} {unit}<extra></extra>",
    )
    width = depth_width(len(shown))
    end = float(mean(found.model_value[..., 0]))
    lay_out(
        figure,
        heading_of(
            f"{what_is_scored(found)}, accumulated along depth",
            found.unit,
            over_prompts(found),
            f"it ends at {found.own_value}, {end:+.5g}",
        ),
        width=width,
        inside=300,
        above=26,
        below=30 + round(6.2 * max(map(len, parts))),
        least=least_depth(len(shown)),
        showlegend=True,
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
    )
    depth_axis(figure, shown, width)
    figure.update_yaxes(title={"text": unit}, automargin=True, zerolinecolor=INK)
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
    values = found.values[:, batch].detach().cpu().double()
    places = [n for n, p in enumerate(found.position_index[batch].tolist()) if p >= 0]
    values = values[:, places]
    sizes = values.abs().amax(1)
    rows = sorted(sorted(range(len(sizes)), key=lambda n: -float(sizes[n]))[:top])
    texts = found.token_texts[batch]
    positions = [int(found.position_index[batch, n]) for n in places]
    grid = Grid(
        Axis("row", tuple(found.components[n] for n in rows)),
        Axis("position", tuple(positions)),
        values[rows],
        tokens=tuple(texts[p] for p in positions),
    )
    details = [f"prompt {batch}"]
    if len(rows) < len(sizes):
        details.append(f"the {len(rows)} largest of {len(sizes)} rows")
    heading = heading_of(what_is_scored(found), found.unit, *details)
    return draw_grids({"": grid}, found.unit, heading)


def _require_one_position(found: Attribution) -> None:
    if len(found.axis("pos").labels) != 1:
        raise ValueError("this picture is of one position; choose one, such as positions=-1")


def _layer_of(label: str) -> str:
    """The component that a row is a part of."""
    match parse(label):
        case Head(layer, _) | AttnBias(layer):
            return str(Attn(layer))
        case Neuron(layer, _) | MLPBias(layer):
            return str(MLP(layer))
        case whole:
            return str(whole)
