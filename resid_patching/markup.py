"""Small pieces of HTML: text shown and never run, and tables, for notebooks and pages."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def printable(text: str) -> str:
    """Text with control characters, line ends and unprintable characters as escapes."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def escape(text: object) -> str:
    """Text as HTML shows it, with control characters as escapes."""
    return html.escape(printable(str(text)))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], note: str = "") -> str:
    """A plain table of texts, all of them escaped, with a line above it.

    Args:
        columns: the names above.
        rows: a cell for each column.
        note: the line; none where empty.
    """
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    above = f"<p>{escape(note)}</p>" if note else ""
    return f"<div>{above}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
