"""The page of each command: what was asked, pictures, a table that sorts, and where it is from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from resid_patching.cli.effects import spreads
from resid_patching.cli.page import Number, Page
from resid_patching.cli.screen import quoted

if TYPE_CHECKING:
    from resid_patching.ablation import Effect
    from resid_patching.attribution import Attribution
    from resid_patching.cli.path_output import Found
    from resid_patching.stream import StreamReport

_MOST_ROWS = 2000
TOTAL_DIRECT = (
    "total: the model run again; direct (not the total): later writes frozen; indirect: the rest."
)
NOT_NEEDED = "This shows what replacing a part does in this run, not that it is unnecessary."
DIRECT_ONLY = "A row is a direct effect: a part that acts through later parts scores near zero."


def signed(value: Any, unit: str = "") -> Number:
    """A number with its sign, as the terminal shows it."""
    number = float(value)
    return Number(number, "n/a" if math.isnan(number) else f"{number:+.4f}{unit}")


def plain(value: Any, digits: int = 4) -> Number:
    """A number that has no sign."""
    number = float(value)
    return Number(number, "n/a" if math.isnan(number) else f"{number:.{digits}f}")


def prompts_of(page: Page, prompts: Sequence[str], answers: Any = None, foils: Any = None) -> None:
    """Shows the prompts, all of them, with what is scored after each."""
    page.heading("Prompt" if len(prompts) == 1 else f"{len(prompts)} prompts")
    scored = []
    if answers is not None:
        scored.append(("answer", [quoted(text) for text in answers]))
        against = ["the vocabulary mean"] * len(prompts)
        if foils is not None:
            against = [quoted(text) for text in foils]
        scored.append(("against", against))
    if len(prompts) == 1:
        page.says(prompts[0], "text")
        page.facts([(name, tokens[0]) for name, tokens in scored])
        return
    columns, left = ["#", "prompt"], [1]
    rows: list[list[object]] = [[Number(n, str(n)), text] for n, text in enumerate(prompts)]
    for name, tokens in scored:
        left.append(len(columns))
        columns.append(name)
        for row, token in zip(rows, tokens, strict=True):
            row.append(token)
    page.table(columns, rows, left=left)


def attribution_page(
    found: Attribution, prompts: Sequence[str], stand_in: str | None, flags: Mapping[str, Any]
) -> Page:
    """The page of `dla`."""
    from resid_patching import plots

    origin = found.provenance
    page = Page(f"Direct logit attribution by {found.by}, {origin.model}", stand_in)
    values = found.values[:, :, 0].cpu().double()
    total, own = float(found.total.mean()), float(found.model_value.mean())
    page.facts(
        [
            ("sum of all rows", f"{total:+.4f} {found.unit}"),
            ("the model's own difference", f"{own:+.4f} {found.unit}"),
            ("largest gap", f"{float(found.gap.max()):.1e}"),
            *(
                []
                if found.capped_value is None
                else [("after the output softcap", f"{float(found.capped_value.mean()):+.4f}")]
            ),
        ]
    )
    page.says(DIRECT_ONLY, "limits")
    prompts_of(page, prompts, found.answer_texts, found.foil_texts)
    page.heading("Pictures")
    if found.by == "head":
        page.picture(lambda: plots.heatmap(found))
    page.picture(lambda: plots.attribution_bars(found))
    page.picture(lambda: plots.accumulated(found))
    several = values.shape[1] > 1
    mean = values.mean(1)
    order = mean.abs().sort(descending=True, stable=True).indices.tolist()
    columns = ["row", found.unit, *(["sd over prompts"] if several else [])]
    rows = [
        [found.components[n], signed(mean[n]), *([plain(values[n].std())] if several else [])]
        for n in order[:_MOST_ROWS]
    ]
    page.heading("Rows")
    page.table(columns, rows, caption=_caption(len(rows), len(order), "rows", origin.n_prompts))
    page.origin(origin, flags)
    return page


def effect_page(
    effect: Effect, prompts: Sequence[str] | None, stand_in: str | None, flags: Mapping[str, Any]
) -> Page:
    """The page of `ablate`."""
    from resid_patching import plots

    origin = effect.provenance
    page = Page(f"Ablation ({effect.how}), {origin.model}", stand_in)
    page.facts(_about_effect(effect))
    page.says(f"{TOTAL_DIRECT} {NOT_NEEDED}", "limits")
    if prompts is not None:
        prompts_of(page, prompts)
    page.heading("Pictures")
    page.picture(lambda: plots.show(effect))
    if plots.is_grid(effect) and effect.columns is None:
        page.picture(lambda: plots.effect_bars(effect))
    page.heading("Targets")
    _effect_table(page, effect, "target")
    page.origin(origin, flags)
    return page


def _about_effect(effect: Effect) -> list[tuple[str, object]]:
    from resid_patching.plots import metric_words

    rows: list[tuple[str, object]] = [
        ("kind", effect.how + (" (targets together)" if effect.joint else "")),
        ("at", effect.positions),
        ("metric", f"{metric_words(effect)}, in {effect.unit}"),
        ("baseline", f"{float(effect.mean(effect.baseline)):+.4f} {effect.unit}"),
    ]
    if effect.has_perplexity:
        rows.append(("perplexity", f"{float(effect.perplexity['before'].iloc[0]):.4g}"))
    return rows


def _effect_table(page: Page, effect: Effect, name: str, extra: Mapping[str, Any] = {}) -> None:
    """Cells by the size of their total effect; `extra`: more numbers [cell].

    A cell is a target, or a target beside a receiver or at a position; of these, only those that
    exist are shown.
    """
    total, direct = (effect.mean(part).flatten() for part in (effect.total, effect.direct))
    beside = effect.columns
    cells: list[tuple[object, ...]] = [(target,) for target in effect.targets]
    if beside is not None:
        cells = [(*cell, label) for cell in cells for label in beside.labels]
    labels = [name] if beside is None else [name, beside.name]
    columns = [*labels, "total", "direct", "indirect"]
    several = effect.baseline.shape[0] > 1
    columns += ["sd over prompts"] * several
    losses = effect.perplexity if effect.has_perplexity else None
    columns += ["perplexity", "ratio"] * (losses is not None)
    spread = spreads(effect) if several else None
    order = total.nan_to_num().abs().sort(descending=True, stable=True).indices.tolist()
    if beside is not None:
        order = [n for n in order if not bool(total[n].isnan())]
    rows = []
    for n in order[:_MOST_ROWS]:
        row: list[object] = [_text(label) for label in cells[n]]
        row += [signed(total[n]), signed(direct[n]), signed(total[n] - direct[n])]
        if spread is not None:
            row.append(plain(spread[n]))
        if losses is not None:
            after, ratio = float(losses["after"].iloc[n]), float(losses["ratio"].iloc[n])
            row += [Number(after, f"{after:.4g}"), Number(ratio, f"×{ratio:.4g}")]
        rows.append(row + [values[n] for values in extra.values()])
    what = {"receiver": "paths", "position": "cells"}.get(labels[-1], f"{name}s")
    caption = _caption(len(rows), len(order), what, effect.provenance.n_prompts)
    left = tuple(n for n in range(len(labels)) if labels[n] != "position")
    columns = [*columns, *extra]
    page.table(columns, rows, caption=f"Effects in {effect.unit}. {caption}", left=left)


def _text(label: object) -> object:
    return Number(label, str(label)) if isinstance(label, int) else str(label)


def _caption(n: int, n_all: int, what: str, n_prompts: int) -> str:
    over = f"Means over {n_prompts} prompts. " if n_prompts > 1 else ""
    left = f" The {n} largest of {n_all} {what}; --csv writes all." if n < n_all else ""
    return f"{over}A click on a column's name sorts by it.{left}"


def paths_page(found: Found, stand_in: str | None, flags: Mapping[str, Any]) -> Page:
    """The page of `path-patch`."""
    from resid_patching import plots

    effect, pairs = found.effect, found.pairs
    origin = effect.provenance
    page = Page(f"Path patching, {origin.model}", stand_in)
    rows = _about_effect(effect)
    rows.insert(1, ("sent from", found.where))
    if found.source is not None:
        rows.append(
            ("in the source", f"{float(found.source.cpu().double().mean()):+.4f} {effect.unit}")
        )
    page.facts([*rows, ("pairs", pairs.how.replace("\t", " "))])
    page.says("Only the senders' messages to the receivers are replaced. " + TOTAL_DIRECT, "limits")
    page.heading(f"{len(pairs)} pairs of prompts" if len(pairs) > 1 else "Pair of prompts")
    sources = found.sources
    texts = [
        [Number(n, str(n)), base, *([] if sources is None else [sources[n]])]
        for n, base in enumerate(pairs.base)
        if sources is None or n < len(sources)
    ]
    page.table(["#", "base", "source"][: 2 + (sources is not None)], texts, left=(1, 2))
    page.heading("Pictures")
    page.picture(lambda: plots.show(effect))
    if effect.receivers:
        page.picture(lambda: plots.path_diagram(effect))
        page.heading("Paths")
    else:
        if plots.is_grid(effect):
            page.picture(lambda: plots.effect_bars(effect))
        page.heading("Senders")
    _effect_table(page, effect, "sender", _more(found))
    page.origin(origin, flags)
    return page


def _more(found: Found) -> dict[str, list[Number]]:
    """Recovery and linearised effects, flat, where they were computed."""
    more = {}
    if found.recovery is not None and not found.small_gap:
        shares = (100 * found.recovery).detach().cpu().double().flatten().tolist()
        more["recovery"] = [_share(value) for value in shares]
    if found.linearised is not None:
        values = found.effect.mean(found.linearised).flatten()
        more["linearised"] = [signed(value) for value in values]
    return more


def _share(value: float) -> Number:
    text = "n/a" if math.isnan(value) else f"{value:+.1f}%"
    return Number(value, "0.0%" if text in ("+0.0%", "-0.0%") else text)


def stream_page(
    clean: StreamReport,
    changed: StreamReport | None,
    prompts: Sequence[str],
    stand_in: str | None,
    flags: Mapping[str, Any],
) -> Page:
    """The page of `stream`."""
    from resid_patching import plots

    reports = [report for report in (changed, clean) if report is not None]
    shown = reports[0]
    origin = shown.provenance
    page = Page(f"The running total, {shown.how or 'clean'}, {origin.model}", stand_in)
    facts: list[tuple[str, object]] = []
    for report in reports:
        name = report.how or "clean"
        survival = float(report.survival.cpu().double().nanmean())
        facts.append((f"survival, {name}", f"cos(start, last state) = {survival:+.4f} on average"))
        facts.append((f"exactness, {name}", f"largest gap {report.exactness:.1e}"))
    page.facts(facts)
    prompts_of(page, prompts)
    page.heading("Pictures")
    for report in reports:
        page.picture(lambda report=report: plots.stream(report))
    for report in reports:
        page.heading(f"Writes, {report.how or 'clean'}")
        frame = report.summary()
        rows = [
            [
                str(row["write"]),
                Number(n, str(n)),
                plain(row["mean_write_norm"], 3),
                plain(row["mean_stream_norm"], 3),
                Number(row["mean_share"], f"{row['mean_share']:.1%}"),
                signed(row["mean_cosine"]),
            ]
            for n, row in enumerate(frame.to_dict("records"))
        ]
        columns = ["write", "order", "norm", "stream after", "share", "cosine with start"]
        over = int(frame["n"].iloc[0])
        page.table(columns, rows, caption=f"Means over {over} positions.")
    page.origin(origin, flags)
    return page


def kl_page(
    title: str,
    columns: Mapping[str, Sequence[float]],
    labels: Sequence[str],
    *,
    over: str,
    origin: Any,
    stand_in: str | None,
    flags: Mapping[str, Any],
) -> Page:
    """The page of `tuned-lens fit` and `eval`: KL by layer."""
    from resid_patching import plots

    page = Page(f"{title}, {origin.model}", stand_in)
    page.says(f"KL(final || lens) in nats, {over}.")
    page.says(
        "A tuned lens says what can be read linearly from a state, not what causes what.", "limits"
    )
    page.heading("Picture")
    page.picture(lambda: plots.kl_by_layer(columns, labels, over=over))
    page.heading("Layers")
    rows = [
        [label, *(plain(values[n]) for values in columns.values())]
        for n, label in enumerate(labels)
    ]
    page.table(["layer", *columns], rows, caption="KL in nats.")
    page.origin(origin, flags)
    return page
