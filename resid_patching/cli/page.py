"""HTML pages that load nothing from elsewhere and show, not run, what prompts hold."""

from __future__ import annotations

import html
from collections.abc import Sequence

from resid_patching.cli.frame import printable


def page(title: str, body: Sequence[str], *, style: str, policy: str) -> str:
    """A whole page.

    Args:
        title: as plain text.
        body: the HTML of its body, line by line.
        style: its style sheet.
        policy: what the browser may load and run, as a Content-Security-Policy.
    """
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{style}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )


def escape(text: object) -> str:
    """Text as HTML shows it, with control characters as escapes."""
    return html.escape(printable(str(text)))
