"""Pictures of results, as plotly figures: `pip install 'resid-patching[plots]'`.

    show(result)                                     the picture of any result

    heatmap(ablate(run, heads(model), ...))          layer × head
    heatmap(ablate(run, senders, Path(to=receivers(...), ...)), of="direct")   sender × receiver
    heatmap(direct_logit_attribution(run, ..., by="head"))                   layer × head
    effect_grids(effect)    effect_bars(effect)      total, direct and indirect side by side
    path_diagram(effect)                             senders above receivers, largest paths
    attribution_bars(dla)   accumulated(dla)         rows; their running sum along depth
    by_position(dla)                                 rows × positions of one prompt
    attention(patterns)                              query × key, with tokens
    trajectory(lens)        trajectory(logit, tuned) the token that each state would say
    lens_by_layer(logit, tuned)                      KL or entropy by layer
    stream(report)                                   norms, shares, cosine with the start
    token_text(dla, "9.9")                           the prompt itself, its tokens shaded
    bars({"0.1": -9.9, "2.3": -0.8}, title="Total effect", unit="logits", top=10)

A cell, bar or point is the mean over prompts of the result's own numbers, blue above 0 and red
below, on a scale that runs as far to one side of 0 as to the other, and at least to 0.01 (for
probabilities to 0.001), so that rounding is not dark. A value that does not exist (NaN) is a grey
cell with a cross, or no bar or point; 0 is white. The unit and the kind of ablation are in the
title, and so is what was left out. Error bars are standard errors of the mean over prompts. Depth
runs downwards in grids and diagrams, and to the right where numbers are lines or bars along depth:
the start is always at the top or the left.

Every function raises `MissingExtraError` where plotly is not installed.

Figures carry their own template, and no global theme is read or changed. All that a dark page needs
otherwise is in the template: `figure.layout.template = plots.template(dark=True)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resid_patching.ablation import Effect
from resid_patching.attribution import Attribution
from resid_patching.lens.readout import LensReadout
from resid_patching.lens.results import LensResult, TopTokens
from resid_patching.lens.tuned import TunedLens
from resid_patching.patterns import AttentionPatterns
from resid_patching.plots.bars import attribution_bars, bars, effect_bars
from resid_patching.plots.base import plotly_script, require_plotly, template
from resid_patching.plots.heat import Of, attention, by_position, effect_grids, heatmap
from resid_patching.plots.lens import Shade, lens_grid, trajectory
from resid_patching.plots.lines import accumulated, kl_by_layer, lens_by_layer, stream
from resid_patching.plots.paths import path_diagram
from resid_patching.plots.png import png, require_renderer
from resid_patching.plots.tokens import TokenText, token_text
from resid_patching.result import Result
from resid_patching.stream import StreamReport

if TYPE_CHECKING:
    import plotly.graph_objects


def show(result: Result | LensReadout | TunedLens) -> plotly.graph_objects.Figure:
    """The picture of a result; the other functions draw more of it.

    Args:
        result: anything that this package returns.

    Raises:
        ValueError: there is no picture of it.
    """
    match result:
        case Effect():
            is_grid = result.columns is not None or "effect_bars" in result.pictures()
            return effect_grids(result) if is_grid else effect_bars(result)
        case Attribution() if len(result.axis("pos").labels) > 1:
            return by_position(result)
        case Attribution() if result.by != "head":
            return attribution_bars(result)
        case AttentionPatterns():
            return attention(result)
        case StreamReport():
            return stream(result)
        case LensReadout() | TopTokens():
            return trajectory(result)
        case LensResult():
            return lens_grid(result)
        case TunedLens():
            return _fitted(result)
        case _:
            return heatmap(result)


def _fitted(lens: TunedLens) -> Any:
    """What the fit measured on tokens that were held out of it."""
    held_out = lens.record.get("validation", {})
    names = {"logit lens": "logit_lens", "tuned": "tuned"}
    columns = {name: held_out[key] for name, key in names.items() if held_out.get(key)}
    if not columns:
        raise ValueError("this lens does not say what its fit measured; read a run through it")
    over = f"mean over {held_out.get('tokens', '?')} tokens held out of the fit"
    return kl_by_layer(columns, lens.labels, over=over)


__all__ = [
    "Of",
    "Shade",
    "TokenText",
    "accumulated",
    "attention",
    "attribution_bars",
    "bars",
    "by_position",
    "effect_bars",
    "effect_grids",
    "heatmap",
    "kl_by_layer",
    "lens_by_layer",
    "lens_grid",
    "path_diagram",
    "plotly_script",
    "png",
    "require_plotly",
    "require_renderer",
    "show",
    "stream",
    "template",
    "token_text",
    "trajectory",
]
