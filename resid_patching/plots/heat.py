"""Grids of numbers as colours, one alone or several side by side on one scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from resid_patching.ablation import Effect
from resid_patching.address import Head, HeadInput, HeadNode, Neuron, parse
from resid_patching.attribution import Attribution
from resid_patching.errors import AddressError
from resid_patching.plots.base import (
    ABSENT,
    CHARACTER,
    INK,
    RED_TO_BLUE,
    bar_size,
    heading_of,
    lay_out,
    listed,
    literal,
    mean,
    names,
    over_prompts,
    require_plotly,
    scale_of,
    short,
)
from resid_patching.result import Axis, Result

if TYPE_CHECKING:
    import plotly.graph_objects

Of: TypeAlias = Literal["total", "direct", "indirect"]

_CELL_WIDTH, _ROW_HEIGHT = 46, 23  # pixels
_NARROW = 40  # cells narrower than this show no numbers
_MANY_ROWS = 40  # from here on rows are thinner, and cells show no numbers
_LEAST_CELL = 20  # two digits of a label
_THIN_CELL, _SLANTED_LABEL = 6, 12  # of a long row of positions; a label at a slant
_SCREEN = 1200  # what panels side by side may take


def heatmap(
    result: Result, *, of: Of = "total", title: str | None = None
) -> plotly.graph_objects.Figure:
    """A grid of numbers as colours: layer × head, sender × receiver, or a result's own two axes.

    Args:
        result: an `Effect` of heads, one at a time (layer × head), or of a path to receivers side
            by side (sender × receiver); an `Attribution` by head at one position (layer × head; the
            title says what the other rows add up to); or a `Result` with two axes besides `batch`.
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
    figure = go.Figure(traces(go, grid, result.unit, grid.largest))
    _lay_out_one(figure, grid, _heading(result, of, title))
    return figure


def effect_grids(effect: Effect, *, top: int = 40) -> plotly.graph_objects.Figure:
    """Total, direct and indirect effects side by side, on one scale.

    Args:
        effect: of heads, one at a time (layer × head), or of a path to receivers side by side
            (sender × receiver), or of targets at each position in turn (target × position).
        top: of heads, neurons and their inputs in these two, so many rows or columns, by their
            largest total effect; the title says how many there are. What has an order is shown
            whole: positions, stream states, and the layers' attention, MLPs and biases.

    Returns:
        A figure with a trace of numbers for each of the three, and of what has none.

    Raises:
        MissingExtraError: plotly is not installed.
        ValueError: the targets are not heads.
    """
    parts: tuple[Of, ...] = ("total", "direct", "indirect")
    grids: dict[str, Grid] = {of: _grid(effect, of) for of in parts}
    axes = (grids["total"].rows, grids["total"].columns)
    if effect.columns is not None:
        grids = _strongest(grids, top)
    shown = (grids["total"].rows, grids["total"].columns)
    heading = _heading(
        effect, "total", f"Effects on {metric_words(effect)}: total, direct, indirect"
    )
    for some, all_ in zip(shown, axes, strict=True):
        n, n_all = len(some.labels), len(all_.labels)
        heading[-1] += f"; the strongest {n} of {n_all} {all_.name}s" if n < n_all else ""
    return side_by_side(grids, effect.unit, heading)


def _strongest(grids: Mapping[str, Grid], top: int) -> dict[str, Grid]:
    """The rows and columns with the largest totals, in the order they were given.

    All of them where they have an order of their own: a gap in it would hide where effects change.
    """
    total = grids["total"]
    sizes = total.values.nan_to_num().abs()
    rows = _largest(sizes.amax(1), top, total.rows)
    columns = _largest(sizes.amax(0), top, total.columns)

    def part(grid: Grid) -> Grid:
        beside = {name: values[rows][:, columns] for name, values in grid.beside.items()}
        return Grid(
            Axis(grid.rows.name, tuple(grid.rows.labels[n] for n in rows)),
            Axis(grid.columns.name, tuple(grid.columns.labels[n] for n in columns)),
            grid.values[rows][:, columns],
            beside,
        )

    return {name: part(grid) for name, grid in grids.items()}


def _largest(sizes: Tensor, top: int, axis: Axis) -> list[int]:
    """Places on an axis: all where it has an order, else those with the largest sizes."""
    if all(map(_is_ordered, axis.labels)):
        return list(range(len(sizes)))
    return sorted(sizes.sort(descending=True, stable=True).indices[:top].tolist())


def _is_ordered(label: str | int) -> bool:
    """Whether a label is a position, or a place that stands once in each layer."""
    if isinstance(label, int):
        return True
    try:
        address = parse(label)
    except AddressError:  # several together
        return False
    return not isinstance(address, Head | HeadInput | HeadNode | Neuron)


def metric_words(effect: Effect) -> str:
    """The metric, for receivers: where each prompt has its own answer, it says so."""
    each = "(one a prompt) - (one a prompt)"
    return effect.metric.replace(each, "of each prompt's answer - foil")


@dataclass(frozen=True, eq=False)
class Grid:
    """Numbers on two axes; NaN where there is none.

    Attributes:
        rows: downwards.
        columns: to the right.
        values: [row, column].
        beside: what is shown when hovering, each as values.
    """

    rows: Axis
    columns: Axis
    values: Tensor
    beside: Mapping[str, Tensor]

    @property
    def largest(self) -> float:
        """The largest size, or 1 where all are 0: what the scale runs to on either side."""
        return float(self.values.nan_to_num().abs().max()) or 1.0

    @property
    def is_tall(self) -> bool:
        """Whether there are so many rows that they are drawn thin."""
        return len(self.rows.labels) > _MANY_ROWS

    @property
    def height(self) -> int:
        """In pixels."""
        return len(self.rows.labels) * (15 if self.is_tall else _ROW_HEIGHT)


# What is shown


def _grid(result: Result, of: Of) -> Grid:
    if isinstance(result, Effect):
        parts = {"total": result.total, "direct": result.direct, "indirect": result.indirect}
        means = {name: result.mean(part) for name, part in parts.items()}
        if result.columns is not None:
            rows = Axis("sender" if result.receivers else "target", result.axis("target").labels)
            return Grid(rows, result.columns, means[of], means)
        return _by_layer(result.targets, means, of)
    if isinstance(result, Attribution):
        if len(result.axis("pos").labels) != 1:
            raise ValueError("a picture of heads is of one position; choose one, such as -1")
        return _by_layer(result.components, {"written": mean(result.values[..., 0])}, "written")
    axis_names = [axis.name for axis in result.axes]
    axes = [axis for axis in result.axes if axis.name != "batch"]
    if len(axes) != 2:
        raise ValueError(f"a heat map has two axes besides batch; this has {', '.join(axis_names)}")
    values = result.values
    if "batch" in axis_names:
        values = mean(values.movedim(axis_names.index("batch"), -1))
    return Grid(axes[0], axes[1], values.detach().cpu().double(), {})


def _by_layer(labels: Sequence[str], means: Mapping[str, Tensor], shown: str) -> Grid:
    """The heads among labels as layer × head."""
    heads = {number: head for number, label in enumerate(labels) if (head := as_head(label))}
    if not heads:
        raise ValueError(
            f"this picture is of heads one at a time; these are {', '.join(labels[:4])}"
        )
    n_layers = 1 + max(head.layer for head in heads.values())
    n_heads = 1 + max(head.head for head in heads.values())
    planes = {}
    for name, values in means.items():
        planes[name] = plane = values.new_full((n_layers, n_heads), math.nan)
        for number, head in heads.items():
            plane[head.layer, head.head] = values[number]
    layers, columns = tuple(range(n_layers)), tuple(range(n_heads))
    return Grid(Axis("layer", layers), Axis("head", columns), planes[shown], planes)


def as_head(label: str) -> Head | None:
    """The head that a label names; None where it names another part, or several."""
    try:
        address = parse(label)
    except AddressError:  # several targets together
        return None
    return address if isinstance(address, Head) else None


def about_effect(effect: Effect) -> tuple[str, ...]:
    """Kind of ablation, place and prompts, for a title."""
    over = effect.averaged or "one prompt"
    joint = " (targets together)" if effect.joint else ""
    return f"{effect.how}{joint}, at {effect.positions}", over


def _heading(result: Result, of: Of, title: str | None) -> list[str]:
    """What the numbers are; then unit, kind, place and prompts."""
    if isinstance(result, Effect):
        first = title or f"{of.capitalize()} effect on {metric_words(result)}"
        return heading_of(first, result.unit, *about_effect(result))
    plan, details = result.provenance.plan, [over_prompts(result)]
    if isinstance(result, Attribution):
        plan = what_is_scored(result)
        details.append(_others(result))
    if title is not None:
        details.insert(0, plan)
    return heading_of(title or plan, result.unit, *details)


def what_is_scored(found: Attribution) -> str:
    """Answer and foil, where all prompts agree on them; else the plan."""
    answers, foils = set(found.answer_texts), set(found.foil_texts or ())
    if len(answers) > 1 or len(foils) > 1:
        return found.provenance.plan
    foil = f'"{foils.pop()}"' if foils else "the vocabulary mean"
    plan = f'direct logit attribution by {found.by}, "{answers.pop()}" against {foil}'
    capped = found.capped_value is not None
    return f"{plan}, before the output softcap" if capped else plan


def _others(found: Attribution) -> str:
    """What the rows that are no heads add up to."""
    others = [n for n, label in enumerate(found.components) if as_head(label) is None]
    rest = float(mean(found.values[others, :, 0]).sum())
    return f"heads alone: the {len(others)} other rows add up to {rest:+.4g}"


# How it is drawn


def traces(
    go: Any,
    grid: Grid,
    unit: str,
    largest: float,
    *,
    cell: int = _CELL_WIDTH,
    bar: bool = True,
    alike: bool = False,
) -> list[Any]:
    """The cells of a grid on a scale around 0, and those without a number in grey.

    Args:
        go: plotly.
        grid: what is drawn.
        unit: of its numbers.
        largest: where the scale ends on either side.
        cell: pixels of a cell's width; narrow ones show no number.
        bar: whether the scale stands beside them.
        alike: whether cells have the digits of the scale's end rather than of their own.
    """
    numbers = listed(grid.values.tolist())
    known = [number for row in numbers for number in row if number is not None]
    known = [largest] if alike else known
    beside = torch.stack(list(grid.beside.values()), -1) if len(grid.beside) > 1 else None
    lines = [f"{grid.rows.name} %{{y}}", f"{grid.columns.name} %{{x}}"]
    lines.append(f"%{{z:+.5g}} {literal(unit)}")
    if beside is not None:
        lines += [f"{name} %{{customdata[{i}]:+.5g}}" for i, name in enumerate(grid.beside)]
    cells = go.Heatmap(
        z=numbers,
        x=names(grid.columns),
        y=names(grid.rows),
        customdata=None if beside is None else listed(beside.tolist()),
        zmin=-largest,
        zmid=0,
        zmax=largest,
        colorscale=scale_of(RED_TO_BLUE),
        colorbar={"title": {"text": literal(unit)}, "thickness": 12, **bar_size(grid.height)},
        showscale=bar,
        texttemplate=None if grid.is_tall or cell < _NARROW else f"%{{z:{short(known)}}}",
        textfont={"size": 10},
        hovertemplate="<br>".join(lines) + "<extra></extra>",
        xgap=1,
        ygap=1,
    )
    return [cells, *absent_cells(go, grid)]


def absent_cells(go: Any, grid: Grid) -> list[Any]:
    """Grey cells with a cross where there is no number."""
    absent = grid.values.isnan()
    if not bool(absent.any()):
        return []
    trace = go.Heatmap(
        z=[[0 if cell else None for cell in row] for row in absent.tolist()],
        x=names(grid.columns),
        y=names(grid.rows),
        colorscale=[[0, ABSENT], [1, ABSENT]],
        showscale=False,
        text=[["×" if cell else "" for cell in row] for row in absent.tolist()],
        texttemplate="%{text}",
        textfont={"size": 10, "color": INK},
        hovertemplate=f"{grid.rows.name} %{{y}}<br>{grid.columns.name} %{{x}}<br>"
        "no value<extra></extra>",
        xgap=1,
        ygap=1,
    )
    return [trace]


_LABELS = {"tickfont": {"size": 11}, "automargin": True, "showgrid": False, "zeroline": False}
# Labels such as 10.1 and 10.10 are names, and each one is shown.
_CATEGORIES = {"type": "category", "tickmode": "linear", "dtick": 1, **_LABELS}


def _slant(longest: int, cell: int) -> dict[str, Any]:
    """Labels that are wider than their cells stand at a slant."""
    return {"tickangle": -60} if longest * CHARACTER > cell else {}


def _with_absent(heading: Sequence[str], grid: Grid) -> list[str]:
    note = "; grey ×: no value" if bool(grid.values.isnan().any()) else ""
    return [*heading[:-1], heading[-1] + note]


def _lay_out_one(figure: Any, grid: Grid, heading: Sequence[str]) -> None:
    n_columns = len(grid.columns.labels)
    longest = max(map(len, names(grid.columns)))
    lay_out(
        figure,
        _with_absent(heading, grid),
        width=max(440, 190 + n_columns * _CELL_WIDTH),
        inside=max(110, 15 + grid.height),  # for the scale beside
        least=130 + n_columns * _LEAST_CELL,
    )
    figure.update_xaxes(
        title={"text": grid.columns.name}, **_CATEGORIES, **_slant(longest, _CELL_WIDTH)
    )
    figure.update_yaxes(title={"text": grid.rows.name}, autorange="reversed", **_CATEGORIES)


def side_by_side(
    grids: Mapping[str, Grid], unit: str, heading: Sequence[str]
) -> plotly.graph_objects.Figure:
    """Grids of the same rows and columns on one scale, beside each other where they fit.

    Args:
        grids: what stands above each, and the grid.
        unit: of their numbers.
        heading: the title, line by line.
    """
    go = require_plotly()
    first = next(iter(grids.values()))
    n, largest = len(grids), max(grid.largest for grid in grids.values())
    row_names, n_columns = names(first.rows), len(first.columns.labels)
    left = 45 + round(CHARACTER * max(map(len, row_names)))
    longest = max(map(len, names(first.columns)))
    fits = (_SCREEN - left - 90 - 26 * (n - 1)) // n // n_columns
    across = fits >= (15 if first.is_tall else 23)  # tall ones show no numbers
    cell = min(_CELL_WIDTH, fits) if across else _CELL_WIDTH
    if not across and n_columns > _MANY_ROWS:
        cell = min(_CELL_WIDTH, max(_THIN_CELL, (_SCREEN - left - 90) // n_columns))
    wide = max(cell * n_columns, 90)
    from plotly.subplots import make_subplots

    gap = 26 if across else 60 + (0 if longest * CHARACTER <= cell else round(longest * 5.8))
    whole = n * wide + (n - 1) * gap if across else n * first.height + (n - 1) * gap
    spacing: dict[str, Any] = {"horizontal_spacing" if across else "vertical_spacing": gap / whole}
    figure = make_subplots(
        rows=1 if across else n,
        cols=n if across else 1,
        subplot_titles=[literal(name) for name in grids],
        shared_yaxes=across,
        **spacing,
    )
    for number, grid in enumerate(grids.values()):
        place: dict[str, Any] = (
            {"row": 1, "col": number + 1} if across else {"row": number + 1, "col": 1}
        )
        for trace in traces(go, grid, unit, largest, cell=cell, bar=number == 0, alike=True):
            figure.add_trace(trace, **place)
    inside = max(110, first.height if across else whole)
    width = left + (whole if across else wide) + 90
    lay_out(figure, _with_absent(heading, first), width=width, inside=inside, above=24, least=width)
    figure.update_annotations(font={"size": 13})
    figure.update_xaxes(**_CATEGORIES, **_slant(longest, cell))
    if cell < _SLANTED_LABEL:
        figure.update_xaxes(dtick=-(-_SLANTED_LABEL // cell))
    figure.update_yaxes(autorange="reversed", **_CATEGORIES)
    if not across:
        figure.update_annotations(x=0, xanchor="left")
    if across:
        figure.update_xaxes(title={"text": first.columns.name, "standoff": 4})
        figure.update_yaxes(title={"text": first.rows.name}, col=1)
    else:
        figure.update_xaxes(title={"text": first.columns.name, "standoff": 4}, row=n)
        figure.update_yaxes(title={"text": first.rows.name})
    return figure
