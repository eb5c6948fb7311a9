"""HTML pages that load nothing from elsewhere and show, not run, what prompts hold.

    page = Page("Attribution in gpt2")
    page.facts([("answer", " Mary")])
    page.picture(lambda: plots.heatmap(found))
    page.table(("row", "logits"), rows)
    page.origin(found.provenance, flags)
    page.html()

One page is one file: its style, its script and plotly are in it. The browser is told to run these
two scripts and no other, and to load nothing. Without plotly there are tables and no pictures.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from resid_patching.cli.frame import require_writable
from resid_patching.cli.page_assets import SCRIPT, STYLE
from resid_patching.errors import MissingExtraError
from resid_patching.markup import escape

_LONG = 25  # rows; longer tables scroll in a box
_WORDS = 40  # characters; longer texts are broken into lines
_NOT_ASKED = ("json", "csv", "html", "png", "debug", "stand_in")


def require_files(arguments: Namespace) -> None:
    """Refuses output files that cannot be written or drawn, before anything is computed.

    Raises:
        UsageError: a file cannot be written.
        MissingExtraError: a PNG is asked for and nothing can draw one.
    """
    rows = getattr(arguments, "rows", None)
    require_writable(arguments.json, arguments.csv, arguments.html, arguments.png, rows)
    if arguments.png is not None:
        from resid_patching.plots import require_renderer

        require_renderer()


def write_page(arguments: Namespace, build: Callable[[], Page]) -> None:
    """Writes the page and its first picture, where they were asked for.

    Args:
        arguments: the flags --html and --png.
        build: makes the page.
    """
    if arguments.html is None and arguments.png is None:
        return
    from resid_patching.files import write_bytes, write_text

    page = build()
    image = b"" if arguments.png is None else page.png()
    if arguments.html is not None:
        write_text(arguments.html, page.html())
    if arguments.png is not None:
        write_bytes(arguments.png, image)


def asked(arguments: Namespace) -> dict[str, Any]:
    """The flags that say what was computed."""
    return {name: value for name, value in vars(arguments).items() if name not in _NOT_ASKED}


@dataclasses.dataclass(frozen=True)
class Number:
    """A number in a table: how it is shown, and what it is sorted by.

    Attributes:
        value: NaN or None where there is none; those come last in any order.
        text: how it is shown.
    """

    value: float | int | None
    text: str


class Page:
    """A page, part by part.

    Attributes:
        title: as plain text.
        figures: the pictures so far.
        draw_main: draws what a PNG shows; None for the first picture.
        why_no_picture: what kept the last picture from being drawn.
    """

    def __init__(self, title: str, stand_in: str | None = None) -> None:
        """Begins a page; `stand_in` says so where the shipped model stands in for another."""
        self.title = title
        self.figures: list[Any] = []
        self.draw_main: Callable[[], Any] | None = None
        self.why_no_picture: str | None = None
        self._body = [f"<h1>{escape(title)}</h1>"]
        self._asked_for_plotly = False
        if stand_in is not None:
            self._body.append(f'<p class="note">{escape(stand_in)}</p>')

    def heading(self, text: str) -> None:
        """A heading of the second level."""
        self._body.append(f"<h2>{escape(text)}</h2>")

    def says(self, text: str, kind: str = "") -> None:
        """A paragraph; `kind` is "", limits, note or text."""
        self._body.append(f'<p class="{kind}">{escape(text)}</p>')

    def raw(self, markup: str) -> None:
        """HTML that is escaped already."""
        self._body.append(markup)

    def facts(self, rows: Iterable[tuple[str, object]]) -> None:
        """Names and what they are, one a line."""
        self._body.append(_facts(rows))

    def picture(self, draw: Callable[[], Any]) -> None:
        """A plotly figure, drawn by the page's own script.

        Where plotly is missing a line says so, once; where there is nothing to draw, why.
        """
        try:
            figure = draw()
        except MissingExtraError as error:
            self.why_no_picture = str(error)
            if not self._asked_for_plotly:
                self._asked_for_plotly = True
                self.says(f"There are no pictures here: {error}", "note")
            return
        except ValueError as error:
            self.why_no_picture = str(error)
            self.says(f"No picture: {error}", "limits")
            return
        self._body.append(_picture(figure, len(self.figures)))
        self.figures.append(figure)

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        *,
        caption: str = "",
        left: Sequence[int] = (0,),
    ) -> None:
        """A table that a click or a key on a column's name sorts.

        Args:
            columns: their names.
            rows: a cell for each column: text, or a `Number`.
            caption: the line above.
            left: the columns of texts, which stand to the left.
        """
        self._body.append(_table(columns, rows, caption, set(left)))

    def folded(self, summary: str, rows: Iterable[tuple[str, object]]) -> None:
        """Facts that are shown when asked for."""
        self._body.append(f"<details><summary>{escape(summary)}</summary>{_facts(rows)}</details>")

    def origin(self, origin: Any, flags: Mapping[str, Any]) -> None:
        """Where the numbers come from, folded: a provenance, and what was asked."""
        rows = list(dataclasses.asdict(origin).items())
        rows += [
            (name.replace("_", "-"), value) for name, value in flags.items() if value is not None
        ]
        self.folded("Where the numbers come from", rows)

    def png(self) -> bytes:
        """The main picture as a PNG.

        Raises:
            MissingExtraError: there is no picture, or nothing can draw it.
        """
        from resid_patching import plots

        if self.draw_main is not None:
            return plots.png(self.draw_main())
        if not self.figures:
            raise MissingExtraError(self.why_no_picture or "there is no picture to draw")
        return plots.png(self.figures[0])

    def html(self) -> str:
        """The whole page."""
        scripts = [_plotly_script()] if self.figures else []
        scripts.append(SCRIPT)
        hashes = " ".join(f"'{_hash(script)}'" for script in scripts)
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
                *(f"<script>{script}</script>" for script in scripts),
                "</body></html>\n",
            ]
        )


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _plotly_script() -> str:
    from resid_patching.plots import plotly_script

    return plotly_script()


def _facts(rows: Iterable[tuple[str, object]]) -> str:
    lines = "\n".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in rows
    )
    return f'<table class="facts"><tbody>{lines}</tbody></table>'


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


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], caption: str, left: set[int]
) -> str:
    def side(column: int) -> str:
        return "left" if column in left else "number"

    head = "".join(
        f'<th scope="col" class="{side(n)}"><button type="button">{escape(name)}</button></th>'
        for n, name in enumerate(columns)
    )
    lines = "\n".join(
        "<tr>" + "".join(_cell(cell, side(n)) for n, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    above = f"<p>{escape(caption)}</p>" if caption else ""
    kind = "scroll long" if len(rows) > _LONG else "scroll"
    return (
        f'{above}<div class="{kind}" tabindex="0"><table class="sortable"><thead><tr>{head}</tr>'
        f"</thead><tbody>\n{lines}</tbody></table></div>"
    )


def _cell(cell: object, side: str) -> str:
    if not isinstance(cell, Number):
        text = escape(cell)
        return f'<td class="{side}{" words" * (len(text) > _WORDS)}">{text}</td>'
    known = cell.value is not None and math.isfinite(cell.value)
    value = repr(float(cell.value)) if known and cell.value is not None else ""
    return f'<td class="{side}" data-value="{value}">{escape(cell.text)}</td>'
