"""A lens as one HTML page: token grids shaded by probability, nothing loaded from elsewhere.

There is no script in it. Everything that comes from prompts and tokenizers is escaped, and the
browser is told to refuse whatever would come from a network.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from resid_patching.cli.frame import quoted
from resid_patching.cli.page import escape
from resid_patching.cli.page import page as html_page

if TYPE_CHECKING:
    from resid_patching.cli.lens_reading import Reading

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; margin: 1.5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 2px; }
th { font-weight: 600; text-align: left; white-space: pre; padding: .1rem .4rem; }
th:first-child { position: sticky; left: 0; background: #fff; }
td { padding: .15rem .4rem; white-space: pre; min-width: 3.5rem; }
td small { display: block; opacity: .75; }
.limits, .prompt { color: #555; }
details { margin-top: 1.5rem; }
"""
_LIMITS = {
    "logit lens": "A logit lens shows neither beliefs nor causes: the unembedding was trained on "
    "the last state.",
    "tuned lens": "A tuned lens says what can be read linearly from a state, not what causes what.",
}


def page(readings: Sequence[Reading], prompts: Sequence[str], stand_in: str | None) -> str:
    """The page.

    Args:
        readings: one lens or two, on the same run.
        prompts: the prompts as given.
        stand_in: says so where the shipped model stands in for another.
    """
    origin = readings[0].kl.provenance
    title = f"{' and '.join(reading.name for reading in readings)}, {origin.model}"
    body = [f"<h1>{escape(title)}</h1>"]
    if stand_in is not None:
        body.append(f"<p>{escape(stand_in)}</p>")
    body.append(
        "<p>In each cell what the model would say next if it stopped there, shaded by its "
        "probability; pointing at a cell shows more. The last row is the model's own output.</p>"
    )
    cells = [_cells(reading) for reading in readings]
    for number, prompt in enumerate(prompts):
        body.append(f'<p class="prompt">{escape(prompt)}</p>')
        for reading, found in zip(readings, cells, strict=True):
            body.append(f"<h2>{escape(reading.name)}</h2>")
            body.append(_grid(reading, found, number))
    body += [f'<p class="limits">{_LIMITS[reading.name]}</p>' for reading in readings]
    lines = json.dumps(asdict(origin), indent=1, ensure_ascii=False).split("\n")
    about = "\n".join(map(escape, lines))
    body.append(f"<details><summary>Where it comes from</summary><pre>{about}</pre></details>")
    return html_page(title, body, style=_STYLE, policy=_POLICY)


def _cells(reading: Reading) -> dict[tuple[str, int, int], list[Any]]:
    """The most probable tokens of each (layer, prompt, position), largest first."""
    found: dict[tuple[str, int, int], list[Any]] = {}
    rows: Any = reading.top.to_frame().dropna(subset=["value"]).itertuples()
    for row in rows:
        found.setdefault((row.layer, row.batch, row.pos), []).append(row)
    return found


def _grid(reading: Reading, cells: dict[tuple[str, int, int], list[Any]], prompt: int) -> str:
    tokens = reading.readout.run.prompts.token_texts[prompt]
    head = "".join(f"<th>{n}<br>{escape(quoted(text))}</th>" for n, text in enumerate(tokens))
    lines = [f"<tr><th></th>{head}</tr>"]
    for label in reversed(reading.labels):
        found = [
            _cell(reading, cells.get((label, prompt, position), []), label, prompt, position)
            for position in range(len(tokens))
        ]
        lines.append(f"<tr><th>{escape(label)}</th>{''.join(found)}</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


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
