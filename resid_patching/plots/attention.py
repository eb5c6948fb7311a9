"""Pictures of attention patterns: query × key, with the tokens on both axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resid_patching.attention import AttentionPatterns
from resid_patching.plots.base import heading_of
from resid_patching.plots.grids import Grid, draw_grids, places_with_tokens

if TYPE_CHECKING:
    import plotly.graph_objects


def attention(
    patterns: AttentionPatterns, *, batch: int = 0, heads: int = 6
) -> plotly.graph_objects.Figure:
    """Where each head looks: from each query (a row) to the keys up to it (columns).

    Later keys, which a query cannot see, are not drawn.

    Args:
        patterns: of any heads.
        batch: which prompt.
        heads: at most so many heads, in the order given; the title says how many there are.

    Returns:
        A figure with a trace for each head; weights from 0 to 1.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    import pandas

    tokens = patterns.token_texts[batch]
    n = len(tokens)
    places = places_with_tokens(range(n), tokens)
    axes = pandas.Index(places, name="query"), pandas.Index(places, name="key")
    values = patterns.values[:, batch, :n, :n].detach().cpu().double().numpy()
    drawn = patterns.heads[:heads]
    grids = {
        f"head {head}": Grid(pandas.DataFrame(values[number], *axes))
        for number, head in enumerate(drawn)
    }
    details = [f"prompt {batch}", "row: the query that looks; column: the key it looks at"]
    if len(drawn) < len(patterns.heads):
        details.append(f"the first {len(drawn)} of {len(patterns.heads)} heads")
    first = f"Attention pattern of {', '.join(drawn)}" if len(drawn) < 8 else "Attention patterns"
    heading = heading_of(first, patterns.unit, *details)
    return draw_grids(grids, patterns.unit, heading, signed=False, end=1.0, triangle=True)
