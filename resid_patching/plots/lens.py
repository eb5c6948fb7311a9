"""Pictures of lenses: the token that each state would say, and numbers by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from resid_patching.lens.readout import LensReadout
from resid_patching.lens.results import LensResult, TopTokens
from resid_patching.plots.bars import lines_by_depth
from resid_patching.plots.base import CHARACTER, heading_of, literal, quoted, under
from resid_patching.plots.grids import Grid, draw_grids
from resid_patching.result import Axis, standard_error_over_positions

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
    if shade not in _UNITS:
        raise ValueError(f"shade is 'probability', 'kl' or 'entropy', got {shade!r}")
    lenses = [readout] if beside is None else [readout, beside]
    found = [_measured(lens, top) for lens in lenses]
    if shade not in found[0]:
        raise ValueError(f"{shade} is not among top tokens; give the readout itself")
    tops: list[Any] = [measured["probability"] for measured in found]
    titles = [_lens_name(measured) for measured in tops]
    tokens = tops[0].token_texts[batch]
    labels = tuple(map(str, tops[0].axis("layer").labels))
    grids = {}
    for title, top_tokens, measured in zip(titles, tops, found, strict=True):
        values = measured[shade].values[:, batch, : len(tokens)].detach().cpu().double()
        title = title if title not in grids else f"{title} {len(grids) + 1}"
        grids[title] = Grid(
            Axis("layer", labels),
            Axis("position", tuple(range(len(tokens)))),
            values[..., 0] if values.ndim == 3 else values,
            tokens=tokens,
            texts=_top_texts(top_tokens, batch, len(tokens)),
            hovers=_hovers(measured, labels, tokens, batch),
        )
    heading = heading_of(
        f"{' and '.join(titles)}: the most probable token at each layer",
        _UNITS[shade],
        f"shade: {_WORDS[shade]}",
        "norm recomputed at each layer",
        f"prompt {batch}",
        "the last row is the model's own output",
        *under(tops[0]),
    )
    end = 1.0 if shade == "probability" else None
    cell = _cell_width(tops, tokens, batch)
    return draw_grids(grids, _UNITS[shade], heading, signed=False, end=end, cell=cell)


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
    columns, errors = {}, {}
    for result in results:
        name = _lens_name(result)
        name = name if name not in columns else f"{name} {len(columns) + 1}"
        columns[name] = result.values.detach().cpu().double().nanmean((1, 2)).tolist()
        errors[name] = standard_error_over_positions(result.values).tolist()
    first = results[0]
    n, prompts = int((~first.values[0].isnan()).sum()), first.provenance.n_prompts
    over = f"mean over {n} positions of {prompts} prompt{'s' * (prompts > 1)}"
    heading = heading_of(
        f"{words[quantity]} by layer",
        "nats",
        over,
        "norm recomputed at each layer",
        *under(first),
    )
    return lines_by_depth(columns, readouts[0].labels, heading, "nats", errors=errors)


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
    tokens = result.token_texts[batch]
    grid = Grid(
        Axis("layer", result.axis("layer").labels),
        Axis("position", tuple(range(len(tokens)))),
        result.values[:, batch, : len(tokens)].detach().cpu().double(),
        tokens=tokens,
    )
    plan = result.provenance.plan
    plan = plan.replace("kl", "KL(final || lens)", 1) if plan.startswith("kl,") else plan
    heading = heading_of(plan, result.unit, f"prompt {batch}")
    end = 1.0 if result.unit == "probability" else None
    return draw_grids({"": grid}, result.unit, heading, signed=False, end=end)
