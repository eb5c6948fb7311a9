"""What every picture shares: colours, titles, texts shown as they are, a place on the page."""

from __future__ import annotations

import html
import importlib
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from resid_patching.errors import MissingExtraError
from resid_patching.markup import printable, quoted
from resid_patching.result import Result

# Red below 0 and blue above, which the colour-blind tell apart. No colour of the light scale is too
# dark for black numbers, and none of the dark scale too bright for white ones (4.5:1 and more).
RED_TO_BLUE = "#d6604d #f4a582 #fddbc7 #ffffff #d1e5f0 #92c5de #4393c3".split()
FROM_ZERO = "#ffffff #deebf7 #c6dbef #9ecae1 #6baed6 #4292c6".split()
DARK_RED_TO_BLUE = "#b2182b #7a1a24 #46191d #1f1f1f #172c42 #1a4874 #2166ac".split()
DARK_FROM_ZERO = "#1f1f1f #17293c #173655 #1a4874 #1d5790 #2166ac".split()
# Bars, lines and nodes: 3:1 and more on a white and on a dark page.
NEGATIVE, POSITIVE, INK = "#d6604d", "#4393c3", "#808080"
SERIES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#808080"]  # Okabe and Ito's
FLOOR = {"probability": 1e-3}  # what a scale reaches at least, in the unit
_FLOOR = 1e-2  # of logits, nats and the rest
CHARACTER = 6.6  # pixels, about


def template(*, dark: bool = False) -> dict[str, Any]:
    """The template of every figure: its look, and all colours that differ on a dark page.

    With `figure.layout.template = template(dark=True)` it is the figure for a dark page.
    """
    ink, paper, lines = (
        ("#e4e4e4", "#16181c", "#3a3f47") if dark else ("#222222", "#ffffff", "#e5e5e5")
    )
    signed, unsigned = (DARK_RED_TO_BLUE, DARK_FROM_ZERO) if dark else (RED_TO_BLUE, FROM_ZERO)
    axis = {"gridcolor": lines, "zerolinecolor": INK, "linecolor": lines, "ticks": ""}
    bar = {"thickness": 12, "lenmode": "pixels", "y": 1, "yanchor": "top"}
    legend = {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0, "traceorder": "normal"}
    numbers = {"size": 10, "color": "#ffffff" if dark else "#000000"}
    cells = {"textfont": numbers, "hoverongaps": False, "xgap": 1, "ygap": 1}
    errors = {"color": INK, "thickness": 1.5, "width": 3}
    return {
        "layout": {
            "font": {"color": ink, "family": "system-ui, sans-serif"},
            "paper_bgcolor": paper,
            "plot_bgcolor": paper,
            "colorscale": {"diverging": _steps(signed), "sequential": _steps(unsigned)},
            "coloraxis": {"autocolorscale": True, "colorbar": bar},
            "xaxis": {**axis, "automargin": True},
            "yaxis": {**axis, "automargin": True},
            "legend": legend,
            "hoverlabel": {"align": "left"},
            "title": {"x": 0.01, "xanchor": "left", "y": 1, "yanchor": "top", "font": {"size": 15}},
        },
        "data": {
            "heatmap": [cells],
            "bar": [{"error_x": errors, "error_y": errors}],
            "scatter": [{"cliponaxis": False, "textfont": {"size": 11}, "error_y": errors}],
        },
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
    legend: bool = False,
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
        legend: whether lines or bars are named above them.
        layout: anything else.
    """
    above += 26 if legend else 0
    first, *small = heading
    lines = [literal(line) for line in textwrap.wrap(first, int(width / 8.2))]
    for text in small:
        for line in textwrap.wrap(text, int(width / CHARACTER)):
            lines.append(f"<span style='font-size:12px'>{literal(line)}</span>")
    top = 30 + 20 * len(lines)
    figure.layout.template = template()  # assigned, for an update would keep the caller's theme
    figure.update_layout(
        # Plotly puts the first of several lines a line higher.
        title={"text": "<br>".join(lines), "pad": {"t": 22 if len(lines) > 1 else 10}},
        width=width,
        height=top + above + inside + below,
        margin={"l": 50, "r": 30, "t": top + above, "b": below},
        meta={"heading": list(heading), "title_height": top, "least": least},
        showlegend=legend,
        legend_title_text="",
        **layout,
    )


def heading_of(first: str, unit: str, *details: str) -> list[str]:
    """A title: what is shown, then its unit and whatever else must be known."""
    return [first[:1].upper() + first[1:], "; ".join([f"in {unit}", *details])]


def under(result: Result) -> tuple[str, ...]:
    """The intervention of the run that was read, for a title; nothing for a plain run."""
    text = result.provenance.intervention
    return (f"under {text}",) if text else ()


def at_token(position: str | int, tokens: Iterable[str]) -> str:
    """A position with its token, where all prompts have the same there: `position 3, " day"`."""
    where = f"position {position}" if isinstance(position, int) else "one position a prompt"
    there = set(tokens)
    return f"{where}, {quoted(there.pop())}" if len(there) == 1 else where


def largest_of(values: Tensor, unit: str) -> float:
    """Where a scale ends: the largest size, or the floor of the unit, so that noise stays pale."""
    sizes = values.nan_to_num().abs().flatten().tolist()
    return max([FLOOR.get(unit, _FLOOR), *sizes])


def why_empty(values: Tensor, unit: str) -> str | None:
    """Why a panel beside others would be empty: no number, or none above 1/100 of the floor."""
    if bool(values.isnan().all()):
        return "no value"
    limit = FLOOR.get(unit, _FLOOR) / 100
    return f"below {limit:g} everywhere" if float(values.nan_to_num().abs().max()) < limit else None


def sign_colours(numbers: Iterable[float]) -> list[str]:
    """Blue for what is above 0, red for what is below."""
    return [POSITIVE if number >= 0 else NEGATIVE for number in numbers]


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


def clipped(text: object, most: int) -> str:
    """A name as plotly shows it, cut where it is long; it says how many targets it is of."""
    text = str(text)
    if len(text) <= most:
        return literal(text)
    several = f" ({n})" if (n := text.count(" + ") + 1) > 1 else ""
    return literal(f"{text[: most - 1 - len(several)]}…{several}")
