"""How an effect is printed (baseline, table of targets, grid of heads), and effects joined."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from resid_patching.cli.screen import bar, new_table, print_line, shades
from resid_patching.markup import printable

if TYPE_CHECKING:
    from rich.console import Console

    from resid_patching.ablation import Effect


def print_effect(out: Console, effect: Effect, *, top: int, grid: bool) -> None:
    """Prints baseline, targets by size of their total effect, and how to read them.

    Args:
        out: where.
        effect: an effect.
        top: targets shown.
        grid: also the totals of heads, layer by head.
    """
    _print_baseline(out, effect)
    _print_rows(out, effect, top)
    if effect.columns is not None:
        shorter = " or not in every prompt" if bool(effect.total.isnan().any()) else ""
        print_crossed(out, effect, "target", top, left_out=f"weaker{shorter}")
    elif grid and not effect.joint:
        _print_grid(out, effect)
    out.print()
    out.print(
        "total: the model run again; direct (not the total): later writes frozen; "
        "indirect: the rest."
    )
    out.print("This shows what replacing a part does in this run, not that it is unnecessary.")


def _print_baseline(out: Console, effect: Effect) -> None:
    value = float(effect.mean(effect.baseline))
    items = [f"{printable(effect.metric)}:", f"{value:+.4f} {effect.unit}"]
    if effect.has_perplexity:
        items.append(f"perplexity {_short(float(effect.perplexity['before'].iloc[0]))}")
    if effect.baseline.shape[0] > 1:
        items.append(f"({effect.averaged})")
    print_line(out, "baseline", *items)


def _print_rows(out: Console, effect: Effect, top: int) -> None:
    sizes = effect.mean(effect.total).flatten().nan_to_num()
    names = _names(effect)
    order = sizes.abs().sort(descending=True, stable=True).indices.tolist()
    largest = float(sizes.abs().max())
    columns = _columns(effect)
    out.print()
    joint = ", together" if effect.joint else ""
    out.print(f"{printable(effect.how)}{joint}, at {effect.positions}: {unit_text(effect)}")
    table = new_table("target", *columns, "")
    for number in order[:top]:
        cells = [column[number] for column in columns.values()]
        table.add_row(names[number], *cells, bar(float(sizes[number]), largest, 10))
    out.print(table)
    if len(order) > top:
        what = "targets" if effect.columns is None else "cells"
        out.print(f"and {len(order) - top} more {what} (--top {len(order)} shows all)")


def _names(effect: Effect) -> list[str]:
    """What is replaced in each row of the table."""
    targets = [target_text(target) for target in effect.targets]
    if effect.columns is None:
        return targets
    return [f"{target} at {place}" for target in targets for place in effect.columns.labels]


def unit_text(effect: Effect) -> str:
    """What the numbers of a table are."""
    text = f"effect in {effect.unit}"
    if effect.baseline.shape[0] > 1:
        text += f", {effect.averaged}; sd over prompts"
    return text


def _columns(effect: Effect) -> dict[str, list[str]]:
    """The columns of the table, a text for each row."""
    total, direct = (effect.mean(part).flatten() for part in (effect.total, effect.direct))
    columns = {"total": [signed(value) for value in total]}
    if effect.baseline.shape[0] > 1:
        columns["sd"] = [unsigned(value) for value in spreads(effect)]
    columns["direct"] = [signed(value) for value in direct]
    columns["indirect"] = [signed(value) for value in total - direct]
    if effect.has_perplexity:
        frame = effect.perplexity
        columns["perplexity"] = [_short(value) for value in frame["after"].tolist()]
        columns["ratio"] = [f"x{_short(value)}" for value in frame["ratio"].tolist()]
    return columns


def spreads(effect: Effect) -> Any:
    """The standard deviation over prompts of each total, cell by cell."""
    return effect.total.detach().cpu().double().std(-1).flatten()


def target_text(target: str) -> str:
    """A target as it is shown, shortened where it is a long list."""
    text = printable(target)
    return text if len(text) <= 30 else f"{text[:26]} ... ({text.count(' + ') + 1})"


def signed(value: Any) -> str:
    """A number with its sign."""
    return "n/a" if bool(value.isnan()) else f"{float(value):+.4f}"


def unsigned(value: Any) -> str:
    """A number that has no sign."""
    return "n/a" if bool(value.isnan()) else f"{float(value):.4f}"


def by_size(values: Any) -> list[int]:
    """Places of a list of values, largest first; NaN is left out."""
    order = values.nan_to_num().abs().sort(descending=True, stable=True).indices.tolist()
    return [number for number in order if not bool(values[number].isnan())]


def _short(value: float) -> str:
    """A positive number in four digits or more."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _print_grid(out: Console, effect: Effect) -> None:
    """Layer x head of totals."""
    means = effect.mean(effect.grid().values)
    out.print()
    out.print(f"total effect in {effect.unit}, layer by head")
    rows = [f"{layer:>4}" for layer in range(means.shape[0])]
    print_cells(out, means, rows, missing="", heat=True)


def print_crossed(
    out: Console,
    effect: Effect,
    row: str,
    top: int,
    *,
    missing: str = "n/a",
    legend: str = "",
    left_out: str,
) -> None:
    """Totals of the strongest rows and columns, in the order they were given.

    Args:
        out: where.
        effect: an effect with columns.
        row: what a row is.
        top: rows and columns shown.
        missing: what stands for NaN.
        legend: what that means, said where it occurs.
        left_out: what is said of rows and columns not shown.
    """
    assert effect.columns is not None
    total = effect.mean(effect.total)
    rows, columns = (sorted(by_size(_largest(part))[:top]) for part in (total, total.T))
    means = total[rows][:, columns]
    said = legend if bool(means.isnan().any()) else ""
    out.print()
    out.print(f"total effect in {effect.unit}, {row} by {effect.columns.name}{said}")
    names = [target_text(effect.targets[number]) for number in rows]
    width = max(map(len, names))
    labels = [printable(str(effect.columns.labels[number])) for number in columns]
    print_cells(out, means, [f"{n:<{width}}" for n in names], labels, missing=missing, heat=True)
    left = []
    counted = ((row, rows), (effect.columns.name, columns))
    for (what, shown), n_all in zip(counted, total.shape, strict=True):
        if n := n_all - len(shown):
            left.append(f"{n} more {what}{'s' * (n > 1)}")
    if left:
        out.print(f"and {' and '.join(left)}, {left_out} (--top N shows more)")


def _largest(values: Any) -> Any:
    """The largest size in each row; NaN where a row has no number."""
    sizes = values.nan_to_num().abs().amax(1)
    return sizes.masked_fill(values.isnan().all(1), math.nan)


def print_cells(
    out: Console,
    values: Any,
    rows: list[str],
    columns: list[str] | None = None,
    *,
    missing: str,
    heat: bool = False,
) -> None:
    """Prints numbers under their columns, in as many blocks of columns as the width needs.

    Args:
        out: where.
        values: [row, column].
        rows: what stands before each row, all of one width.
        columns: what stands above each column; None for its number.
        missing: what is shown for NaN.
        heat: also coloured by sign and size, on a terminal that can.
    """
    heat = heat and shades(out)
    largest = float(values.nan_to_num().abs().max())
    digits = 3 if largest < 10 else 2 if largest < 100 else 1
    texts = [[_cell(value, digits, missing) for value in row] for row in values]
    columns = list(map(str, range(values.shape[1]))) if columns is None else columns
    width = max(6, *map(len, columns), *(len(text) for row in texts for text in row))
    fits = max(1, (out.width - len(rows[0]) - 1) // (width + 1))
    for start in range(0, len(columns), fits):
        shown = range(start, min(start + fits, len(columns)))
        header = " ".join(f"{columns[column]:>{width}}" for column in shown)
        out.print(f"{'':<{len(rows[0])}} {header}", soft_wrap=True)
        for number, (name, row) in enumerate(zip(rows, texts, strict=True)):
            line = rich_text(f"{name} ")
            for column in shown:
                if column > start:
                    line.append(" ")
                style = _heat(float(values[number, column]), largest) if heat else ""
                line.append(f"{row[column]:>{width}}", style)
            out.print(line, soft_wrap=True)


def rich_text(text: str) -> Any:
    """A text that parts with a style can be added to."""
    from rich.text import Text

    return Text(text)


def _heat(value: float, largest: float) -> str:
    """Blue for positive, red for negative, paler towards 0; none for NaN."""
    if math.isnan(value) or largest < 5e-4:  # below that all read as 0
        return ""
    share = min(1.0, abs(value) / largest)
    full = (33, 102, 172) if value > 0 else (178, 24, 43)
    red, green, blue = (round(247 + share * (part - 247)) for part in full)
    return f"{'white' if share > 0.55 else 'black'} on rgb({red},{green},{blue})"


def _cell(value: Any, digits: int, missing: str) -> str:
    return missing if bool(value.isnan()) else f"{float(value):+.{digits}f}"


def joined(parts: list[Effect], tokens: str, n_prompts: int) -> Effect:
    """The effects on groups of windows as one effect on all of them.

    Args:
        parts: one effect or more, of the same targets, kind and metric.
        tokens: hash of all prompts.
        n_prompts: how many prompts there are in all.
    """
    import torch

    from resid_patching.result import Axis

    first = parts[0]
    if len(parts) == 1:
        return first
    how = first.how
    if first.how != parts[1].how:  # each group of windows has its own group of the source
        how = f"{first.how}, the first of {len(parts)} groups of windows"
    origin = dataclasses.replace(
        first.provenance,
        tokens=tokens,
        n_prompts=n_prompts,
        plan=first.provenance.plan.replace(first.how, how),
    )
    weights = None
    if first.weights is not None:
        weights = torch.cat([part.weights for part in parts if part.weights is not None])
    return dataclasses.replace(
        first,
        values=torch.cat([part.values for part in parts], 1),
        axes=(first.axes[0], Axis("batch", tuple(range(n_prompts)))),
        provenance=origin,
        how=how,
        baseline=torch.cat([part.baseline for part in parts]),
        patched=torch.cat([part.patched for part in parts], 1),
        direct=torch.cat([part.direct for part in parts], 1),
        weights=weights,
        routes=tuple(sorted({route for part in parts for route in part.routes})),
    )
