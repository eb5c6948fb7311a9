"""What every picture shares: colours, titles, texts shown as they are, a place on the page."""

from __future__ import annotations

import html
import importlib
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from resid_patching.errors import MissingExtraError
from resid_patching.markup import printable
from resid_patching.result import Axis, Result

# ColorBrewer's RdBu, which the colour-blind tell apart: red below 0, blue above.
RED_TO_BLUE = (
    "#67001f #b2182b #d6604d #f4a582 #fddbc7 #f7f7f7 #d1e5f0 #92c5de #4393c3 #2166ac #053061"
).split()
NEGATIVE, POSITIVE, ABSENT, INK = "#b2182b", "#2166ac", "#bdbdbd", "#525252"
# ColorBrewer's Blues and Oranges, from 0 up.
BLUES = ("#f7fbff #deebf7 #c6dbef #9ecae1 #6baed6 #4292c6 #2171b5 #08519c #08306b").split()
ORANGES = ("#fff5eb #fee6ce #fdd0a2 #fdae6b #fd8d3c #f16913 #d94801 #a63603 #7f2704").split()
# Okabe and Ito's colours, for lines and bars that stand beside each other.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#000000")
CHARACTER = 6.6  # pixels, about
_LINE_HEIGHT = 20


def require_plotly() -> Any:
    """The module `plotly.graph_objects`.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    try:
        return importlib.import_module("plotly.graph_objects")
    except ImportError as error:
        raise MissingExtraError(
            "pictures are drawn with plotly, which is not installed; "
            "pip install 'resid-patching[plots]'"
        ) from error


def lay_out(
    figure: Any,
    heading: Sequence[str],
    *,
    width: int,
    inside: int,
    below: int = 55,
    above: int = 0,
    least: int = 360,
    **layout: Any,
) -> None:
    """Gives a figure its size, its title and its own template.

    Args:
        figure: is changed.
        heading: the title's first line, then what stands below it in small print.
        width: of the whole, in pixels.
        inside: height of what is drawn, in pixels.
        below: height of what stands below it.
        above: height of what stands between it and the title.
        least: the width below which its labels would run together; a page scrolls it instead.
        layout: anything else.
    """
    title, top = _title(heading, width)
    figure.update_layout(
        template="plotly_white",
        title=title,
        width=width,
        height=top + above + inside + below,
        margin={"l": 50, "r": 30, "t": top + above, "b": below},
        meta={"heading": list(heading), "title_height": top, "least": least},
        **layout,
    )


def _title(heading: Sequence[str], width: int) -> tuple[dict[str, Any], int]:
    """A title wrapped to the figure's width, and the height that it needs."""
    first, *below = heading
    lines = [literal(line) for line in textwrap.wrap(first, int(width / 8.2))]
    small = [
        f"<span style='font-size:12px'>{literal(line)}</span>"
        for text in below
        for line in textwrap.wrap(text, int(width / CHARACTER))
    ]
    text = "<br>".join([*lines, *small])
    title = {"text": text, "x": 0.01, "xanchor": "left", "y": 1, "yanchor": "top"}
    several = len(lines) + len(small) > 1  # plotly puts the first of several a line higher
    title |= {"pad": {"t": 22 if several else 10}, "font": {"size": 15}}
    return title, 30 + _LINE_HEIGHT * (len(lines) + len(small))


def heading_of(first: str, unit: str, *details: str) -> list[str]:
    """A title: what is shown, then its unit and whatever else must be known."""
    return [first[:1].upper() + first[1:], "; ".join([f"in {unit}", *details])]


def over_prompts(result: Result) -> str:
    """What a mean over prompts was taken over."""
    n = result.provenance.n_prompts
    return f"mean over {n} prompts" if n > 1 else "one prompt"


def bar_size(height: int) -> dict[str, Any]:
    """A colour bar no longer than one grid, in pixels, and no longer than the eye needs."""
    return {"lenmode": "pixels", "len": max(100, min(300, height + 20)), "y": 1, "yanchor": "top"}


def scale_of(colours: Sequence[str]) -> list[list[Any]]:
    """Colours at even steps, as plotly takes them."""
    return [[i / (len(colours) - 1), colour] for i, colour in enumerate(colours)]


def mean(values: Tensor) -> Tensor:
    """Mean over prompts [..., batch] -> [...]."""
    return values.detach().cpu().double().mean(-1)


def names(axis: Axis) -> list[str]:
    """An axis's labels as plotly shows them."""
    return [literal(str(label)) for label in axis.labels]


def literal(text: str) -> str:
    """Text that plotly shows as it is; control characters become escapes.

    Plotly reads some tags, entities, `%{names}`, and TeX between dollar signs where a notebook has
    MathJax.
    """
    escaped = html.escape(printable(text), quote=False)
    return escaped.replace("$", "&#36;").replace("%{", "&#37;{")


def quoted(text: str, longest: int | None = None) -> str:
    """A token in quotes, cut where it is long, as plotly shows it."""
    text = printable(text)
    if longest is not None and len(text) > longest:
        text = text[: longest - 1] + "…"
    return literal(f'"{text}"')


def listed(values: Any) -> Any:
    """Nested lists of numbers, None where there is none."""
    if isinstance(values, list):
        return [listed(value) for value in values]
    return None if math.isnan(values) else values


def short(numbers: Sequence[float], *, more: int = 0) -> str:
    """A format that leaves the largest number two or three digits, and `more`."""
    largest = max(map(abs, numbers), default=0.0)
    if 0 < largest < 1e-3:
        return f".{more}e"
    limits = (100.0, 10.0, 1.0, 0.1)
    return f".{more + sum(largest < limit for limit in limits)}f"


def plotly_script() -> str:
    """The text of plotly.js as it ships with plotly, for a page of its own.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    require_plotly()
    return importlib.import_module("plotly.offline").get_plotlyjs()
