"""Pictures of lenses: the token that each state would say, and numbers by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from resid_patching.lens.readout import LensReadout
from resid_patching.lens.results import LensResult, TopTokens
from resid_patching.markup import quoted
from resid_patching.plots.base import CHARACTER, clipped, heading_of, literal
from resid_patching.plots.depth import draw_lines
from resid_patching.plots.grids import Grid, draw_grids, pivoted

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

Shade: TypeAlias = Literal["probability", "kl", "entropy"]

_LONGEST = 13  # characters of a token in a cell, with its quotes
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
    if shade != "probability" and isinstance(readout, TopTokens):
        raise ValueError(f"{shade} is not among top tokens; give the readout itself")
    grids: dict[str, Grid] = {}
    for lens in [readout] if beside is None else [readout, beside]:
        measured = _measured(lens, top)
        name = _unlike(_lens_name(measured["probability"]), grids)
        grids[name] = _tokens_of(measured, batch, shade)
    heading = heading_of(
        f"{' and '.join(grids)}: the most probable token at each layer",
        _UNITS[shade],
        f"shade: {_WORDS[shade]}",
        "norm recomputed at each layer",
        f"prompt {batch}",
        "the last row is the model's own output",
    )
    end = 1.0 if shade == "probability" else None
    longest = max(len(text) for grid in grids.values() for row in grid.texts for text in row)
    cell = round((max(longest, 6)) * CHARACTER)
    return draw_grids(grids, _UNITS[shade], heading, signed=False, end=end, cell=cell)


def _measured(lens: LensReadout | TopTokens, top: int) -> dict[str, LensResult]:
    if isinstance(lens, TopTokens):
        return {"probability": lens}
    found = lens.measure("entropy", "kl", top=min(top, lens.run.view.d_vocab))
    return {"probability": found["top_tokens"], "kl": found["kl"], "entropy": found["entropy"]}


def _lens_name(result: LensResult) -> str:
    return "tuned lens" if "tuned lens" in result.provenance.plan else "logit lens"


def _unlike(name: str, known: Mapping[str, object]) -> str:
    return name if name not in known else f"{name} {len(known) + 1}"


def _tokens_of(measured: Mapping[str, LensResult], batch: int, shade: Shade) -> Grid:
    """The top token of each cell of one prompt, and what hovering shows."""
    frame = _of_prompt(measured["probability"], batch)
    cells = frame.loc[frame["rank"] == 0].copy()
    ranked = zip(frame["top_token"], frame["value"], strict=True)
    frame["said"] = [literal(f"{quoted(token)} {prob:.3%}") for token, prob in ranked]
    said = frame.groupby(["layer", "position"], sort=False)["said"].agg("<br>".join)
    cells["hover"] = said.array
    for name, words in (("entropy", "entropy"), ("kl", "KL(final || lens)")):
        if name in measured:
            values = _of_prompt(measured[name], batch)["value"].array
            cells["hover"] += [f"<br>{words} {value:.4f} nats" for value in values]
            cells[name] = values
    cells["text"] = [literal(clipped(quoted(token), _LONGEST)) for token in cells["top_token"]]
    value = "value" if shade == "probability" else shade
    planes = {name: pivoted(cells, "layer", "position", name) for name in (value, "text", "hover")}
    return Grid(planes[value], planes["text"].to_numpy(), planes["hover"].to_numpy())


def _of_prompt(result: LensResult, batch: int) -> pandas.DataFrame:
    frame = result.to_frame()
    return frame.loc[frame["prompt"] == batch].copy()


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
    columns: dict[str, Sequence[float]] = {}
    for result in (getattr(readout, quantity) for readout in readouts):
        table = result.table()
        columns[_unlike(_lens_name(result), columns)] = table["value"].tolist()
    n, prompts = int(table["n"].iloc[0]), result.provenance.n_prompts
    over = f"mean over {n} positions of {prompts} prompt{'s' * (prompts > 1)}"
    heading = heading_of(
        f"{words[quantity]} by layer", "nats", over, "norm recomputed at each layer"
    )
    return draw_lines(_long(columns, readouts[0].labels), heading, "nats")


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
    return draw_lines(_long(columns, labels), heading, "nats")


def _long(columns: Mapping[str, Sequence[float]], labels: Sequence[str]) -> pandas.DataFrame:
    import pandas

    wide = pandas.DataFrame({"place": list(labels), **columns})
    return wide.melt("place", var_name="name", value_name="value")


def lens_grid(result: LensResult, *, batch: int = 0) -> plotly.graph_objects.Figure:
    """Numbers of a lens by layer and position of one prompt, from 0 up.

    Args:
        result: such as `readout.kl`.
        batch: which prompt.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    grid = Grid(pivoted(_of_prompt(result, batch), "layer", "position", "value"))
    plan = result.provenance.plan
    plan = plan.replace("kl", "KL(final || lens)", 1) if plan.startswith("kl,") else plan
    heading = heading_of(plan, result.unit, f"prompt {batch}")
    end = 1.0 if result.unit == "probability" else None
    return draw_grids({"": grid}, result.unit, heading, signed=False, end=end)
