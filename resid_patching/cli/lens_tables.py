"""How lenses are printed: top tokens by layer and position, one position in depth, two lenses."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resid_patching.cli.effects import rich_text
from resid_patching.cli.screen import new_table, print_line, quoted, shades

if TYPE_CHECKING:
    from rich.console import Console

    from resid_patching.cli.lens_reading import Reading, Scored
    from resid_patching.run import Run

PROMPTS_SHOWN = 4
_WIDEST = 16  # characters of a token in a cell


@dataclass(frozen=True)
class _Cell:
    text: str
    share: float = 0.0  # how dark it is on a terminal, 0 to 1


def print_notes(out: Console, *, logit: bool, tuned: bool) -> None:
    """Prints what the lenses that were read are not."""
    out.print()
    out.print("The norm is recomputed at each layer; the last row is the model's own output.")
    if logit:
        out.print(
            "A logit lens shows neither beliefs nor causes: the unembedding was trained on the "
            "last state."
        )
    if tuned:
        out.print("A tuned lens says what can be read linearly from a state, not what causes what.")


# A table of all positions


def print_grid(out: Console, reading: Reading, number: int, first: int | None) -> None:
    """Prints the top token of one prompt by layer and position, and ranks of tokens asked for.

    Args:
        out: where.
        reading: what the lens reads.
        number: which prompt.
        first: the first position shown; None for as many of the last as fit.
    """
    shaded = shades(out)
    length = len(reading.top.token_texts[number])
    columns = [_top_column(reading, number, place, shaded) for place in range(length)]
    cells = [list(row) for row in zip(*columns, strict=True)]
    out.print()
    how = "darker where more probable" if shaded else "with its probability"
    out.print(f"{reading.name}: top token by layer, for what follows each position, {how}")
    _print_cells(out, reading, number, cells, first)
    for scored in reading.scored:
        if scored.texts is None:
            continue
        ranks = [
            [_rank_cell(scored, row, number, place) for place in range(length)]
            for row in range(len(reading.labels))
        ]
        out.print()
        what = shown(scored.texts[number])
        out.print(f"{reading.name}: rank of {what}, from 0")
        _print_cells(out, reading, number, ranks, first)


def _top_column(reading: Reading, number: int, place: int, shaded: bool) -> list[_Cell]:
    from rich.cells import cell_len, set_cell_size

    names = dict(reading.top.texts)
    texts = [clipped(names[token]) for token in reading.top.ids[:, number, place, 0].tolist()]
    probs = reading.top.values[:, number, place, 0].tolist()
    if not shaded:
        width = max(map(cell_len, texts))
        texts = [
            f"{set_cell_size(text, width)} {prob:>4.0%}"
            for text, prob in zip(texts, probs, strict=True)
        ]
    return [_Cell(text, prob) for text, prob in zip(texts, probs, strict=True)]


def _rank_cell(scored: Scored, row: int, number: int, place: int) -> _Cell:
    rank = int(scored.rank.values[row, number, place])
    return _Cell(str(rank), float(scored.prob.values[row, number, place]))


def _print_cells(
    out: Console, reading: Reading, number: int, cells: list[list[_Cell]], first: int | None
) -> None:
    from rich.cells import cell_len

    tokens = [clipped(text) for text in reading.top.token_texts[number]]
    widths = [
        max(cell_len(text) for text in (str(place), tokens[place], *column))
        for place, column in enumerate(zip(*([c.text for c in row] for row in cells), strict=True))
    ]
    left = max(map(len, reading.labels)) + 1
    places = _that_fit(widths, out.width - left, first)
    for heads in (list(map(str, range(len(tokens)))), tokens):
        _print_row(out, "", left, [_Cell(heads[p]) for p in places], [widths[p] for p in places])
    for label, row in zip(reading.labels, cells, strict=True):
        _print_row(out, label, left, [row[p] for p in places], [widths[p] for p in places])
    _print_hidden(out, places, len(tokens))


def _that_fit(widths: list[int], room: int, first: int | None) -> range:
    """The positions that fit beside each other: from the first one, or up to the last."""
    order = range(len(widths) - 1, -1, -1) if first is None else range(first, len(widths))
    taken = 0
    for place in order:
        room -= widths[place] + 1
        if room < -1 and taken:
            break
        taken += 1
    kept = order[:taken]
    return range(min(kept), max(kept) + 1)


def _print_row(out: Console, label: str, left: int, cells: list[_Cell], widths: list[int]) -> None:
    from rich.cells import set_cell_size

    shaded = shades(out) and label
    line = rich_text(f"{label:<{left}}")
    for number, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        line.append(" " if number else "")
        line.append(set_cell_size(cell.text, width), _shade(cell.share) if shaded else "")
    line.rstrip()
    out.print(line, soft_wrap=True)


def _shade(share: float) -> str:
    """White for 0 to dark blue for 1."""
    red, green, blue = (round(247 + share * (part - 247)) for part in (33, 102, 172))
    return f"{'white' if share > 0.55 else 'black'} on rgb({red},{green},{blue})"


def _print_hidden(out: Console, places: range, n_positions: int) -> None:
    hidden = [_span(0, places.start), _span(places.stop, n_positions)]
    if said := " and ".join(filter(None, hidden)):
        out.print(
            f"({said} not shown; --from P begins the table at P, --csv writes all)",
            soft_wrap=True,
        )


def _span(start: int, stop: int) -> str:
    if start >= stop:
        return ""
    return f"position {start}" if stop == start + 1 else f"positions {start} to {stop - 1}"


# One position


def print_depth(out: Console, reading: Reading, number: int, place: int) -> None:
    """Prints every layer at one position: entropy, KL, followed tokens, top tokens."""
    heads = [
        "layer",
        "entropy",
        "KL",
        *(_followed(reading, s, number, place) for s in reading.scored),
    ]
    table = new_table(*heads, "top tokens")
    table.columns[-1].justify = "left"
    rows = [_depth_cells(reading, row, number, place) for row in range(len(reading.labels))]
    used = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    room = out.width - sum(width + 3 for width in used)
    for row, cells in enumerate(rows):
        table.add_row(*cells, _packed(_tops(reading, row, number, place), room))
    out.print()
    out.print(
        f"{reading.name} {_at(reading, number, place)}; entropy and KL(final || lens) in nats,"
    )
    out.print("below a token its rank (0 is the top) and probability")
    out.print(table)


def _depth_cells(reading: Reading, row: int, number: int, place: int) -> list[str]:
    cells = [reading.labels[row]]
    for result in (reading.entropy, reading.kl):
        cells.append(f"{float(result.values[row, number, place]):.3f}")
    for scored in reading.scored:
        rank = int(scored.rank.values[row, number, place])
        prob = float(scored.prob.values[row, number, place])
        cells.append(f"{rank} {percent(prob):>6}")
    return cells


def _followed(reading: Reading, scored: Scored, number: int, place: int) -> str:
    """The token that is followed in one prompt, at one position."""
    if scored.texts is not None:
        return clipped(scored.texts[number])
    token = int(reading.top.ids[-1, number, place, 0])
    return f"{clipped(dict(reading.top.texts)[token])} (final)"


def _at(reading: Reading, number: int, place: int) -> str:
    texts = reading.top.token_texts[number]
    several = f" of prompt {number}" if len(reading.top.token_texts) > 1 else ""
    return f"after position {place}{several}, {shown(texts[place])}"


def _tops(reading: Reading, row: int, number: int, place: int) -> list[str]:
    names = dict(reading.top.texts)
    ids = reading.top.ids[row, number, place].tolist()
    probs = reading.top.values[row, number, place].tolist()
    return [f"{clipped(names[i])} {percent(p)}" for i, p in zip(ids, probs, strict=True)]


def _packed(items: Sequence[str], room: int) -> str:
    """Items on as many lines as the room needs."""
    from rich.cells import cell_len

    lines = [items[0]]
    for item in items[1:]:
        longer = f"{lines[-1]}  {item}"
        if cell_len(longer) > room:
            lines.append(item)
        else:
            lines[-1] = longer
    return "\n".join(lines)


# Two lenses


def print_comparison(out: Console, left: Reading, right: Reading, number: int, place: int) -> None:
    """Prints two lenses side by side at one position."""
    heads = ["layer"]
    for reading in (left, right):
        heads += [f"{reading.name.split()[0]} KL", "rank", reading.name]
    table = new_table(*heads)
    room = (out.width - 12 - 2 * (8 + 6) - 3 * 6) // 2
    for row, label in enumerate(left.labels):
        cells = [label]
        for reading in (left, right):
            cells.append(f"{float(reading.kl.values[row, number, place]):.3f}")
            cells.append(str(int(reading.scored[0].rank.values[row, number, place])))
            cells.append(_packed(_tops(reading, row, number, place), room))
        table.add_row(*cells)
    table.columns[3].justify = table.columns[6].justify = "left"
    out.print()
    followed = _followed(left, left.scored[0], number, place)
    out.print(f"{_at(left, number, place)}; KL(final || lens) in nats; rank of {followed}, from 0")
    out.print(table)


def print_kl(
    out: Console, title: str, labels: Sequence[str], columns: dict[str, list[float]]
) -> None:
    """Prints KL by layer, with the means last.

    Args:
        out: where.
        title: the line above.
        labels: the layers.
        columns: a number for each layer; `logit lens` and `tuned` give the ratio.
    """
    columns = {name: [*values, sum(values) / len(values)] for name, values in columns.items()}
    texts = {name: [f"{value:.4f}" for value in values] for name, values in columns.items()}
    plain, tuned = columns["logit lens"], columns["tuned"]
    ratios = [f"{t / p:.1%}" if p else "" for t, p in zip(tuned, plain, strict=True)]
    after = list(texts).index("tuned") + 1
    names = [*list(texts)[:after], "tuned / logit", *list(texts)[after:]]
    texts["tuned / logit"] = ratios
    table = new_table("layer", *names)
    for row, label in enumerate([*labels, "mean"]):
        table.add_row(label, *(texts[name][row] for name in names))
    out.print()
    out.print(title)
    out.print(table)
    below = [t < p for t, p in zip(tuned, plain, strict=True)][: len(labels)]
    out.print(f"The tuned lens is below the logit lens at {sum(below)} of {len(labels)} layers.")


# Text


def percent(prob: float) -> str:
    """A probability; small ones as powers of ten."""
    return f"{prob:.1%}" if prob >= 0.001 or prob == 0 else f"{prob:.0e}"


def shown(text: str) -> str:
    """A token in quotes, with what the output cannot show as escapes."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    return quoted(text.encode(encoding, "backslashreplace").decode(encoding))


def clipped(text: str) -> str:
    """A token in quotes, cut where it is long."""
    from rich.cells import cell_len, set_cell_size

    whole = shown(text)
    if cell_len(whole) <= _WIDEST:
        return whole
    return set_cell_size(whole, _WIDEST - 4).rstrip() + '..."'


def print_prompts_left(out: Console, run: Run) -> None:
    """Prints how many prompts are not shown."""
    if len(run) > PROMPTS_SHOWN:
        out.print()
        out.print(f"... and {len(run) - PROMPTS_SHOWN} more prompts; --csv and --json write all")


def print_prompt(out: Console, run: Run, number: int) -> None:
    """Prints one prompt's tokens with their positions, at most sixty."""
    texts = run.prompts.token_texts[number]
    items = [f"{place} {shown(text)}" for place, text in enumerate(texts[:60])]
    if len(texts) > 60:
        items.append(f"... {len(texts) - 60} more tokens")
    print_line(out, f"tokens {number}" if len(run) > 1 else "tokens", *items)
