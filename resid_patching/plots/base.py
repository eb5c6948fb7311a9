"""What every picture shares: colours, titles, texts shown as they are, a place on the page."""

from __future__ import annotations

import html
import importlib
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from resid_patching.errors import MissingExtraError
from resid_patching.markup import printable
from resid_patching.markup import quoted as plain_quoted
from resid_patching.result import Result

# Red below 0 and blue above, which the colour-blind tell apart. No colour of the light scale is too
# dark for black numbers, and none of the dark scale too bright for white ones (4.5:1 and more).
RED_TO_BLUE = "#d6604d #f4a582 #fddbc7 #ffffff #d1e5f0 #92c5de #4393c3".split()
FROM_ZERO = "#ffffff #deebf7 #c6dbef #9ecae1 #6baed6 #4292c6".split()
DARK_RED_TO_BLUE = "#b2182b #7a1a24 #46191d #1f1f1f #172c42 #1a4874 #2166ac".split()
DARK_FROM_ZERO = "#1f1f1f #17293c #173655 #1a4874 #1d5790 #2166ac".split()
# Bars, lines and nodes: 3:1 and more on a white and on a dark page.
NEGATIVE, POSITIVE, ABSENT, INK = "#d6604d", "#4393c3", "#8c8c8c", "#808080"
SERIES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#808080"]  # Okabe and Ito's
FLOOR = {"probability": 1e-3}  # what a scale reaches at least, in the unit
_FLOOR = 1e-2  # of logits, nats and the rest
CHARACTER = 6.6  # pixels, about
LEGEND = {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0, "title": {"text": ""}}
LEGEND_HEIGHT = 26
_LINE_HEIGHT = 20


def template(*, dark: bool = False) -> dict[str, Any]:
    """The template of every figure: all colours that differ between a white and a dark page.

    With `figure.layout.template = template(dark=True)` it is the figure for a dark page.
    """
    ink, paper, lines = (
        ("#e4e4e4", "#16181c", "#3a3f47") if dark else ("#222222", "#ffffff", "#e5e5e5")
    )
    signed, unsigned = (DARK_RED_TO_BLUE, DARK_FROM_ZERO) if dark else (RED_TO_BLUE, FROM_ZERO)
    axis = {"gridcolor": lines, "zerolinecolor": INK, "linecolor": lines, "ticks": ""}
    return {
        "layout": {
            "font": {"color": ink, "family": "system-ui, sans-serif"},
            "paper_bgcolor": paper,
            "plot_bgcolor": paper,
            "colorscale": {"diverging": _steps(signed), "sequential": _steps(unsigned)},
            "xaxis": axis,
            "yaxis": axis,
            "hoverlabel": {"align": "left"},
        },
        "data": {"heatmap": [{"textfont": {"color": "#ffffff" if dark else "#000000"}}]},
    }


def _steps(colours: Sequence[str]) -> list[list[Any]]:
    """Colours at even steps, as plotly takes them."""
    return [[i / (len(colours) - 1), colour] for i, colour in enumerate(colours)]


def require_plotly() -> Any:
    """The module `plotly.express`.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    try:
        importlib.import_module("plotly.graph_objects")
        return importlib.import_module("plotly.express")
    except ImportError as error:
        raise MissingExtraError(
            "pictures are drawn with plotly, which is not installed; "
            "pip install 'resid-patching[plots]'"
        ) from error


def plotly_script() -> str:
    """The text of plotly.js as it ships with plotly, for a page of its own.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    require_plotly()
    return importlib.import_module("plotly.offline").get_plotlyjs()


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
    figure.layout.template = template()  # assigned, for an update would keep the caller's theme
    figure.update_layout(
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
    return [first[:1].upper() + first[1:], "; ".join([f"in {unit}", *filter(None, details)])]


def over_prompts(result: Result) -> str:
    """What a mean over prompts was taken over."""
    n = result.provenance.n_prompts
    return f"mean over {n} prompts" if n > 1 else "one prompt"


def at_token(position: str | int, tokens: Iterable[str]) -> str:
    """A position with its token, where all prompts have the same there: `position 3, " day"`."""
    where = position if isinstance(position, str) else f"position {position}"
    there = set(tokens)
    return f"{where}, {plain_quoted(there.pop())}" if len(there) == 1 else where


def largest_of(values: Iterable[Tensor], unit: str) -> float:
    """Where a scale ends: the largest size, or the floor of the unit, so that noise stays pale."""
    sizes = [float(value.nan_to_num().abs().max()) for value in values if value.numel()]
    return max([FLOOR.get(unit, _FLOOR), *sizes])


def why_empty(values: Tensor, unit: str) -> str | None:
    """Why a panel beside others would be empty: no number, or none above 1/100 of the floor."""
    if bool(values.isnan().all()):
        return "no value"
    limit = FLOOR.get(unit, _FLOOR) / 100
    return f"below {limit:g} everywhere" if float(values.nan_to_num().abs().max()) < limit else None


def mean(values: Tensor) -> Tensor:
    """Mean over prompts [..., batch] -> [...]."""
    return values.detach().cpu().double().mean(-1)


def short(numbers: Iterable[float], *, more: int = 0) -> str:
    """A format that leaves the largest number two or three digits, and `more`."""
    largest = max(map(abs, numbers), default=0.0)
    if 0 < largest < 1e-3:
        return f".{more}e"
    limits = (100.0, 10.0, 1.0, 0.1)
    return f".{more + sum(largest < limit for limit in limits)}f"


def literal(text: object) -> str:
    """Text that plotly shows as it is; control characters become escapes.

    Plotly reads some tags, entities, `%{names}`, and TeX between dollar signs where a notebook has
    MathJax.
    """
    escaped = html.escape(printable(str(text)), quote=False)
    return escaped.replace("$", "&#36;").replace("%{", "&#37;{")


def clipped(text: str, most: int) -> str:
    """A name, cut where it is long; of several targets together it says how many there are."""
    if len(text) <= most:
        return text
    n = text.count(" + ") + 1
    return f"{text[: most - 6]} … ({n})" if n > 1 else f"{text[: most - 1]}…"
