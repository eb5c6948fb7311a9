"""How an effect is printed (baseline, table of targets, grid of heads), and effects joined."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from resid_patching.cli.frame import bar, new_table, print_line, printable

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
    if grid and not effect.joint:
        _print_grid(out, effect)
    out.print()
    out.print(
        "total: the model run again; direct (not the total): later writes frozen; "
        "indirect: the rest."
    )
    out.print("This shows what replacing a part does in this run, not that it is unnecessary.")


def _print_baseline(out: Console, effect: Effect) -> None:
    value = float(_mean(effect, effect.baseline))
    items = [f"{printable(effect.metric)}:", f"{value:+.4f} {effect.unit}"]
    if effect.weights is not None:
        items.append(f"perplexity {_short(float(effect.perplexity['before'].iloc[0]))}")
    if effect.baseline.shape[0] > 1:
        items.append(f"({_averaged(effect)})")
    print_line(out, "baseline", *items)


def _mean(effect: Effect, values: Any) -> Any:
    """Mean over prompts [..., batch] -> [...]; over tokens where the metric is one of tokens."""
    values = values.detach().double().cpu()
    if effect.weights is None:
        return values.mean(-1)
    weights = effect.weights.double().cpu()
    return (values * weights).sum(-1) / weights.sum()


def _averaged(effect: Effect) -> str:
    n = effect.baseline.shape[0]
    if effect.weights is None:
        return f"mean over {n} prompts"
    return f"mean over {int(effect.weights.sum())} tokens of {n} prompts"


def _print_rows(out: Console, effect: Effect, top: int) -> None:
    sizes = _mean(effect, effect.total).nan_to_num()
    order = sizes.abs().sort(descending=True, stable=True).indices.tolist()
    largest = float(sizes.abs().max())
    columns = _columns(effect)
    out.print()
    out.print(_title(effect))
    table = new_table("target", *columns, "")
    for number in order[:top]:
        cells = [column[number] for column in columns.values()]
        table.add_row(
            _target_text(effect.targets[number]), *cells, bar(float(sizes[number]), largest, 10)
        )
    out.print(table)
    if len(order) > top:
        out.print(f"and {len(order) - top} more targets (--top {len(order)} shows all)")


def _title(effect: Effect) -> str:
    joint = ", together" if effect.joint else ""
    title = f"{printable(effect.how)}{joint}, at {effect.positions}: effect in {effect.unit}"
    if effect.baseline.shape[0] > 1:
        title += f", {_averaged(effect)}; sd over prompts"
    return title


def _columns(effect: Effect) -> dict[str, list[str]]:
    """The columns of the table, a text for each target."""
    total, direct = _mean(effect, effect.total), _mean(effect, effect.direct)
    columns = {"total": [_signed(value) for value in total]}
    if effect.baseline.shape[0] > 1:
        spread = effect.total.detach().double().cpu().std(1)
        columns["sd"] = [f"{float(value):.4f}" for value in spread]
    columns["direct"] = [_signed(value) for value in direct]
    columns["indirect"] = [_signed(value) for value in total - direct]
    if effect.weights is not None:
        frame = effect.perplexity
        columns["perplexity"] = [_short(value) for value in frame["after"].tolist()]
        columns["ratio"] = [f"x{_short(value)}" for value in frame["ratio"].tolist()]
    return columns


def _target_text(target: str) -> str:
    text = printable(target)
    return text if len(text) <= 30 else f"{text[:26]} ... ({text.count(' + ') + 1})"


def _signed(value: Any) -> str:
    return "n/a" if bool(value.isnan()) else f"{float(value):+.4f}"


def _short(value: float) -> str:
    """A positive number in four digits or more."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _print_grid(out: Console, effect: Effect) -> None:
    """Layer x head of totals, in as many blocks of columns as the width needs."""
    means = _mean(effect, effect.grid().values)
    largest = float(means.nan_to_num().abs().max())
    digits = 3 if largest < 10 else 2 if largest < 100 else 1
    texts = [[_cell(value, digits) for value in row] for row in means]
    width = max(6, *(len(text) for row in texts for text in row))
    n_heads = means.shape[1]
    fits = max(1, (out.width - 5) // (width + 1))
    out.print()
    out.print(f"total effect in {effect.unit}, layer by head")
    for start in range(0, n_heads, fits):
        heads = range(start, min(start + fits, n_heads))
        out.print("     " + " ".join(f"{head:>{width}}" for head in heads), soft_wrap=True)
        for layer, row in enumerate(texts):
            cells = " ".join(f"{row[head]:>{width}}" for head in heads)
            out.print(f"{layer:>4} {cells}", soft_wrap=True)


def _cell(value: Any, digits: int) -> str:
    return "" if bool(value.isnan()) else f"{float(value):+.{digits}f}"


def join(parts: list[Effect], tokens: str, n_prompts: int) -> Effect:
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
