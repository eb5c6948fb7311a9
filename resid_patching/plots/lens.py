"""Pictures of lenses by layer and position: the token that each state would say, and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from resid_patching.lens.readout import LensReadout
from resid_patching.lens.results import LensResult, TopTokens
from resid_patching.markup import quoted
from resid_patching.plots.base import CHARACTER, clipped, heading_of, literal, under
from resid_patching.plots.grids import Grid, draw_grids, pivoted
from resid_patching.plots.lines import lens_name

if TYPE_CHECKING:
    import plotly.graph_objects

Shade: TypeAlias = Literal["probability", "kl", "entropy"]

_LONGEST = 13  # characters of a token in a cell, with its quotes
_WORDS = {"entropy": "entropy", "kl": "KL(final || lens)"}


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
        ValueError: no such shade, or one that `top_tokens` alone does not hold.
    """
    words = {"probability": "probability of that token", **_WORDS}
    if shade not in words:
        raise ValueError(f"shade is 'probability', 'kl' or 'entropy', got {shade!r}")
    if shade != "probability" and isinstance(readout, TopTokens):
        raise ValueError(f"{shade} is not among top tokens; give the readout itself")
    grids: dict[str, Grid] = {}
    for lens in [readout] if beside is None else [readout, beside]:
        plan = lens.provenance.plan if isinstance(lens, TopTokens) else lens.plan
        grids[lens_name(plan, grids)] = _tokens_of(_measured(lens, top), batch, shade)
    tops = readout if isinstance(readout, TopTokens) else readout.top_tokens(1)
    unit = "probability" if shade == "probability" else "nats"
    heading = heading_of(
        f"{' and '.join(grids)}: the most probable token at each layer",
        unit,
        f"shade: {words[shade]}",
        "norm recomputed at each layer",
        f"prompt {batch}",
        "the last row is the model's own output",
        *under(tops),
    )
    longest = max(len(text) for grid in grids.values() for text in grid.texts.flat)
    cell, end = round(max(longest, 6) * CHARACTER), 1.0 if unit == "probability" else None
    return draw_grids(grids, unit, heading, signed=False, end=end, cell=cell)


def _measured(lens: LensReadout | TopTokens, top: int) -> Mapping[str, LensResult]:
    if isinstance(lens, TopTokens):
        return {"top_tokens": lens}
    return lens.measure("entropy", "kl", top=min(top, lens.run.view.d_vocab))


def _tokens_of(measured: Mapping[str, LensResult], batch: int, shade: Shade) -> Grid:
    """The top token of each cell of one prompt, and what hovering shows."""
    frame = _of_prompt(measured["top_tokens"], batch)
    ranks = zip(frame["top_token"], frame["value"], strict=True)
    frame["said"] = [literal(f"{quoted(token)} {prob:.3%}") for token, prob in ranks]
    said = frame.groupby(["layer", "position"], sort=False)["said"].agg("<br>".join)
    cells = (
        frame[frame["rank"] == 0].assign(hover=said.array).rename(columns={"value": "probability"})
    )
    cells["text"] = [clipped(quoted(token), _LONGEST) for token in cells["top_token"]]
    for name in _WORDS.keys() & measured.keys():
        cells[name] = _of_prompt(measured[name], batch)["value"].array
        cells["hover"] += [f"<br>{_WORDS[name]} {value:.4f} nats" for value in cells[name]]
    values, texts, hovers = (
        pivoted(cells, "layer", "position", name) for name in (shade, "text", "hover")
    )
    return Grid(values, texts.to_numpy(), hovers.to_numpy())


def _of_prompt(result: LensResult, batch: int) -> Any:
    frame = result.to_frame()
    return frame[frame["prompt"] == batch].copy()


def lens_grid(result: LensResult, *, batch: int = 0) -> plotly.graph_objects.Figure:
    """Numbers of a lens by layer and position of one prompt, from 0 up.

    Args:
        result: such as `readout.kl`.
        batch: which prompt.
    """
    grid = Grid(pivoted(_of_prompt(result, batch), "layer", "position", "value"))
    plan = result.provenance.plan
    plan = plan.replace("kl", "KL(final || lens)", 1) if plan.startswith("kl,") else plan
    heading = heading_of(plan, result.unit, f"prompt {batch}")
    end = 1.0 if result.unit == "probability" else None
    return draw_grids({"": grid}, result.unit, heading, signed=False, end=end)
