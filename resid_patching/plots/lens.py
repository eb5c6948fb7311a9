"""Pictures of lenses: the token that each state would say, and numbers by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from resid_patching.lens.readout import LensReadout
from resid_patching.lens.results import LensResult, TopTokens
from resid_patching.plots.bars import lines_by_depth
from resid_patching.plots.base import (
    ABSENT,
    BLUES,
    CHARACTER,
    ORANGES,
    bar_size,
    heading_of,
    lay_out,
    listed,
    literal,
    quoted,
    require_plotly,
    scale_of,
)

if TYPE_CHECKING:
    import plotly.graph_objects

Shade: TypeAlias = Literal["probability", "kl", "entropy"]

_LONGEST = 11  # characters of a token in a cell
_UNITS = {"probability": "probability", "kl": "nats", "entropy": "nats"}
_WORDS = {
    "probability": "probability of that token",
    "kl": "KL(final || lens)",
    "entropy": "entropy",
}


def trajectory(
    readout: LensReadout | TopTokens,
    beside: LensReadout | None = None,
    *,
    batch: int = 0,
    shade: Shade = "probability",
    top: int = 10,
) -> plotly.graph_objects.Figure:
    """The most probable token of each layer and position, one lens alone or two side by side.

    Hovering shows the most probable tokens, entropy and KL. The last row is the model's own
    output.

    Args:
        readout: a lens on a run, or its `top_tokens(k)`.
        beside: another lens on the same run, such as the tuned beside the logit lens.
        batch: which prompt.
        shade: what the colour says.
        top: how many tokens hovering shows.

    Returns:
        A figure with a trace for each lens: the numbers of `shade`, tokens as text.

    Raises:
        MissingExtraError: plotly is not installed.
        ValueError: no such shade, or one that `top_tokens` alone does not hold.
    """
    go = require_plotly()
    if shade not in _UNITS:
        raise ValueError(f"shade is 'probability', 'kl' or 'entropy', got {shade!r}")
    lenses = [readout] if beside is None else [readout, beside]
    found = [_measured(lens, top) for lens in lenses]
    if shade not in found[0]:
        raise ValueError(f"{shade} is not among top tokens; give the readout itself")
    from plotly.subplots import make_subplots

    tops: list[Any] = [measured["probability"] for measured in found]
    titles = [_lens_name(measured) for measured in tops]
    tokens = tops[0].token_texts[batch]
    labels = tuple(map(str, tops[0].axis("layer").labels))
    cell = _cell_width(tops, tokens, batch)
    left, wide, tall = 100, len(tokens) * cell, len(labels) * 24
    across = len(found) * wide + left <= 1180
    gap = (30 if across else 130) if len(found) > 1 else 0
    whole = (wide if across else tall) * len(found) + gap * (len(found) - 1)
    spacing: dict[str, Any] = {"horizontal_spacing" if across else "vertical_spacing": gap / whole}
    figure = make_subplots(
        rows=1 if across else len(found),
        cols=len(found) if across else 1,
        subplot_titles=titles if len(found) > 1 else None,
        shared_yaxes=across,
        **spacing,
    )
    values = [measured[shade].values[:, batch, : len(tokens)] for measured in found]
    values = [v[..., 0] if v.ndim == 3 else v for v in values]
    largest = max(float(v.nan_to_num().max()) for v in values) or 1.0
    for number, measured in enumerate(found):
        place: dict[str, Any] = (
            {"row": 1, "col": number + 1} if across else {"row": number + 1, "col": 1}
        )
        trace = go.Heatmap(
            z=listed(values[number].detach().cpu().double().tolist()),
            x=[str(position) for position in range(len(tokens))],
            y=[literal(label) for label in labels],
            text=_top_texts(tops[number], batch, len(tokens)),
            texttemplate="%{text}",
            textfont={"size": 11, "color": "#111111"},
            customdata=_hovers(measured, labels, tokens, batch),
            hovertemplate="%{customdata}<extra></extra>",
            zmin=0,
            zmax=1 if shade == "probability" else largest,
            colorscale=scale_of(BLUES[:6] if shade == "probability" else ORANGES[:6]),
            colorbar={"title": {"text": _UNITS[shade]}, "thickness": 12, **bar_size(tall)},
            showscale=number == 0,
            xgap=1,
            ygap=1,
        )
        figure.add_trace(trace, **place)
    heading = heading_of(
        f"{' and '.join(titles)}: the most probable token at each layer",
        _UNITS[shade],
        f"shade: {_WORDS[shade]}",
        "norm recomputed at each layer",
        f"prompt {batch}",
        "the last row is the model's own output",
    )
    if not across:
        figure.update_annotations(x=0, xanchor="left")
    figure.update_annotations(font={"size": 13})
    below = _room_for(tokens)
    width = max(560, left + (whole if across else wide) + 100)
    lay_out(
        figure,
        heading,
        width=width,
        inside=max(110, tall if across else whole),
        above=24 if len(found) > 1 else 0,
        below=below,
        least=width,
    )
    ticks = [f"{n} {quoted(text, _LONGEST)}" for n, text in enumerate(tokens)]
    axes = {"type": "category", "showgrid": False, "zeroline": False, "automargin": True}
    figure.update_xaxes(
        tickvals=[str(n) for n in range(len(tokens))],
        ticktext=ticks,
        tickangle=-60,
        tickfont={"size": 11},
        **axes,
    )
    figure.update_yaxes(
        autorange="reversed", tickmode="linear", dtick=1, tickfont={"size": 11}, **axes
    )
    return figure


def _room_for(tokens: Sequence[str]) -> int:
    """Height of the tokens below a grid, written at a slant."""
    return 20 + round(0.87 * CHARACTER * (5 + max(min(_LONGEST, len(t)) for t in tokens)))


def _measured(lens: LensReadout | TopTokens, top: int) -> dict[str, LensResult]:
    if isinstance(lens, TopTokens):
        return {"probability": lens}
    found = lens.measure("entropy", "kl", top=min(top, lens.run.view.d_vocab))
    return {"probability": found["top_tokens"], "kl": found["kl"], "entropy": found["entropy"]}


def _lens_name(top: LensResult) -> str:
    return "tuned lens" if "tuned lens" in top.provenance.plan else "logit lens"


def _cell_width(tops: Sequence[Any], tokens: Sequence[str], batch: int) -> int:
    """Room for the tokens in the cells."""
    longest = 4
    for top in tops:
        texts = dict(top.texts)
        ids = top.ids[:, batch, : len(tokens), 0].flatten().unique().tolist()
        longest = max(longest, *(min(_LONGEST, len(texts[i])) for i in ids if i >= 0))
    return round((longest + 2) * CHARACTER)


def _top_texts(top: Any, batch: int, n: int) -> list[list[str]]:
    texts = dict(top.texts)
    ids = top.ids[:, batch, :n, 0].tolist()
    return [[quoted(texts[i], _LONGEST) if i >= 0 else "" for i in row] for row in ids]


def _hovers(
    measured: Mapping[str, Any], labels: Sequence[str], tokens: Sequence[str], batch: int
) -> list[list[str]]:
    """What hovering over each cell shows."""
    top = measured["probability"]
    texts = dict(top.texts)

    def hover(row: int, place: int) -> str:
        lines = [f"{literal(labels[row])}, after position {place} {quoted(tokens[place])}"]
        ids, probs = top.ids[row, batch, place].tolist(), top.values[row, batch, place].tolist()
        lines += [f"{quoted(texts[i])} {p:.3%}" for i, p in zip(ids, probs, strict=True) if i >= 0]
        for name, words in (("entropy", "entropy"), ("kl", "KL(final || lens)")):
            if name in measured:
                value = float(measured[name].values[row, batch, place])
                lines.append(f"{words} {value:.4f} nats")
        return "<br>".join(lines)

    return [[hover(row, place) for place in range(len(tokens))] for row in range(len(labels))]


def lens_by_layer(
    *readouts: LensReadout, quantity: Literal["kl", "entropy", "cross_entropy"] = "kl"
) -> plotly.graph_objects.Figure:
    """KL from the model's output (or entropy, or cross-entropy) by layer, a line for each lens.

    Args:
        readouts: lenses on the same run, such as the logit and the tuned lens.
        quantity: what is averaged over all positions of all prompts.

    Returns:
        A figure with a trace for each lens; its last point is the model's own output.

    Raises:
        MissingExtraError: plotly is not installed.
        ValueError: no readout, another quantity, or other rows.
    """
    words = {
        "kl": "KL(final || lens)",
        "entropy": "entropy of the lens",
        "cross_entropy": "-log p(next token)",
    }
    if quantity not in words:
        raise ValueError(f"quantity is one of {', '.join(words)}, got {quantity!r}")
    if not readouts or len({readout.labels for readout in readouts}) > 1:
        raise ValueError("a line for each lens needs lenses that read the same rows")
    results = [getattr(readout, quantity) for readout in readouts]
    columns = {}
    for result in results:
        name = _lens_name(result)
        name = name if name not in columns else f"{name} {len(columns) + 1}"
        columns[name] = result.values.detach().cpu().double().nanmean((1, 2)).tolist()
    first = results[0]
    n, prompts = int((~first.values[0].isnan()).sum()), first.provenance.n_prompts
    over = f"mean over {n} positions of {prompts} prompt{'s' * (prompts > 1)}"
    heading = heading_of(
        f"{words[quantity]} by layer", "nats", over, "norm recomputed at each layer"
    )
    return lines_by_depth(columns, readouts[0].labels, heading, "nats")


def kl_by_layer(
    columns: Mapping[str, Sequence[float]], labels: Sequence[str], *, over: str
) -> plotly.graph_objects.Figure:
    """KL from the model's output by layer, from numbers that were measured before.

    Args:
        columns: such as `logit lens` and `tuned`: a number for each layer, in nats.
        labels: the layers.
        over: what the numbers are means over.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    heading = heading_of("KL(final || lens) by layer", "nats", over)
    return lines_by_depth(columns, labels, heading, "nats")


def lens_grid(result: LensResult, *, batch: int = 0) -> plotly.graph_objects.Figure:
    """Numbers of a lens by layer and position of one prompt, from 0 up.

    Args:
        result: such as `readout.kl`.
        batch: which prompt.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    go = require_plotly()
    tokens = result.token_texts[batch]
    values = result.values[:, batch, : len(tokens)].detach().cpu().double()
    labels = [literal(str(label)) for label in result.axis("layer").labels]
    largest = float(values.nan_to_num().max()) or 1.0
    figure = go.Figure(
        go.Heatmap(
            z=listed(values.tolist()),
            x=[str(n) for n in range(len(tokens))],
            y=labels,
            customdata=[[quoted(text) for text in tokens] for _ in labels],
            zmin=0,
            zmax=1 if result.unit == "probability" else largest,
            colorscale=scale_of(BLUES if result.unit == "probability" else ORANGES),
            colorbar={"title": {"text": literal(result.unit)}, "thickness": 12},
            hovertemplate=f"%{{y}}, after position %{{x}} %{{customdata}}<br>%{{z:.5g}} "
            f"{literal(result.unit)}<extra></extra>",
            xgap=1,
            ygap=1,
        )
    )
    absent = torch.isnan(values)
    note = ("grey: no value",) if bool(absent.any()) else ()
    plan = result.provenance.plan
    plan = plan.replace("kl", "KL(final || lens)", 1) if plan.startswith("kl,") else plan
    heading = heading_of(plan, result.unit, f"prompt {batch}", *note)
    lay_out(
        figure,
        heading,
        width=max(440, 200 + 30 * len(tokens)),
        inside=max(110, 20 * len(labels)),
        below=_room_for(tokens),
        least=max(330, 160 + 18 * len(tokens)),
        plot_bgcolor=ABSENT if bool(absent.any()) else "#ffffff",
    )
    figure.update_xaxes(
        type="category",
        tickvals=[str(n) for n in range(len(tokens))],
        ticktext=[f"{n} {quoted(text, _LONGEST)}" for n, text in enumerate(tokens)],
        tickangle=-60,
        tickfont={"size": 11},
        showgrid=False,
    )
    figure.update_yaxes(
        type="category", autorange="reversed", dtick=1, tickfont={"size": 11}, showgrid=False
    )
    return figure
