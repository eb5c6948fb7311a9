"""A report as one HTML page that loads nothing, and that runs no code of what it shows.

    page = Page("Attribution in gpt2")
    page.section(section(found))
    page.origin(found.provenance, flags)
    page.html()

One page is one file, with its style, its script and plotly in it. It tells the browser to run these
two scripts and no others, and to load nothing. Without plotly it has tables and no pictures.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from resid_patching.errors import MissingExtraError
from resid_patching.markup import cell_text, escape
from resid_patching.show.assets import SCRIPT, STYLE
from resid_patching.show.report import Document, Facts, GridCell, Section, Table, TextGrid

if TYPE_CHECKING:
    import pandas

_LONG = 25  # rows; longer tables scroll in a box
_MOST_ROWS = 2000
_LONG_TEXT = 40  # characters; longer texts are broken into lines


def page_of(report: Document, flags: Mapping[str, Any]) -> Page:
    """The page of a report.

    Args:
        report: what is shown.
        flags: what the command was asked.
    """
    page = Page(report.title, report.stand_in, main=report.main)
    prompts = report.prompts
    for part in report.sections:
        if part.on != "text":
            page.section(part, prompts)
            prompts = None  # they stand in the first section
    page.origin(report.origin, flags)
    return page


class Page:
    """A page, part by part.

    Attributes:
        title: as plain text.
        figures: the pictures so far.
        main: draws what a PNG shows; None for the first picture.
        why_no_picture: why the last picture could not be drawn.
    """

    def __init__(
        self,
        title: str,
        stand_in: str | None = None,
        *,
        main: Callable[[], Any] | None = None,
    ) -> None:
        """Begins a page; `stand_in` says so where the shipped model stands in for another."""
        self.title = title
        self.main = main
        self.figures: list[Any] = []
        self.why_no_picture: str | None = None
        self._lacks_plotly = False
        self._body = [f"<h1>{escape(title)}</h1>"]
        if stand_in is not None:
            self.says(stand_in, "note")

    def section(self, part: Section, prompts: pandas.DataFrame | None = None) -> None:
        """Facts, caveats, prompts, grids, pictures and tables, in this order."""
        if part.title:
            self._body.append(f"<h2>{escape(part.title)}</h2>")
        if part.says:
            self.says(part.says)
        self._body.append(_facts_table(part.facts))
        for line in part.caveats:
            self.says(line, "limits")
        if prompts is not None and prompts.shape == (1, 1):
            self.says(str(prompts.iloc[0, 0]), "text")
        elif prompts is not None:
            self.table(Table(prompts, title=f"{len(prompts)} prompt{'s' * (len(prompts) > 1)}"))
        for grid in part.grids:
            if grid.on != "text":
                self._body.append(_shaded_grid(grid))
        for draw in part.draws:
            self.picture(draw)
        for table in part.tables:
            if table.on != "text":
                self.table(table)

    def says(self, text: str, kind: str = "") -> None:
        """A paragraph; `kind` is "", limits, note or text."""
        self._body.append(f'<p class="{kind}">{escape(text)}</p>')

    def picture(self, draw: Callable[[], Any]) -> None:
        """A plotly figure, drawn by the page's own script.

        Where plotly is missing, one line on the page says so. Where there is nothing to draw, a
        line says why.
        """
        try:
            figure = draw()
        except MissingExtraError as error:
            self.why_no_picture = str(error)
            if not self._lacks_plotly:
                self._lacks_plotly = True
                self.says(f"There are no pictures here: {error}", "note")
        except ValueError as error:
            self.says(f"No picture: {error}", "limits")
            self.why_no_picture = str(error)
        else:
            self._body.append(_picture(figure, len(self.figures)))
            self.figures.append(figure)

    def table(self, table: Table) -> None:
        """A table that a click or a key on a column's name sorts."""
        left = len(table.frame) - _MOST_ROWS
        said = [table.title]
        if left > 0:
            said.append(f"The first {_MOST_ROWS} of {len(table.frame)} rows; --csv writes all.")
        said += table.after
        caption = " ".join(text.rstrip(".") + "." for text in said if text)
        self._body.append(_sortable_table(table.frame.iloc[:_MOST_ROWS], caption))

    def origin(self, origin: Any, flags: Mapping[str, Any]) -> None:
        """Where the numbers come from, folded: a provenance, and what was asked."""
        rows = [(name, str(value)) for name, value in dataclasses.asdict(origin).items()]
        rows += [(n.replace("_", "-"), str(v)) for n, v in flags.items() if v is not None]
        self._body.append(
            f"<details><summary>Where the numbers come from</summary>{_facts_table(rows)}</details>"
        )

    def png(self) -> bytes:
        """The main picture as a PNG.

        Raises:
            MissingExtraError: there is no picture, or nothing can draw it.
        """
        from resid_patching import plots

        if self.main is not None:
            return plots.png(self.main())
        if not self.figures:
            raise MissingExtraError(self.why_no_picture or "there is no picture to draw")
        return plots.png(self.figures[0])

    def html(self) -> str:
        """The whole page."""
        scripts, templates = [SCRIPT], ""
        if self.figures:
            from resid_patching.plots import plotly_script, template

            scripts.insert(0, plotly_script())
            both = json.dumps({"light": template(), "dark": template(dark=True)})
            templates = f'<script type="application/json" id="templates">{both}</script>'
        hashes = " ".join(f"'{_script_hash(script)}'" for script in scripts)
        policy = (
            f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
            "img-src data: blob:"
        )
        return "\n".join(
            [
                "<!DOCTYPE html>",
                '<html lang="en"><head><meta charset="utf-8">',
                f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                f"<title>{escape(self.title)}</title><style>{STYLE}</style></head><body>",
                *self._body,
                templates,
                *(f"<script>{script}</script>" for script in scripts),
                "</body></html>\n",
            ]
        )


def _script_hash(script: str) -> str:
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _facts_table(rows: Facts | Iterable[tuple[str, str]]) -> str:
    lines = "\n".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{_items(value)}</td></tr>'
        for name, value in rows
    )
    return f'<table class="facts"><tbody>{lines}</tbody></table>' if lines else ""


def _items(value: str | Sequence[str]) -> str:
    if isinstance(value, str):
        return escape(value)
    return " ".join(f"<span>{escape(item)}</span>" for item in value)


def _picture(figure: Any, number: int) -> str:
    first, *below = figure.layout.meta["heading"]
    small = "".join(f"<small>{escape(line)}</small>" for line in below)
    body = figure.to_json().replace("<", "\\u003c")
    width = figure.layout.width
    return (
        f'<figure style="width:min(100%,{width}px)"><figcaption>'
        f"{escape(first)}{small}</figcaption>"
        f'<div class="picture" tabindex="0" role="img" aria-label="{escape(first)}">'
        f'<div id="picture-{number}"></div>'
        f'<script type="application/json">{body}</script></div></figure>'
    )


def _sortable_table(frame: pandas.DataFrame, caption: str) -> str:
    names = [str(name) for name in frame.columns]
    left = [n == 0 or frame.dtypes.iloc[n].kind not in "fiu" for n in range(len(names))]
    sides = ["left" if is_left else "number" for is_left in left]
    head = "".join(
        f'<th scope="col" class="{side}"><button type="button">{escape(name)}</button></th>'
        for name, side in zip(names, sides, strict=True)
    )
    lines = "\n".join(
        f"<tr>{''.join(map(_table_cell, names, row, sides))}</tr>"
        for row in frame.itertuples(index=False)
    )
    above = f"<p>{escape(caption)}</p>" if caption else ""
    kind = "scroll long" if len(frame) > _LONG else "scroll"
    return (
        f'{above}<div class="{kind}" tabindex="0"><table class="sortable"><thead><tr>{head}</tr>'
        f"</thead><tbody>\n{lines}</tbody></table></div>"
    )


def _table_cell(name: str, value: Any, side: str) -> str:
    text = escape(cell_text(name, value))
    if not isinstance(value, int | float):
        return f'<td class="{side}{" words" * (len(text) > _LONG_TEXT)}">{text}</td>'
    number = repr(float(value)) if math.isfinite(value) else ""
    return f'<td class="{side}" data-value="{number}">{text}</td>'


def _shaded_grid(grid: TextGrid) -> str:
    """Cells shaded by their probability; a hint shows more. It needs no script.

    The style sheet mixes the colours, because they depend on the page's theme.
    """
    head = "".join(f'<th scope="col">{"<br>".join(map(escape, c))}</th>' for c in grid.columns)
    lines = [f"<thead><tr><th></th>{head}</tr></thead><tbody>"]
    for name, row in zip(grid.rows, grid.cells, strict=True):
        cells = "".join(map(_shaded, row))
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    return (
        f'<figure class="whole"><figcaption>{escape(grid.title)}</figcaption>'
        f'<div class="scroll grid"><table>{"".join(lines)}</tbody></table></div></figure>'
    )


def _shaded(cell: GridCell | None) -> str:
    if cell is None:
        return "<td></td>"
    hint = "&#10;".join(map(escape, cell.hint.split("\n")))
    return (
        f'<td title="{hint}" style="--shade:{cell.shade:.1%}">'
        f"{escape(cell.text)}<small>{cell.shade:.1%}</small></td>"
    )


def texts_frame(columns: Mapping[str, Sequence[str] | None]) -> pandas.DataFrame:
    """Prompts and what is scored after each, a row each; columns of None are left out."""
    import pandas

    return pandas.DataFrame({name: list(v) for name, v in columns.items() if v is not None})
