"""The words, tables and pictures of the study's report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas

import resid_patching as rp
from resid_patching.address import MLP, Head
from resid_patching.cli.output import model_text
from resid_patching.markup import number_text, quoted
from resid_patching.result import standard_error
from resid_patching.show.report import (
    Document,
    Section,
    Table,
    drawn,
    grids_of,
    table_of,
    token_items,
)

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


def report(found: Study, *, top: int, stand_in: str | None) -> Document:
    """The report.

    Args:
        found: the study.
        top: rows of a table on a terminal.
        stand_in: says so where the shipped model stands in for another.
    """
    origin, pairs = found.to_logits.provenance, found.pairs
    columns = {"base": pairs.base, "source": pairs.source}
    columns |= {"answer": pairs.answers or (), "against": pairs.foils or ()}
    return Document(
        title=f"Indirect objects in {origin.model}",
        origin=origin,
        model=model_text(found.run.view, origin),
        sections=(
            _section("prompts", facts=(*_prompt_facts(found), *_baseline_facts(found))),
            _attribution(found, top),
            _to_logits(found, top),
            _to_queries(found, top),
            _knock_out(found),
            _alone(found),
        ),
        prompts=pandas.DataFrame({name: list(texts) for name, texts in columns.items()}),
        stand_in=stand_in,
    )


def _section(step: str, **parts: Any) -> Section:
    title, says, limits = _WORDS[step]
    return Section(title, says, caveats=(limits,), **parts)


# The sections


def _prompt_facts(found: Study) -> list[tuple[str, Any]]:
    facts: list[tuple[str, Any]] = [
        ("pairs", found.pairs.how.split("\t")),
        ("tokens", token_items(found.run.prompts.token_texts[0])),
    ]
    for row, differences in enumerate(found.differing[:_PAIRS]):
        items = [f"{d.position} {quoted(d.base)} -> {quoted(d.source)}" for d in differences]
        facts.append((f"pair {row}", items))
    if len(found.pairs) > _PAIRS:
        facts.append(("", f"... {len(found.pairs) - _PAIRS} more pairs"))
    return facts


def _baseline_facts(found: Study) -> list[tuple[str, Any]]:
    n, right, first = len(found.pairs), int((found.base > 0).sum()), int(found.is_top.sum())
    return [
        (
            "baseline",
            f"logit difference: base {_mean(found.base)}, source {_mean(found.source)}",
        ),
        (
            "right",
            f"answer above the other name in {right} of {n} ({right / n:.0%}), "
            f"top prediction in {first} of {n} ({first / n:.0%})",
        ),
    ]


def _attribution(found: Study, top: int) -> Section:
    dla = found.attribution
    rows = dla.table()
    table = table_of(dla, rows, top=top)
    is_head = [isinstance(rp.parse(name), Head) for name in table.frame["component"]]
    heads = table.frame.loc[is_head].rename(columns={"component": "head"})
    return _section(
        "attribution",
        facts=(("sum", _sums(dla)),),
        tables=(dataclasses.replace(table, frame=heads, sums=(), what="heads"),),
        grids=grids_of(dla, rows, name="written at END"),
        draws=(drawn("heatmap", dla, title="Direct logit attribution at END"),),
    )


def _sums(dla: rp.Attribution) -> str:
    sums = {"heads": 0.0, "MLPs": 0.0, "embeddings and biases": 0.0}
    frame = dla.table()
    for name, mean in zip(frame["component"], frame["value"], strict=True):
        match rp.parse(name):
            case Head():
                sums["heads"] += mean
            case MLP():
                sums["MLPs"] += mean
            case _:
                sums["embeddings and biases"] += mean
    parts = ", ".join(f"{name} {value:+.4f}" for name, value in sums.items())
    return f"{parts}, together {sum(sums.values()):+.4f} logits"


def _to_logits(found: Study, top: int) -> Section:
    effect, rows = found.to_logits, found.to_logits.table()
    return _section(
        "to logits",
        facts=(
            ("up", _named(effect, found.up)),
            ("down", _named(effect, found.down) or "no head"),
        ),
        tables=(table_of(effect, rows, top=top),),
        grids=grids_of(effect, rows),
        draws=(drawn("heatmap", effect, title="Paths from each head at END to the logits"),),
    )


def _to_queries(found: Study, top: int) -> Section:
    reached = [head for head in found.up if head not in found.unreached]
    columns = {head: found.to_queries.receiver(f"{head}.q") for head in reached}
    facts = [(f"to {head}", _named(e, list(e.top(3)["target"]))) for head, e in columns.items()]
    if found.unreached:
        said = f"no head writes before {', '.join(found.unreached)}"
        facts.insert(0, ("no path", said))
    title = "Paths from each head at END to the query of"
    return _section(
        "to queries",
        facts=tuple(facts),
        tables=tuple(
            dataclasses.replace(
                table_of(effect, effect.table(), top=top), title=f"to {head}.q, {effect.caption}"
            )
            for head, effect in columns.items()
        ),
        grids=tuple(
            grid
            for head, effect in columns.items()
            for grid in grids_of(effect, effect.table(), name=f"total effect on {head}.q")
        ),
        draws=tuple(drawn("heatmap", e, title=f"{title} {head}") for head, e in columns.items()),
    )


def _knock_out(found: Study) -> Section:
    ranked = sorted(found.controls, key=found.left)
    shares = {effect.targets[0]: 100 * found.left(effect) for effect in ranked}
    name, share = found.knocked.targets[0], 100 * found.left(found.knocked)
    others = list(shares.values())
    rows = [("none", found.base, 1.0)]
    named = (("found", found.knocked), ("lowest", ranked[0]), ("highest", ranked[-1]))
    rows += [
        (f"{which}: {effect.targets[0]}", effect.patched[0], found.left(effect))
        for which, effect in named
    ]
    frame = pandas.DataFrame(
        {
            "mean-ablated together": [which for which, _, _ in rows],
            "logit difference": [float(values.double().mean()) for _, values, _ in rows],
            "se": [float(standard_error(values)) for _, values, _ in rows],
            "share": [left for _, _, left in rows],
        }
    )
    summary = (
        f"{len(ranked)} sets of {len(found.up)} other heads: "
        f"mean {_percent(sum(others) / len(others))}, lowest {_percent(others[0])}, "
        f"highest {_percent(others[-1])}"
    )
    known = {f"found: {name}": share, **shares}
    known = {which: left for which, left in known.items() if not math.isnan(left)}
    title = f"Logit difference left, {found.knocked.how}"
    unit = "% of the difference before"
    return _section(
        "knock-out",
        facts=(("found", f"{name}: {_percent(share)} is left"), ("random", summary)),
        tables=(Table(frame, "share: of the difference before, that is left"),),
        draws=(drawn("bars", known, title=title, unit=unit, mark=100.0),) if known else (),
    )


def _alone(found: Study) -> Section:
    effect = found.alone
    table = table_of(effect, effect.table())
    written = found.attribution.table().set_index("component")["value"]
    sent = found.to_logits.table().set_index("target")["value"]
    table.frame.insert(1, "written", [written[head] for head in table.frame["target"]])
    table.frame.insert(2, "path to logits", [sent[head] for head in table.frame["target"]])
    shown = f"effect in {effect.unit}, {effect.how}, at {effect.positions}"
    return _section("alone", facts=(("shown", shown),), tables=(table,))


# Their parts


def _named(effect: rp.Effect, heads: Sequence[str]) -> str:
    """Heads with their mean effects and standard errors."""
    return ", ".join(f"{head} ({_mean(effect.sel(target=head))})" for head in heads)


def _mean(values: Any) -> str:
    """A mean over prompts and its standard error."""
    error = float(standard_error(values))
    mean = number_text("value", float(values.detach().double().mean()))
    return mean if math.isnan(error) else f"{mean} ± {error:.4f}"


def _percent(share: float) -> str:
    return "n/a" if math.isnan(share) else f"{share:.1f}%"
