"""Attention patterns: where chosen heads look, with the tokens they look at.

A head's pattern at a query is its softmax over the keys up to it, as the model itself computed it,
so each row of a query sums to 1. Rows sum to less where a model gives a share to a sink that is no
token (gpt-oss), or where a hook of the caller takes weight away; the plan then says so.

    patterns = attention_patterns(run, ["9.9", "10.0"])
    patterns.looks(k=3)              where each head looks from the last token
    patterns.sel(head="9.9", batch=0)    [query, key]

A large weight says that a head reads from a token, not that what it reads matters: the value there
may be small, or change nothing. Ablate the head, or patch the path, to learn that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from resid_patching.ablation.targets import Targets, find_rows
from resid_patching.address import Head, HeadNode, parse
from resid_patching.errors import AddressError, HeadMismatchError, PositionError
from resid_patching.models import TOLERANCE
from resid_patching.result import Axis, Result, insert_tokens, provenance
from resid_patching.run import Run

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, eq=False, repr=False)
class AttentionPatterns(Result):
    """Patterns: values [head, batch, query, key]; NaN where a query cannot see a key.

    A query sees no later key, and neither exists behind a prompt's last token.

    Attributes:
        token_texts: the tokens of each prompt as text.
    """

    kind: ClassVar[str] = "attention"
    ordered: ClassVar[bool] = True

    token_texts: tuple[tuple[str, ...], ...]

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads, as text."""
        return tuple(map(str, self.axis("head").labels))

    @property
    def row_sums(self) -> Float[Tensor, "head batch query"]:
        """What each query's row sums to; NaN where a prompt has no such query."""
        absent = self.values.isnan().all(-1)
        return self.values.nansum(-1).masked_fill(absent, torch.nan)

    def looks(self, k: int = 3, *, query: int | None = -1) -> pandas.DataFrame:
        """Where each head looks: the k keys of the largest weights.

        Args:
            k: how many keys of each head, prompt and query.
            query: from which position; a negative one counts from each prompt's last token; None
                for every position.

        Returns:
            A data frame: head, prompt, query, query_token, key, key_token, weight; the largest
            weight of each query first.

        Raises:
            PositionError: a prompt has no such query.
        """
        chosen = [_queries(len(texts), query) for texts in self.token_texts]
        frame = self.to_frame().rename(columns={"value": "weight"})
        cells = zip(frame["prompt"], frame["query"], strict=True)
        frame = frame[[query in chosen[prompt] for prompt, query in cells]]
        places = ["prompt", "query"]
        ranks = {head: rank for rank, head in enumerate(self.heads)}
        order = [ranks[head] for head in frame["head"]]
        frame = frame.assign(order=order).sort_values(
            ["order", *places, "weight"], ascending=[True, True, True, False], kind="stable"
        )
        largest = frame.groupby(["order", *places], sort=False).head(k)
        return largest.drop(columns="order").reset_index(drop=True)

    def table(self) -> pandas.DataFrame:
        """Where each head looks from each prompt's last token."""
        return self.looks()

    @property
    def row_name(self) -> str:
        """What a row of the table is called."""
        return "look"

    @property
    def caption(self) -> str:
        """What the numbers of the table are."""
        return "weights of the keys that each head looks at most"

    def headings(self) -> dict[str, str]:
        """The columns of the table, each with the name above it."""
        columns = {"head": "head", "prompt": "prompt", "query": "looks from"}
        columns |= {"query_token": "token", "key": "looks at", "key_token": "token there"}
        return columns | {"weight": "weight"}

    def facts(self) -> tuple[tuple[str, str], ...]:
        """The model that ran, how many prompts, and where rows do not sum to 1."""
        least = float(self.row_sums[~self.row_sums.isnan()].min())
        short = least < 1 - _slack(self.values)
        sums = (("rows", f"sum to {least:.4g} or more: the rest goes to no token"),)
        return (*super().facts(), *(sums if short else ()))

    def caveats(self) -> tuple[str, ...]:
        """What a pattern does not say."""
        return (
            "A large weight says that a head reads from a token, not that what it reads matters: "
            "ablate the head to learn that.",
        )

    def pictures(self) -> tuple[str, ...]:
        """The function in `resid_patching.plots` that draws it."""
        return ("attention",)

    def to_frame(self) -> pandas.DataFrame:
        """Long form: head, prompt, query, query_token, key, key_token, value; what exists."""
        frame = super().to_frame().dropna(subset=["value"])
        for column in ("query", "key"):
            insert_tokens(frame, self.token_texts, column)
        return frame.reset_index(drop=True)


def _queries(n: int, query: int | None) -> range:
    if query is None:
        return range(n)
    place = query + n if query < 0 else query
    if not 0 <= place < n:
        raise PositionError(f"query {query} does not exist: a prompt has positions 0 to {n - 1}")
    return range(place, place + 1)


def attention_patterns(run: Run, heads: Targets) -> AttentionPatterns:
    """The attention patterns of chosen heads, as the model computed them.

    Args:
        run: the prompts on their model.
        heads: such as `"9.9"`, `["9.9", "10.0"]` or `rp.heads(model)`. In a grouped-query model
            these are its query heads, each with a pattern of its own.

    Returns:
        Values [head, batch, query, key], in the model's dtype, as probabilities.

    Raises:
        AddressError: no head of the model, one given twice, or a model that has no
            hook for patterns; the message names it.
        HookNotFiredError: the model computes attention without the pattern.
        HeadMismatchError: what the hook gives is no pattern: negative or not a number, a row of
            more than 1, or weight on a later token.
    """
    listed = [heads] if isinstance(heads, str) or not isinstance(heads, list | tuple) else heads
    nodes = [_pattern_of(str(head)) for head in listed]
    if not nodes:
        raise AddressError("no head was given; give one such as '9.9'")
    find_rows(run.view, nodes)
    run.fetch_all(nodes)
    values = torch.stack([run.fetched(node)[:, node.head] for node in nodes])
    seen = run.prompts.mask.to(values.device)
    seen = (seen[:, :, None] & seen[:, None, :]).tril()
    labels = tuple(str(Head(node.layer, node.head)) for node in nodes)
    least = _require_patterns(run, labels, values, seen)
    plan = f"attention patterns of {', '.join(labels)}"
    if least < 1 - _slack(values):
        plan += f"; rows sum to {least:.4g} or more: the rest goes to no token"
    places = tuple(range(values.shape[-1]))
    return AttentionPatterns(
        values.masked_fill(~seen, torch.nan),
        (
            Axis("head", labels),
            Axis("batch", tuple(range(len(run)))),
            Axis("query", places),
            Axis("key", places),
        ),
        "probability",
        provenance(run, plan),
        run.prompts.token_texts,
    )


def _pattern_of(text: str) -> HeadNode:
    match address := parse(text):
        case Head(layer, head) | HeadNode(layer, head, "pattern"):
            return HeadNode(layer, head, "pattern")
    raise AddressError(f"{address} is not a head; attention patterns belong to heads such as 9.9")


def _slack(values: Tensor) -> float:
    """How far rounding takes a row's sum from 1."""
    return TOLERANCE[values.dtype]


def _require_patterns(run: Run, labels: tuple[str, ...], values: Tensor, seen: Tensor) -> float:
    """The least sum of a row; raises HeadMismatchError where a head's values are no pattern."""
    least = 1.0
    for label, of_head in zip(labels, values.double(), strict=True):
        real = of_head[seen]
        sums = of_head.masked_fill(~seen, 0).sum(-1)[seen.any(-1)]
        later = float(of_head.masked_fill(seen, 0).abs().max())
        if not bool((real >= 0).all()) or float(sums.max()) > 1 + _slack(values):
            problem = "has negative weights, NaN, or rows that sum to more than 1"
        elif later > _slack(values):
            problem = f"looks at later tokens, with a weight of up to {later:.3g}"
        else:
            least = min(least, float(sums.min()))
            continue
        raise HeadMismatchError(
            f"{label}.pattern {problem}: what {run.view.name} ({run.view.kind}) gives as "
            "the head's pattern is not causal attention. Remove hooks that change it."
        )
    return least
