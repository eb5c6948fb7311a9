"""How a number or a text is written, wherever it is shown; and small pieces of HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

# Columns that are not written with a sign and four decimals.
_NUMBER_FORMATS = {
    **dict.fromkeys(("se", "se cosine", "se logit", "se tuned"), "{:.4f}"),
    **dict.fromkeys(("logit lens", "ridge", "tuned"), "{:.4f}"),
    **dict.fromkeys(("stored logit", "stored ridge", "stored tuned"), "{:.4f}"),
    **dict.fromkeys(("norm", "stream after", "se norm", "se stream"), "{:.3f}"),
    **dict.fromkeys(("entropy", "KL", "logit KL", "tuned KL"), "{:.3f}"),
    **dict.fromkeys(("share", "se share", "tuned / logit"), "{:.1%}"),
    "probability": "{:.2%}",
    "nats": "{:.4f}",
    "weight": "{:.3f}",
    "tokens": "{:.1f}",
    "recovery": "{:+.1%}",
    "ratio": "×{}",
    "perplexity": "{}",
}
_TOKEN_COLUMNS = ("token", "token there", "answer", "against", "says", "base token", "source token")


def number_text(column: str, value: float) -> str:
    """A number as it is shown in a column of a table, n/a for NaN."""
    if math.isnan(value):
        return "n/a"
    form = _NUMBER_FORMATS.get(column, "{:+.4f}")
    if "{}" in form:  # a positive number in four digits or more
        return form.format(f"{value:,.0f}" if value >= 1000 else f"{value:.4g}")
    text = form.format(value)
    return text[1:] if text in ("+0.0%", "-0.0%") else text


def cell_text(column: str, value: Any) -> str:
    """What a cell of a data frame shows: a float by its column, anything else as text."""
    if isinstance(value, float):
        return number_text(column, value)
    if isinstance(value, tuple):
        return "  ".join(map(str, value))
    if column in _TOKEN_COLUMNS and isinstance(value, str):
        return quoted(value)
    return "" if value is None or type(value).__name__ == "NAType" else str(value)


def quoted(text: str) -> str:
    """A token in quotes, so that its leading space is seen."""
    return f'"{printable(text)}"'


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
