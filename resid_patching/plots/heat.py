"""Effects, attributions and other results as one grid, or as several side by side on one scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from resid_patching.ablation import Effect
from resid_patching.address import Head, HeadInput, HeadNode, Neuron, parse
from resid_patching.attribution import Attribution
from resid_patching.errors import AddressError
from resid_patching.plots.base import at_token, heading_of, mean, over_prompts
from resid_patching.plots.grids import Grid, draw_grids, pivoted, places_with_tokens
from resid_patching.result import Result

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

Of: TypeAlias = Literal["total", "direct", "indirect"]
PARTS: tuple[Of, ...] = get_args(Of)


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
        A figure whose first trace holds the numbers, NaN where there is none.

    Raises:
        MissingExtraError: plotly is not installed.
        ValueError: another number of axes, no heads, or `of` for what is no `Effect`.
    """
    if of not in PARTS:
        raise ValueError(f"of is 'total', 'direct' or 'indirect', got {of!r}")
    if isinstance(result, Effect):
        planes = _planes(result)
        grid = Grid(planes[of], hovers=_hovers(planes))
    elif of != "total":
        raise ValueError(f"of={of!r} is a choice between the numbers of an Effect")
    elif isinstance(result, Attribution):
        if len(result.axis("pos").labels) != 1:
            raise ValueError("a picture of heads is of one position; choose one, such as -1")
        grid = Grid(_by_layer(result.table(), "value"))
    else:
        grid = Grid(_own_axes(result))
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

        tokens: to stand beside the positions; None for the effect's own, where its prompts agree.

    Returns:
        A figure with a trace of numbers for each of the three, and of what has none. One
        that is empty or a copy of another is not drawn, and the title says so.

    Raises:
        MissingExtraError: plotly is not installed.
        ValueError: the targets are not heads, or there are not as many tokens as positions.
    """
    planes = _planes(effect)
    if tokens is not None:
        planes = {of: _named(plane, effect, tokens) for of, plane in planes.items()}
    total = planes["total"]
    heading = _heading(
        effect, "total", f"Effects on {metric_words(effect)}: total, direct, indirect"
    )
    if effect.columns is not None:
        rows, columns = (_strongest(total.abs().max(axis=axis), top) for axis in (1, 0))
        planes = {of: plane.loc[rows, columns] for of, plane in planes.items()}
        for axis, kept in ((total.index, rows), (total.columns, columns)):
            if len(kept) < len(axis):
                heading[-1] += f"; the strongest {len(kept)} of {len(axis)} {axis.name}s"
    hovers = _hovers(planes)
    grids = {of: Grid(plane, hovers=hovers) for of, plane in planes.items()}
    return draw_grids(grids, effect.unit, heading)


def _named(plane: pandas.DataFrame, effect: Effect, tokens: Sequence[str]) -> pandas.DataFrame:
    name, places = plane.columns.name, plane.columns
    if effect.columns is None or name != "position" or len(tokens) != len(places):
        raise ValueError(f"{len(tokens)} tokens for {len(places)} {name}s")
    names = places_with_tokens([int(label) for label in effect.columns.labels], tokens)
    return plane.set_axis(names, axis="columns").rename_axis(columns=name)


def _strongest(sizes: pandas.Series, top: int) -> list[Any]:
    """The labels with the largest sizes, in the order they were given.

    All of them where they have an order of their own: a gap in it would hide where effects change.
    """
    if sizes.index.name == "position" or all(map(_is_ordered, sizes.index)):
        return list(sizes.index)
    ranked = sizes.fillna(0).sort_values(ascending=False, kind="stable")
    return [label for label in sizes.index if label in set(ranked.index[:top])]


def _is_ordered(label: str) -> bool:
    """Whether a label is of a place that stands once in each layer."""
    try:
        address = parse(label)
    except AddressError:  # several together
        return False
    return not isinstance(address, Head | HeadInput | HeadNode | Neuron)


# What is shown


def _planes(effect: Effect) -> dict[Of, pandas.DataFrame]:
    """Total, direct and indirect: layer × head, sender × receiver, or target × position."""
    frame = effect.table().rename(columns={"value": "total"})
    if effect.columns is None:
        return {of: _by_layer(frame, of) for of in PARTS}
    row, column = "sender" if effect.receivers else "target", effect.columns.name
    frame = frame.rename(columns={"target": row})
    return {of: pivoted(frame, row, column, of) for of in PARTS}


def _by_layer(frame: pandas.DataFrame, value: str) -> pandas.DataFrame:
    """The heads among the rows of a table as layer × head, no layer or head left out."""
    if "head" not in frame or bool(frame["head"].isna().all()):
        labels = ", ".join(frame.iloc[:4, 0])
        raise ValueError(f"this picture is of heads one at a time; these are {labels}")
    heads = frame.dropna(subset=["head"]).astype({"layer": int, "head": int})
    grid = heads.pivot(index="layer", columns="head", values=value)
    layers, columns = range(heads["layer"].max() + 1), range(heads["head"].max() + 1)
    return grid.reindex(index=layers, columns=columns).rename_axis(index="layer", columns="head")


def _own_axes(result: Result) -> pandas.DataFrame:
    import pandas

    names = [axis.name for axis in result.axes]
    axes = [axis for axis in result.axes if axis.name != "batch"]
    if len(axes) != 2:
        raise ValueError(f"a heat map has two axes besides batch; this has {', '.join(names)}")
    values = result.values.detach().cpu().double()
    if "batch" in names:
        values = mean(values.movedim(names.index("batch"), -1))
    rows, columns = (pandas.Index(axis.labels, name=axis.name) for axis in axes)
    return pandas.DataFrame(values.numpy(), rows, columns)


def _hovers(planes: Mapping[Of, pandas.DataFrame]) -> list[list[str]]:
    """All numbers of each cell."""
    cells = np.stack([plane.to_numpy(dtype=float) for plane in planes.values()], -1)
    return [
        ["<br>".join(f"{of} {v:+.5g}" for of, v in zip(planes, cell, strict=True)) for cell in row]
        for row in cells
    ]


# What is said


def metric_words(effect: Effect) -> str:
    """The metric, for receivers: where each prompt has its own answer, it says so."""
    each = "(one a prompt) - (one a prompt)"
    return effect.metric.replace(each, "of each prompt's answer - foil")


def about_effect(effect: Effect) -> tuple[str, ...]:
    """Kind of ablation, place and prompts, for a title."""
    joint = " (targets together)" if effect.joint else ""
    where, texts = effect.positions, effect.token_texts or ()
    number = where.removeprefix("position ")
    if number != where and len(texts) == len(effect.baseline):
        where = at_token(where, [tokens[int(number)] for tokens in texts])
    return f"{effect.how}{joint}, at {where}", effect.averaged or "one prompt"


def _heading(result: Result, of: Of, title: str | None) -> list[str]:
    """What the numbers are; then unit, kind, place and prompts."""
    if isinstance(result, Effect):
        first = title or f"{of.capitalize()} effect on {metric_words(result)}"
        return heading_of(first, result.unit, *about_effect(result))
    plan, details = result.provenance.plan, [over_prompts(result)]
    if isinstance(result, Attribution):
        plan = what_is_scored(result)
        details = [scored_after(result), *details, _others(result)]
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


def scored_after(found: Attribution) -> str:
    """After which position an attribution at one position is, with its token."""
    places = found.position_index[:, 0].tolist()
    (label,) = found.axis("pos").labels
    where = places[0] if len(set(places)) == 1 else label
    there = [texts[p] for texts, p in zip(found.token_texts, places, strict=True)]
    return f"after {at_token('one position a prompt' if where == 'own' else where, there)}"


def _others(found: Attribution) -> str:
    """What the rows that are no heads add up to."""
    frame = found.table()
    others = frame.loc[frame["head"].isna(), "value"]
    return f"heads alone: the {len(others)} other rows add up to {others.sum():+.4g}"
