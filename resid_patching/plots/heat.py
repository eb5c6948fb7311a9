"""Results as one grid, or as several side by side on one scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from resid_patching.ablation import Effect
from resid_patching.address import Head, HeadInput, HeadNode, Neuron, parse
from resid_patching.attribution import Attribution
from resid_patching.errors import AddressError
from resid_patching.patterns import AttentionPatterns
from resid_patching.plots.base import heading_of, under
from resid_patching.plots.grids import Grid, draw_grids, pivoted, with_tokens
from resid_patching.plots.titles import (
    about_effect,
    at_one_position,
    metric_words,
    over_prompts,
    scored_after,
    what_is_scored,
)
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
        ValueError: another number of axes, no heads, or `of` for what is no `Effect`.
    """
    if of not in PARTS:
        raise ValueError(f"of is 'total', 'direct' or 'indirect', got {of!r}")
    if of != "total" and not isinstance(result, Effect):
        raise ValueError(f"of={of!r} is a choice between the numbers of an Effect")
    if isinstance(result, Effect):
        planes = _planes(result)
        grid, details = Grid(planes[of], hovers=_hovers(planes)), about_effect(result)
        plan = f"{of.capitalize()} effect on {metric_words(result)}"
    elif isinstance(result, Attribution):
        frame = at_one_position(result)
        grid, plan = Grid(_by_layer(frame, "value")), what_is_scored(result)
        rest = frame.loc[frame["head"].isna(), "value"]
        others = f"heads alone: the {len(rest)} other rows add up to {rest.sum():+.4g}"
        details = (scored_after(result), over_prompts(result), others)
    else:
        grid, plan = Grid(_own_axes(result)), result.provenance.plan
        details = (over_prompts(result),)
    if title is not None and not isinstance(result, Effect):
        details = (plan, *details)
    return draw_grids({"": grid}, result.unit, heading_of(title or plan, result.unit, *details))


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
        ValueError: the targets are not heads, or there are not as many tokens as positions.
    """
    planes = _planes(effect)
    total = planes["total"]
    name, n = total.columns.name, len(total.columns)
    if tokens is not None:
        if effect.columns is None or name != "position" or len(tokens) != n:
            raise ValueError(f"{len(tokens)} tokens for {n} {name}s")
        for plane in planes.values():
            plane.columns = with_tokens(effect.columns.labels, tokens)  # type: ignore[arg-type]
            plane.columns.name = name
    details = list(about_effect(effect))
    if effect.columns is not None:
        rows, columns = (_strongest(total.abs().max(axis=axis), top) for axis in (1, 0))
        planes = {of: plane.loc[rows, columns] for of, plane in planes.items()}
        for axis, kept in ((total.index, rows), (total.columns, columns)):
            if len(kept) < len(axis):
                details.append(f"the strongest {len(kept)} of {len(axis)} {axis.name}s")
    hovers = _hovers(planes)
    grids: dict[str, Grid] = {of: Grid(plane, hovers=hovers) for of, plane in planes.items()}
    first = f"Effects on {metric_words(effect)}: total, direct, indirect"
    return draw_grids(grids, effect.unit, heading_of(first, effect.unit, *details))


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
    """
    frame = found.to_frame().rename(columns={"component": "row"})
    plane = pivoted(frame[frame["prompt"] == batch], "row", "position", "value")
    largest = plane.abs().max(axis=1).sort_values(ascending=False, kind="stable").index[:top]
    details = [f"prompt {batch}"]
    if top < len(plane):
        details.append(f"the {top} largest of {len(plane)} rows")
    heading = heading_of(what_is_scored(found), found.unit, *details)
    return draw_grids({"": Grid(plane.loc[plane.index.isin(largest)])}, found.unit, heading)


def attention(
    patterns: AttentionPatterns, *, batch: int = 0, heads: int = 6
) -> plotly.graph_objects.Figure:
    """Where each head looks: from each query (a row) to the keys up to it (columns).

    Later keys, which a query cannot see, are not drawn.

    Args:
        patterns: of any heads.
        batch: which prompt.
        heads: at most so many heads, in the order given; the title says how many there are.

    Returns:
        A figure with a trace for each head; weights from 0 to 1.
    """
    import pandas

    n = len(patterns.token_texts[batch])
    places = with_tokens(range(n), patterns.token_texts[batch])
    axes = pandas.Index(places, name="query"), pandas.Index(places, name="key")
    values = patterns.values[:, batch, :n, :n].detach().cpu().double().numpy()
    drawn = patterns.heads[:heads]
    grids = {
        f"head {head}": Grid(pandas.DataFrame(values[number], *axes))
        for number, head in enumerate(drawn)
    }
    details = [f"prompt {batch}", "row: the query that looks; column: the key it looks at"]
    if len(drawn) < len(patterns.heads):
        details.append(f"the first {len(drawn)} of {len(patterns.heads)} heads")
    first = f"Attention pattern of {', '.join(drawn)}" if len(drawn) < 8 else "Attention patterns"
    heading = heading_of(first, patterns.unit, *details, *under(patterns))
    return draw_grids(grids, patterns.unit, heading, signed=False, end=1.0, triangle=True)


# What is shown


def _planes(effect: Effect) -> dict[Of, pandas.DataFrame]:
    """Total, direct and indirect: layer × head, sender × receiver, or target × position."""
    frame = effect.table().rename(columns={"value": "total"})
    if effect.columns is None:
        return {of: _by_layer(frame, of) for of in PARTS}
    row, column = "sender" if effect.receivers else "target", effect.columns.name
    frame = frame.rename(columns={"target": row})
    return {of: pivoted(frame, row, column, of) for of in PARTS}


def _by_layer(frame: Any, value: str) -> pandas.DataFrame:
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
    values = values.mean(names.index("batch")) if "batch" in names else values
    rows, columns = (pandas.Index(axis.labels, name=axis.name) for axis in axes)
    return pandas.DataFrame(values.numpy(), rows, columns)


def _hovers(planes: Mapping[Any, pandas.DataFrame]) -> Any:
    """All numbers of each cell."""
    total, *others = (plane.map(f"{of} {{:+.5g}}".format) for of, plane in planes.items())
    for said in others:
        total = total + "<br>" + said
    return total.to_numpy()


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
