"""A lens as one HTML page: token grids shaded by probability, lines by layer, a table.

The grids are HTML, readable without any script; everything from prompts and tokenizers is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from resid_patching.cli.page import Number, Page
from resid_patching.cli.pages import plain
from resid_patching.cli.screen import quoted
from resid_patching.markup import escape

if TYPE_CHECKING:
    from resid_patching.cli.lens_reading import Reading

_MOST_ROWS = 2000
_LIMITS = {
    "logit lens": "A logit lens shows neither beliefs nor causes: the unembedding was trained on "
    "the last state.",
    "tuned lens": "A tuned lens says what can be read linearly from a state, not what causes what.",
}
_Cells = dict[tuple[str, int, int], list[Any]]


def lens_page(
    readings: Sequence[Reading],
    prompts: Sequence[str],
    stand_in: str | None,
    flags: Mapping[str, Any],
) -> Page:
    """The page.

    Args:
        readings: one lens or two, on the same run.
        prompts: the prompts as given.
        stand_in: says so where the shipped model stands in for another.
        flags: what the command was asked.
    """
    from resid_patching import plots

    origin = readings[0].kl.provenance
    names = " and ".join(reading.name for reading in readings)
    page = Page(f"{names[:1].upper()}{names[1:]}, {origin.model}", stand_in)
    page.says(
        "In each cell what the model would say next if it stopped there, shaded by its "
        "probability; pointing at a cell shows more. The last row is the model's own output."
    )
    for reading in readings:
        page.says(_LIMITS[reading.name], "limits")
    cells = [_cells(reading) for reading in readings]
    for number, prompt in enumerate(prompts):
        page.heading(f"Prompt {number}" if len(prompts) > 1 else "Prompt")
        page.says(prompt, "text")
        for reading, found in zip(readings, cells, strict=True):
            caption = f"<figcaption>{escape(reading.name)}, probability</figcaption>"
            page.raw(f'<figure class="whole">{caption}')
            page.raw(_grid(reading, found, number) + "</figure>")
    page.heading("By layer")
    readouts = [reading.readout for reading in readings]
    page.draw_main = lambda: plots.trajectory(*readouts)
    page.picture(lambda: plots.lens_by_layer(*readouts))
    page.picture(lambda: plots.lens_by_layer(*readouts, quantity="entropy"))
    page.heading("Cells")
    _table(page, readings, cells)
    page.origin(origin, flags)
    return page


def _cells(reading: Reading) -> _Cells:
    """The most probable tokens of each (layer, prompt, position), largest first."""
    found: _Cells = {}
    rows: Any = reading.top.to_frame().dropna(subset=["value"]).itertuples()
    for row in rows:
        found.setdefault((row.layer, row.batch, row.pos), []).append(row)
    return found


def _table(page: Page, readings: Sequence[Reading], cells: Sequence[_Cells]) -> None:
    rows: list[list[object]] = []
    order = {label: n for n, label in enumerate(readings[0].labels)}
    for reading, found in zip(readings, cells, strict=True):
        for (label, prompt, position), top in found.items():
            where = {"layer": label, "batch": prompt, "pos": position}
            row: list[object] = [reading.name, Number(order[label], label)]
            row += [Number(prompt, str(prompt)), Number(position, str(position))]
            row += [quoted(top[0].token), quoted(top[0].top_token)]
            row.append(Number(top[0].value, f"{top[0].value:.2%}"))
            row.append(plain(reading.entropy.sel(**where), 3))
            row.append(plain(reading.kl.sel(**where), 3))
            rows.append(row)
    n = len(rows)
    left = f" The first {_MOST_ROWS} of {n} cells; --csv writes all." if n > _MOST_ROWS else ""
    columns = ("lens", "layer", "prompt", "position", "after", "says", "probability")
    page.table(
        (*columns, "entropy", "KL"),
        rows[:_MOST_ROWS],
        caption=f"Entropy and KL(final || lens) in nats.{left}",
        left=(0, 1, 4, 5),
    )


def _grid(reading: Reading, cells: _Cells, prompt: int) -> str:
    tokens = reading.readout.run.prompts.token_texts[prompt]
    head = "".join(
        f'<th scope="col">{n}<br>{escape(quoted(text))}</th>' for n, text in enumerate(tokens)
    )
    lines = [f"<thead><tr><th></th>{head}</tr></thead><tbody>"]
    for label in reading.labels:
        found = [
            _cell(reading, cells.get((label, prompt, position), []), label, prompt, position)
            for position in range(len(tokens))
        ]
        lines.append(f'<tr><th scope="row">{escape(label)}</th>{"".join(found)}</tr>')
    return f'<div class="scroll grid"><table>{"".join(lines)}</tbody></table></div>'


def _cell(reading: Reading, top: list[Any], label: str, prompt: int, position: int) -> str:
    if not top:
        return "<td></td>"
    first = top[0]
    where = {"layer": label, "batch": prompt, "pos": position}
    said = [f"{quoted(row.top_token)} {row.value:.2%}" for row in top]
    said.append(f"entropy {float(reading.entropy.sel(**where)):.3f} nats")
    said.append(f"KL(final || lens) {float(reading.kl.sel(**where)):.3f} nats")
    for scored in reading.scored:
        rank, share = float(scored.rank.sel(**where)), float(scored.prob.sel(**where))
        if not math.isnan(rank):
            said.append(f"{_what(scored, prompt)}: rank {rank:.0f}, {share:.2%}")
    red, green, blue = (round(255 - first.value * (255 - full)) for full in (8, 81, 156))
    ink = "#fff" if first.value > 0.55 else "#222"
    shown = "&#10;".join(map(escape, said))
    return (
        f'<td title="{shown}" '
        f'style="background:rgb({red},{green},{blue});color:{ink}">'
        f"{escape(quoted(first.top_token))}<small>{first.value:.1%}</small></td>"
    )


def _what(scored: Any, prompt: int) -> str:
    return "the final top token" if scored.texts is None else quoted(scored.texts[prompt])
