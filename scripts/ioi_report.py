"""The words, tables and grids of the study's report, and how a terminal shows them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resid_patching.cli.effects import print_cells
from resid_patching.cli.screen import bar, fancy, new_table, print_line, print_model, quoted

import resid_patching as rp
from resid_patching.address import MLP, Head
from resid_patching.markup import printable

if TYPE_CHECKING:
    from ioi_study import Study

_PAIRS = 4  # pairs whose differences are shown

# Of each step: its title, what the numbers say, and what they do not say.
_WORDS = {
    "prompts": (
        "Prompts and baseline",
        "The logit difference is the recipient's logit minus the giver's at the last token, END: "
        "above 0 the model prefers the right one of the two. In the source prompts, where other "
        "names stand, it should be near 0, or below it where the two have changed places.",
        "It does not say that the answer is the most likely token; that share is given beside it.",
    ),
    "attribution": (
        "Direct logit attribution by head, at END",
        "What a head writes at END straight into the logit difference, through the model's own "
        "final norm. Heads, MLPs and the rest add up to the difference exactly.",
        "A head that works through later heads or MLPs scores near 0 here, and two heads that "
        "cancel each other both score high: this is not what the model loses without it.",
    ),
    "to logits": (
        "Paths to the logits",
        "One head at a time, what it tells the logits from END, by itself or through MLPs, is "
        "replaced by what it tells them in the source prompt; other heads keep their values. "
        "Negative: the difference falls, so in base the head pushes the answer up.",
        "The effects need not add up, and a head that works through other heads shows nothing "
        "here. Another source gives other numbers, and a mean within two standard errors (±) of 0 "
        "may be chance.",
    ),
    "to queries": (
        "Paths to the queries of the strongest heads",
        "One head at a time, what it tells the query of a strongest head at END is replaced by "
        "what it tells it in the source prompt, and all behind that query is run again. Negative: "
        "the sender steers that head towards the answer.",
        "Only queries are patched: what reaches a head's keys and values, or comes from positions "
        "before END, is not seen here. A number near 0 does not mean that a head does nothing.",
    ),
    "knock-out": (
        "Knock-out of the heads found",
        "The strongest heads that push the answer up are replaced together, everywhere, by their "
        "mean over prompts and positions of the source prompts. What is left of the logit "
        "difference is given as a share of what it was.",
        "Random sets are drawn from all other heads, so they may hold backups, heads that the "
        "found ones read from, or heads that push the answer down, whose loss raises the share "
        "above 100%. Little left does not make the found heads the whole circuit, nor each of "
        "them needed.",
    ),
    "alone": (
        "Each head found, alone: total beside direct",
        "One head at a time, replaced everywhere by the same mean. Total: the model run again; "
        "direct: every later write frozen; indirect: total - direct, what later heads, MLPs and "
        "the final norm made of the change.",
        "An indirect effect of the other sign means that later parts made up for some of the loss. "
        "A small total is not a head without use: another may have stepped in.",
    ),
}

Facts = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Table:
    """Rows of text under column names; `sizes` are drawn as bars where given."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    sizes: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Grid:
    """Numbers of heads, layer by head: an effect of one receiver, or an attribution."""

    title: str
    result: rp.Effect | rp.Attribution


@dataclass(frozen=True)
class Bars:
    """Named numbers, and one that they are compared with."""

    title: str
    unit: str
    values: Mapping[str, float]
    mark: float


@dataclass(frozen=True, eq=False)
class Section:
    """A step of the study: what its numbers say, what they do not say, and the numbers."""

    title: str
    says: str
    limits: str
    facts: Facts = ()
    tables: tuple[Table, ...] = ()
    grids: tuple[Grid, ...] = ()
    bars: Bars | None = None


def sections(found: Study, *, top: int) -> list[Section]:
    """The report.

    Args:
        found: the study.
        top: rows of a table.
    """
    return [
        Section(*_WORDS["prompts"], facts=(*_prompt_facts(found), *_baseline_facts(found))),
        _attribution(found, top),
        _to_logits(found, top),
        _to_queries(found, top),
        _knock_out(found),
        _alone(found),
    ]


# The sections


def _prompt_facts(found: Study) -> Facts:
    texts = found.run.prompts.token_texts[0]
    facts: list[tuple[str, tuple[str, ...]]] = [
        ("pairs", (found.pairs.how,)),
        ("tokens", tuple(f"{place} {quoted(text)}" for place, text in enumerate(texts))),
    ]
    for row, differences in enumerate(found.differing[:_PAIRS]):
        items = (f"{d.position} {quoted(d.base)} -> {quoted(d.source)}" for d in differences)
        facts.append((f"pair {row}", tuple(items)))
    if len(found.pairs) > _PAIRS:
        facts.append(("", (f"... {len(found.pairs) - _PAIRS} more pairs",)))
    return tuple(facts)


def _baseline_facts(found: Study) -> Facts:
    n, right, first = len(found.pairs), int((found.base > 0).sum()), int(found.is_top.sum())
    means = [float(values.double().mean()) for values in (found.base, found.source)]
    return (
        (
            "baseline",
            (
                f"logit difference: base {means[0]:+.4f} (sd {_sd(found.base)}),",
                f"source {means[1]:+.4f} (sd {_sd(found.source)})",
            ),
        ),
        (
            "right",
            (
                f"answer above the other name in {right} of {n} ({right / n:.0%}),",
                f"top prediction in {first} of {n} ({first / n:.0%})",
            ),
        ),
    )


def _attribution(found: Study, top: int) -> Section:
    dla = found.attribution
    written = dla.values[..., 0].detach().double().cpu()
    means = written.mean(-1)
    heads = [i for i, name in enumerate(dla.components) if isinstance(rp.parse(name), Head)]
    order = sorted(heads, key=lambda number: -abs(float(means[number])))[:top]
    rows = [(dla.components[i], _signed(means[i]), _sd(written[i])) for i in order]
    table = Table(("head", "written", "sd"), rows, tuple(float(means[i]) for i in order))
    return Section(
        *_WORDS["attribution"],
        facts=(("sum", _sums(dla.components, means)),),
        tables=(table,),
        grids=(Grid("Direct logit attribution at END", dla),),
    )


def _sums(components: Sequence[str], means: Any) -> tuple[str, ...]:
    sums = {"heads": 0.0, "MLPs": 0.0, "embeddings and biases": 0.0}
    for name, mean in zip(components, means.tolist(), strict=True):
        match rp.parse(name):
            case Head():
                sums["heads"] += mean
            case MLP():
                sums["MLPs"] += mean
            case _:
                sums["embeddings and biases"] += mean
    parts = (f"{name} {value:+.4f}," for name, value in sums.items())
    return *parts, f"together {sum(sums.values()):+.4f} logits"


def _to_logits(found: Study, top: int) -> Section:
    effect = found.to_logits
    return Section(
        *_WORDS["to logits"],
        facts=(
            ("up", _named(effect, found.up)),
            ("down", _named(effect, found.down) or ("no head",)),
        ),
        tables=(_table(effect, top),),
        grids=(Grid("Paths from each head at END to the logits", effect),),
    )


def _to_queries(found: Study, top: int) -> Section:
    reached = [head for head in found.up if head not in found.unreached]
    columns = {head: found.to_queries.receiver(f"{head}.q") for head in reached}
    facts: list[tuple[str, tuple[str, ...]]] = []
    if found.unreached:
        facts.append(("no path", (f"no head writes before {', '.join(found.unreached)}",)))
    for head, effect in columns.items():
        first = [effect.targets[number] for number in _ranked(effect)[:3]]
        facts.append((f"to {head}", _named(effect, first)))
    return Section(
        *_WORDS["to queries"],
        facts=tuple(facts),
        tables=tuple(_table(effect, top, f"to {head}.q") for head, effect in columns.items()),
        grids=tuple(
            Grid(f"Paths from each head at END to the query of {head}", effect)
            for head, effect in columns.items()
        ),
    )


def _knock_out(found: Study) -> Section:
    ranked = sorted(found.controls, key=found.left)
    shares = {_heads_of(effect): 100 * found.left(effect) for effect in ranked}
    share, others = 100 * found.left(found.knocked), list(shares.values())
    rows = [("none", _signed(found.base.double().mean()), _sd(found.base), "100.0%")]
    for name, effect in (("found", found.knocked), ("lowest", ranked[0]), ("highest", ranked[-1])):
        left = effect.patched[0].double()
        cells = _signed(left.mean()), _sd(left), _percent(100 * found.left(effect))
        rows.append((f"{name}: {_heads_of(effect)}", *cells))
    summary = (
        f"{len(ranked)} sets of {len(found.up)} other heads:",
        f"mean {_percent(sum(others) / len(others))},",
        f"lowest {_percent(others[0])},",
        f"highest {_percent(others[-1])}",
    )
    drawn = {f"found: {_heads_of(found.knocked)}": share, **shares}
    title = f"Logit difference left, {found.knocked.how}"
    return Section(
        *_WORDS["knock-out"],
        facts=(
            ("found", (f"{_heads_of(found.knocked)}:", f"{_percent(share)} is left")),
            ("random", summary),
        ),
        tables=(Table(("mean-ablated together", "logit difference", "sd", "left"), rows),),
        bars=Bars(title, "% of the difference before", drawn, 100.0),
    )


def _alone(found: Study) -> Section:
    effect, paths, dla = found.alone, found.to_logits, found.attribution
    rows = [
        (
            head,
            _signed(dla.sel(component=head).mean()),
            _signed(paths.sel(target=head).mean()),
            _signed(effect.total[row].mean()),
            _sd(effect.total[row]),
            _signed(effect.direct[row].mean()),
            _signed(effect.indirect[row].mean()),
        )
        for row, head in enumerate(found.up)
    ]
    columns = ("head", "written", "path to logits", "total", "sd", "direct", "indirect")
    return Section(
        *_WORDS["alone"],
        facts=(("shown", (f"effect in {effect.unit}, {effect.how}, at {effect.positions}",)),),
        tables=(Table(columns, rows),),
    )


# Their parts


def _table(effect: rp.Effect, top: int, name: str = "head") -> Table:
    means = effect.total.detach().double().cpu().mean(-1)
    order = _ranked(effect)[:top]
    rows = [(effect.targets[i], _signed(means[i]), _sd(effect.total[i])) for i in order]
    return Table((name, "total", "sd"), rows, tuple(float(means[i]) for i in order))


def _ranked(effect: rp.Effect) -> list[int]:
    """Places of the targets with a path, largest first by size."""
    means = effect.total.detach().double().cpu().mean(-1).tolist()
    known = [number for number, mean in enumerate(means) if not math.isnan(mean)]
    return sorted(known, key=lambda number: -abs(means[number]))


def _named(effect: rp.Effect, heads: Sequence[str]) -> tuple[str, ...]:
    """Heads with their mean effects and standard errors."""
    named = []
    for head in heads:
        values = effect.sel(target=head).detach().double()
        error = f" ± {float(values.std()) / len(values) ** 0.5:.4f}" if len(values) > 1 else ""
        named.append(f"{head} ({_signed(values.mean())}{error})")
    return tuple(named)


def _heads_of(effect: rp.Effect) -> str:
    """The heads of an ablation that took them together."""
    return effect.targets[0]


def _percent(share: float) -> str:
    return "n/a" if math.isnan(share) else f"{share:.1f}%"


def _signed(value: Any) -> str:
    return "n/a" if math.isnan(float(value)) else f"{float(value):+.4f}"


def _sd(values: Any) -> str:
    """The spread over prompts."""
    return "n/a" if len(values) < 2 else f"{float(values.detach().double().std()):.4f}"


# On a terminal


def print_report(out: Any, found: Study, parts: list[Section], stand_in: str | None) -> None:
    """Prints the sections one below the other.

    Args:
        out: a console.
        found: the study.
        parts: its sections.
        stand_in: says so where the shipped model stands in for another.
    """
    print_model(out, found.run.view, found.to_logits.provenance, stand_in)
    for number, part in enumerate(parts, start=1):
        out.print()
        out.print(f"{number}. {part.title}", style="bold")
        out.print(part.says)
        out.print(part.limits, style="dim")
        out.print()
        for name, items in part.facts:
            print_line(out, name, *map(printable, items), gap=" ")
        for table in part.tables:
            _print_table(out, table)
        for grid in part.grids:
            _print_grid(out, grid)


def _print_table(out: Any, table: Table) -> None:
    shown = new_table(*table.columns, *([""] if table.sizes else []))
    largest = max(map(abs, table.sizes), default=0.0)
    for number, row in enumerate(table.rows):
        drawn = [bar(table.sizes[number], largest, 10)] if table.sizes else []
        shown.add_row(*map(printable, row), *drawn)
    out.print()
    out.print(shown)


def _print_grid(out: Any, grid: Grid) -> None:
    values = layer_by_head(grid.result)
    mark = "\N{MIDDLE DOT}" if fancy() else "."
    legend = f" ({mark} no path: it writes too late)" if bool(values.isnan().any()) else ""
    out.print()
    out.print(f"{grid.title}, in {grid.result.unit}, layer by head{legend}")
    rows = [f"{layer:>4}" for layer in range(values.shape[0])]
    print_cells(out, values, rows, missing=mark, heat=True)


def layer_by_head(result: rp.Effect | rp.Attribution) -> Any:
    """Means over prompts [layer, head] of every head's numbers."""
    if isinstance(result, rp.Effect):
        return result.grid().values.detach().double().cpu().mean(-1)
    heads = {i: a for i, t in enumerate(result.components) if isinstance(a := rp.parse(t), Head)}
    n_layers = 1 + max(head.layer for head in heads.values())
    means = result.values[list(heads), :, 0].detach().double().cpu().mean(-1)
    return means.reshape(n_layers, -1)  # heads come layer by layer
