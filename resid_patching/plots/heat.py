"""Grids of numbers as colours, one alone or several side by side on one scale."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from torch import Tensor

from resid_patching.ablation import Effect
from resid_patching.address import Head, HeadInput, HeadNode, Neuron, parse
from resid_patching.attribution import Attribution
from resid_patching.errors import AddressError
from resid_patching.plots.base import heading_of, mean, over_prompts, under
from resid_patching.plots.grids import Grid, draw_grids
from resid_patching.result import Axis, Result, place_of

if TYPE_CHECKING:
    import plotly.graph_objects

Of: TypeAlias = Literal["total", "direct", "indirect"]


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
    if of not in ("total", "direct", "indirect"):
        raise ValueError(f"of is 'total', 'direct' or 'indirect', got {of!r}")
    if of != "total" and not isinstance(result, Effect):
        raise ValueError(f"of={of!r} is a choice between the numbers of an Effect")
    grid = _grid(result, of)
    return draw_grids({"": grid}, result.unit, _heading(result, of, title))


def effect_grids(
    effect: Effect, *, top: int = 40, tokens: Sequence[str] | None = None
) -> plotly.graph_objects.Figure:
    """Total, direct and indirect effects side by side, on one scale.

    Args:
        effect: of heads, one at a time (layer × head), or of a path to receivers side by side
            (sender × receiver), or of targets at each position in turn (target × position).
        top: of heads, neurons and their inputs in these two, so many rows or columns, by their
            largest total effect; the title says how many there are. What has an order is shown
            whole: positions, stream states, and the layers' attention, MLPs and biases.

        tokens: of the prompt, to stand beside the positions where it is one prompt.

    Returns:
        A figure with a trace of numbers for each of the three, and of what has none. One
        that is empty or a copy of another is not drawn, and the title says so.

    Raises:
        MissingExtraError: plotly is not installed.
        ValueError: the targets are not heads, or there are not as many tokens as positions.
    """
    parts: tuple[Of, ...] = ("total", "direct", "indirect")
    grids: dict[str, Grid] = {of: _grid(effect, of) for of in parts}
    axes = (grids["total"].rows, grids["total"].columns)
    if effect.columns is not None:
        grids = _strongest(grids, top)
    shown = (grids["total"].rows, grids["total"].columns)
    if tokens is not None:
        if shown[1].name != "position" or len(tokens) != len(shown[1].labels):
            raise ValueError(f"{len(tokens)} tokens for {len(shown[1].labels)} {shown[1].name}s")
        grids = {of: dataclasses.replace(grid, tokens=tokens) for of, grid in grids.items()}
    heading = _heading(
        effect, "total", f"Effects on {metric_words(effect)}: total, direct, indirect"
    )
    for some, all_ in zip(shown, axes, strict=True):
        n, n_all = len(some.labels), len(all_.labels)
        heading[-1] += f"; the strongest {n} of {n_all} {all_.name}s" if n < n_all else ""
    return draw_grids(grids, effect.unit, heading)


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
    layer, head = place_of(label)
    return None if layer is None or head is None else Head(layer, head)


def about_effect(effect: Effect) -> tuple[str, ...]:
    """Kind of ablation, place and prompts, for a title."""
    over = effect.averaged or "one prompt"
    joint = " (targets together)" if effect.joint else ""
    return f"{effect.how}{joint}, at {effect.positions}", over, *under(effect)


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
    """Answer and foil, where all prompts agree on them; else the plan, as of a direction."""
    answers, foils = set(found.answer_texts), set(found.foil_texts or ())
    if len(answers) != 1 or len(foils) > 1:
        return found.provenance.plan
    foil = f'"{foils.pop()}"' if foils else "the vocabulary mean"
    plan = f'direct logit attribution by {found.by}, "{answers.pop()}" against {foil}'
    capped = ("before the output softcap",) if found.capped_value is not None else ()
    return ", ".join([plan, *capped, *under(found)])


def _others(found: Attribution) -> str:
    """What the rows that are no heads add up to."""
    others = [n for n, label in enumerate(found.components) if as_head(label) is None]
    rest = float(mean(found.values[others, :, 0]).sum())
    return f"heads alone: the {len(others)} other rows add up to {rest:+.4g}"
