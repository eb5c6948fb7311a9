"""The study's report as one HTML page: tables and pictures, with nothing loaded from elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ioi_report import Section, Table

from resid_patching import plots
from resid_patching.cli.page import escape
from resid_patching.cli.page import page as html_page

if TYPE_CHECKING:
    from ioi_study import Study

# The browser itself refuses whatever would come from a network; plotly builds functions as it runs.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:"
)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto;
       padding: 0 1rem; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
.limits { color: #555; }
.facts td { text-align: left; font-variant-numeric: tabular-nums; }
.picture, .scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .15rem .8rem .15rem 0; text-align: right; vertical-align: top;
         font-variant-numeric: tabular-nums; }
th { border-bottom: 1px solid #888; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
.texts td { text-align: left; white-space: normal; }
"""


def page(
    found: Study, sections: list[Section], stand_in: str | None, flags: Mapping[str, Any]
) -> str:
    """The whole page.

    Args:
        found: the study.
        sections: its report.
        stand_in: says so where the shipped model stands in for another.
        flags: what the command was asked.
    """
    origin = found.to_logits.provenance
    title = f"Indirect objects in {origin.model}"
    figures = _figures(sections)
    body = [f"<h1>{escape(title)}</h1>"]
    if stand_in is not None:
        body.append(f"<p>{escape(stand_in)}</p>")
    for number, section in enumerate(sections, start=1):
        body.append(_section(number, section, figures[number - 1]))
    body += [_texts(found), _provenance(found, flags)]
    return html_page(title, body, style=_STYLE, policy=_POLICY)


# Pictures


def _figures(sections: list[Section]) -> list[list[str]]:
    """Each section's pictures as HTML; the first of all brings plotly with it."""
    numbers = iter(range(1_000))
    return [[_embed(figure, next(numbers)) for figure in _drawn(section)] for section in sections]


def _drawn(section: Section) -> Iterator[Any]:
    for grid in section.grids:
        yield plots.heatmap(grid.result, title=grid.title)
    if section.bars is not None:
        drawn = section.bars
        known = {name: value for name, value in drawn.values.items() if value == value}
        if known:
            yield plots.bars(known, title=drawn.title, unit=drawn.unit, mark=drawn.mark)


def _embed(figure: Any, number: int) -> str:
    drawn = figure.to_html(
        full_html=False,
        include_plotlyjs=number == 0,
        div_id=f"picture-{number}",
        config={"displaylogo": False},
    )
    return f'<div class="picture">{drawn}</div>'


# Text


def _section(number: int, section: Section, figures: list[str]) -> str:
    facts = Table(("", ""), [(name, " ".join(items)) for name, items in section.facts])
    return "\n".join(
        [
            f"<section><h2>{number}. {escape(section.title)}</h2>",
            f'<p>{escape(section.says)}</p><p class="limits">{escape(section.limits)}</p>',
            _table(facts, "facts"),
            *(_table(table, "") for table in section.tables),
            *figures,
            "</section>",
        ]
    )


def _table(table: Table, kind: str) -> str:
    def row(tag: str, cells: Any) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    head = row("th", table.columns) if any(table.columns) else ""
    rows = "\n".join(row("td", cells) for cells in table.rows)
    return f'<div class="scroll"><table class="{kind}">{head}\n{rows}</table></div>'


def _texts(found: Study) -> str:
    pairs = found.pairs
    answers, foils = pairs.answers or (), pairs.foils or ()
    rows = list(zip(pairs.base, pairs.source, answers, foils, strict=True))
    table = _table(Table(("base", "source", "answer", "against"), rows), "texts")
    return f"<details><summary>All {len(pairs)} pairs of prompts</summary>{table}</details>"


def _provenance(found: Study, flags: Mapping[str, Any]) -> str:
    origin = dataclasses.asdict(found.to_logits.provenance)
    origin |= {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
    rows = [(name, str(value)) for name, value in origin.items()]
    table = _table(Table(("", ""), rows), "facts")
    return f"<details><summary>Where the numbers come from</summary>{table}</details>"
