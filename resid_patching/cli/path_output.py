"""How patched paths are printed: prompts and where they differ, effects, and how to read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resid_patching.cli.effects import (
    by_size,
    print_cells,
    print_crossed,
    signed,
    spreads,
    target_text,
    unit_text,
    unsigned,
)
from resid_patching.cli.screen import bar, fancy, new_table, print_line, print_model, quoted
from resid_patching.markup import printable

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from resid_patching.ablation import Effect
    from resid_patching.models import ModelView
    from resid_patching.prompt_sets import Difference, PromptPairs
    from resid_patching.prompts import Prompts

_ROWS, _TOKENS = 4, 60  # pairs and tokens that are shown


@dataclass(frozen=True, eq=False)
class Found:
    """What a command found, and what it knows of it.

    Attributes:
        effect: the effects.
        pairs: the prompts as texts.
        sources: the texts that other values come from; None for zero.
        prompts: the base prompts as tokens.
        where: the sender's positions, in words.
        differing: where base and source differ, for each pair; None where none is resampled.
        linearised: effects with the receivers' norms frozen, shaped as the effect's values.
        swept: whether the senders are all heads, one at a time.
        using: zero, mean or resample.
        mlps: freeze or recompute.
        source: the metric in the source [batch].
        recovery: shares of the way from base to source, [target] or [target, receiver].
        small_gap: whether base and source are too close for shares to mean much.
    """

    effect: Effect
    pairs: PromptPairs
    sources: Sequence[str] | None
    prompts: Prompts
    where: str
    differing: list[list[Difference]] | None
    linearised: Tensor | None
    swept: bool
    using: str
    mlps: str
    source: Tensor | None = None
    recovery: Tensor | None = None
    small_gap: bool = False

    @property
    def mark(self) -> str:
        """What stands where no path leads from sender to receiver."""
        return "\N{MIDDLE DOT}" if fancy() else "."


def print_found(
    out: Console, view: ModelView, found: Found, stand_in: str | None, *, top: int
) -> None:
    """Prints prompts, direction, baselines, the effects, and how to read them.

    Args:
        out: where.
        view: the model.
        found: what was found.
        stand_in: says so where the shipped model stands in for another.
        top: rows shown.
    """
    print_model(out, view, found.effect.provenance, stand_in)
    out.print()
    _print_pairs(out, found)
    out.print()
    _print_question(out, found)
    out.print()
    print_line(out, "path", *_done(found).split("\t"), gap=" ")
    print_line(out, "shown", unit_text(found.effect))
    if found.effect.receivers:
        _print_edges(out, found, top)
        _print_senders_by_receivers(out, found, top)
    else:
        _print_senders(out, found, top)
        if found.swept:
            _print_heads(out, found)
    out.print()
    _print_reading(out, found)


# Before the numbers


def _print_pairs(out: Console, found: Found) -> None:
    print_line(out, "pairs", *printable(found.pairs.how).split("\t"))
    texts = found.prompts.token_texts[0]
    items = [f"{position} {quoted(text)}" for position, text in enumerate(texts[:_TOKENS])]
    if len(texts) > _TOKENS:
        items.append(f"... {len(texts) - _TOKENS} more tokens")
    print_line(out, "base", *items)
    if found.differing is None:
        return
    many = len(found.differing) > 1
    for row, differences in enumerate(found.differing[:_ROWS]):
        items = [
            f"{position} {quoted(base)} -> {quoted(source)}"
            for position, base, source in differences[:_TOKENS]
        ]
        if len(differences) > _TOKENS:
            items.append(f"... {len(differences) - _TOKENS} more tokens")
        name = [f"pair {row}:"] if many else []
        print_line(out, "" if row else "differs", *name, *(items or ["nowhere: its own source"]))
    if len(found.differing) > _ROWS:
        print_line(out, "", f"... {len(found.differing) - _ROWS} more pairs")


def _print_question(out: Console, found: Found) -> None:
    effect = found.effect
    replaced = {
        "zero": "by what it is with the sender at zero,",
        "mean": "by what it is with the sender at its mean over the source prompts,",
        "resample": "by what it is with the sender at its value in source,",
    }[found.using]
    print_line(
        out,
        "change",
        "base runs;",
        "only the sender's message to the receiver is replaced,",
        replaced,
        f"at {found.where}",
        gap=" ",
    )
    mlps = {
        "recompute": "recompute: MLPs between sender and receiver answer the change;",
        "freeze": "freeze: MLPs between sender and receiver keep their values;",
    }[found.mlps]
    print_line(out, "mlps", mlps, "other heads keep theirs", gap=" ")
    base = float(effect.mean(effect.baseline))
    items = [f"{_metric_text(effect)}:", f"base {base:+.4f} {effect.unit}"]
    if found.source is not None:
        source = float(found.source.cpu().double().mean())
        items.append(f"source {source:+.4f}")
        items.append(f"source - base {source - base:+.4f}")
    if effect.baseline.shape[0] > 1:
        items.append(f"({effect.averaged})")
    print_line(out, "baseline", *items)


def _metric_text(effect: Effect) -> str:
    each = "(one a prompt) - (one a prompt)"
    return printable(effect.metric.replace(each, "of each prompt's answer - foil"))


def _done(found: Found) -> str:
    """What was done, with tabs where the line may be broken."""
    joint = ", senders together" if found.effect.joint else ""
    how = printable(found.effect.how.removeprefix("path "))
    return f"{how}{joint}, at {found.where}".replace(", ", ",\t")


# The numbers


def _shares(found: Found) -> Tensor | None:
    """Shares of the gap, where it is large enough to be shared."""
    return None if found.small_gap else found.recovery


def _share(value: Any) -> str:
    text = "n/a" if bool(value.isnan()) else f"{100 * float(value):+.1f}%"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text


def _print_senders(out: Console, found: Found, top: int) -> None:
    effect = found.effect
    total, direct = effect.mean(effect.total), effect.mean(effect.direct)
    columns = {"total": [signed(value) for value in total]}
    if effect.baseline.shape[0] > 1:
        columns["sd"] = [unsigned(value) for value in spreads(effect)]
    if not _ends_at_logits(effect):
        columns["direct"] = [signed(value) for value in direct]
        columns["indirect"] = [signed(value) for value in total - direct]
    shares = _shares(found)
    if shares is not None:
        columns["recovery"] = [_share(value) for value in shares]
    if found.linearised is not None:
        columns["linearised"] = [signed(v) for v in effect.mean(found.linearised)]
    order = by_size(total)
    shown = order[:top] or list(range(len(effect.targets)))[:top]
    table = new_table("sender", *columns, "")
    for number in shown:
        cells = [column[number] for column in columns.values()]
        table.add_row(target_text(effect.targets[number]), *cells, _bar(total[number], total))
    out.print(table)
    _print_left_out(out, len(order) - top, "senders", len(order))
    if n_without := len(effect.targets) - len(order):
        out.print(f"{n_without} of {len(effect.targets)} senders have no path to the receiver: n/a")


def _bar(value: Any, values: Tensor) -> str:
    """A bar, none where the numbers all read as 0."""
    largest = float(values.nan_to_num().abs().max())
    return bar(float(value.nan_to_num()), largest if largest >= 5e-5 else 0.0, 10)


def _print_left_out(out: Console, n: int, what: str, n_all: int) -> None:
    if n > 0:
        out.print(f"and {n} more {what} (--top {n_all} shows all)")


def _ends_at_logits(effect: Effect) -> bool:
    return effect.how.startswith("path to logits,")


def _print_heads(out: Console, found: Found) -> None:
    """Layer x head of totals of the heads that were swept."""
    means = found.effect.mean(found.effect.grid().values)
    out.print()
    legend = _legend(found) if bool(means.isnan().any()) else ""
    out.print(f"total effect in {found.effect.unit}, layer by head{legend}")
    rows = [f"{layer:>4}" for layer in range(means.shape[0])]
    print_cells(out, means, rows, missing=found.mark, heat=True)


def _legend(found: Found) -> str:
    """The mark's meaning."""
    return f" ({found.mark} no path: it writes too late)"


def _print_edges(out: Console, found: Found, top: int) -> None:
    """The strongest paths of all."""
    effect = found.effect
    total, direct = effect.mean(effect.total), effect.mean(effect.direct)
    shares = _shares(found)
    linearised = None if found.linearised is None else effect.mean(found.linearised)
    order = by_size(total.flatten())
    names = ["total", "direct", "indirect"]
    names += ["recovery"] * (shares is not None) + ["linearised"] * (linearised is not None)
    table = new_table("path", *names, "")
    for place in order[:top]:
        cell = divmod(place, len(effect.receivers))
        cells = [signed(total[cell]), signed(direct[cell]), signed(total[cell] - direct[cell])]
        if shares is not None:
            cells.append(_share(shares[cell]))
        if linearised is not None:
            cells.append(signed(linearised[cell]))
        name = f"{target_text(effect.targets[cell[0]])} -> {printable(effect.receivers[cell[1]])}"
        table.add_row(name, *cells, _bar(total[cell], total))
    out.print(table)
    _print_left_out(out, len(order) - top, "paths", len(order))


def _print_senders_by_receivers(out: Console, found: Found, top: int) -> None:
    if bool(found.effect.total.isnan().all()):
        out.print("no sender writes before a receiver reads: there is no path")
        return
    print_crossed(
        *(out, found.effect, "sender", top),
        missing=found.mark,
        legend=_legend(found),
        left_out="weaker or without a path",
    )


# After the numbers


def _print_reading(out: Console, found: Found) -> None:
    effect = found.effect
    if _ends_at_logits(effect):
        out.print("total: the logits with the path replaced; nothing follows, so direct = total.")
    else:
        out.print(
            "total: the receiver changed, all behind it run again; direct: later writes frozen; "
            "indirect: the rest."
        )
    if _shares(found) is not None:
        out.print("recovery: total / (source - base); 100% makes the base prompts as the source's.")
    elif found.small_gap:
        out.print("recovery is not shown: base and source nearly agree, so read the raw effects.")
    if found.linearised is not None:
        out.print("linearised: with the receiver's norm frozen, an approximation of the total.")
    out.print(f"Sign: {_sign(found)}.")
    if found.using == "resample":
        out.print("Direction: source into base. The other way round is another experiment.")


def _sign(found: Found) -> str:
    if found.effect.metric.startswith(("KL", "change")):
        return "effects run from 0 up, and say how far the prediction moves"
    other = {
        "zero": "without the message",
        "mean": "with the mean message",
        "resample": "with the source's message",
    }[found.using]
    return f"negative: {other} the metric is lower, so in base the sender raises it"
