"""A prompt's own text, each token shaded by a number. Needs no plotly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from resid_patching.markup import escape
from resid_patching.plots.base import FROM_ZERO, RED_TO_BLUE, largest_of
from resid_patching.result import Result

_ABSENT = "#a6a6a6"


@dataclass(frozen=True)
class TokenText:
    """A text as HTML, which a notebook shows.

    Attributes:
        html: the text, everything in it escaped; there is no script.
        tokens: the tokens.
        values: their numbers; None where there is none.
    """

    html: str
    tokens: tuple[str, ...]
    values: tuple[float | None, ...]

    def _repr_html_(self) -> str:
        return self.html


def token_text(result: Result, label: str, *, batch: int = 0) -> TokenText:
    """The text of a prompt, each token shaded by what a result says at its position.

    Blue is above 0 and red below, on a scale around 0; grey is no number. Pointing at a token
    shows its number.

    Args:
        result: at several positions: an `Attribution` with `positions=None`, a lens's `kl` or
            `prob`, or a `StreamReport`.
        label: the row: a component, a layer of the lens, or a write.
        batch: which prompt.

    Raises:
        KeyError: there is no such row.
        ValueError: the result has no positions.
    """
    if [axis.name for axis in result.axes[1:]] != ["batch", "pos"]:
        raise ValueError("a text is shaded by numbers at each position; this result has none")
    result.axes[0].index(label)
    frame: Any = result.to_frame()
    if "token" not in frame:
        raise ValueError("this result does not say which tokens it is of")
    frame = frame[(frame["prompt"] == batch) & (frame.iloc[:, 0] == str(label))].dropna(
        subset=["token"]
    )
    tokens, numbers = frame["token"].tolist(), frame["value"].tolist()
    largest = largest_of(torch.tensor(numbers), result.unit)
    signed = any(number < 0 for number in numbers)
    spans = "".join(
        _span(*cell, largest, signed, result.unit)
        for cell in zip(frame["position"], tokens, numbers, strict=True)
    )
    scale = f"{-largest:.4g} (red) to {largest:.4g} (blue)" if signed else f"0 to {largest:.4g}"
    line = f"{result.provenance.plan}: {label}; {scale}, in {result.unit}; prompt {batch}"
    style = "font-family:monospace;line-height:1.9;white-space:pre-wrap;overflow-wrap:anywhere"
    whole = f"<div><p>{escape(line)}</p><p style='{style}'>{spans}</p></div>"
    shown = tuple(None if math.isnan(number) else number for number in numbers)
    return TokenText(whole, tuple(tokens), shown)


def _span(place: int, token: str, number: float, largest: float, signed: bool, unit: str) -> str:
    if math.isnan(number):
        colour, said = _ABSENT, "no value"
    else:
        share = number / largest
        scale = RED_TO_BLUE if signed else FROM_ZERO
        at = (share + 1) / 2 if signed else share
        colour = scale[round(at * (len(scale) - 1))]
        said = f"{number:+.5g} {unit}"
    title = escape(f'position {place} "{token}": {said}')
    return f'<span title="{title}" style="background:{colour};color:#000000">{escape(token)}</span>'
