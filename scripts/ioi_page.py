"""The study's report as one HTML page: tables and pictures, with nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ioi_report import Section, Table
from resid_patching.cli.page import Number, Page

from resid_patching import plots

if TYPE_CHECKING:
    from ioi_study import Study


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
    page = Page(f"Indirect objects in {origin.model}", stand_in)
    for number, section in enumerate(sections, start=1):
        _section(page, number, section)
    page.heading(f"All {len(found.pairs)} pairs of prompts")
    _texts(page, found)
    page.origin(origin, {f"--{name.replace('_', '-')}": value for name, value in flags.items()})
    return page.html()


def _section(page: Page, number: int, section: Section) -> None:
    page.heading(f"{number}. {section.title}")
    page.says(section.says)
    page.says(section.limits, "limits")
    page.facts([(name, " ".join(items)) for name, items in section.facts])
    for table in section.tables:
        _table(page, table)
    for draw in _pictures(section):
        page.picture(draw)


def _pictures(section: Section) -> Iterator[Any]:
    for grid in section.grids:
        yield lambda grid=grid: plots.heatmap(grid.result, title=grid.title)
    if section.bars is not None:
        drawn = section.bars
        known = {name: value for name, value in drawn.values.items() if value == value}
        if known:
            yield lambda: plots.bars(known, title=drawn.title, unit=drawn.unit, mark=drawn.mark)


def _table(page: Page, table: Table) -> None:
    columns = table.columns if any(table.columns) else [""] * len(table.rows[0])
    page.table(columns, [(row[0], *map(_number, row[1:])) for row in table.rows])


def _number(text: str) -> Number | str:
    """A text that begins with a number, sorted by it."""
    try:
        return Number(float(text.split()[0].rstrip("%")), text)
    except (ValueError, IndexError):
        return text


def _texts(page: Page, found: Study) -> None:
    pairs = found.pairs
    answers, foils = pairs.answers or (), pairs.foils or ()
    rows = list(zip(pairs.base, pairs.source, answers, foils, strict=True))
    page.table(("base", "source", "answer", "against"), rows, left=(0, 1, 2, 3))
