"""Attention from some positions to others: what chosen queries of a head read from chosen keys."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from resid_patching.address import Address, Head, HeadNode, parse
from resid_patching.errors import AblationError, AddressError, PositionError
from resid_patching.models import take
from resid_patching.prompts import PositionIndex, Spans
from resid_patching.rerun import Fill
from resid_patching.run import Run


@dataclass(frozen=True)
class Attention:
    """What chosen queries of a head read from chosen keys; made by `attention`.

    Attributes:
        node: the head's pattern.
        queries: the positions that attend.
        keys: the positions that they attend to.
        renormalise: whether the other weights of these queries are scaled.
    """

    node: HeadNode
    queries: Spans
    keys: Spans
    renormalise: bool

    def __str__(self) -> str:
        scaled = "renormalised" if self.renormalise else "not renormalised"
        head = Head(self.node.layer, self.node.head)
        return f"{head} attention from {_shown(self.queries)} to {_shown(self.keys)}, {scaled}"


def attention(head: str | Address, *, queries: Spans, keys: Spans, renormalise: bool) -> Attention:
    """The attention of a head from some positions to others, as a target of `ablate`.

        rp.attention("9.9", queries=-1, keys=[[2], [4]], renormalise=False)

    The weights of the pattern from these queries to these keys are replaced: by zeros (`Zero`), by
    those of the source between the same positions (`Resample`), or by their mean (`Mean`). The
    other weights of these queries keep the values of the run, or are scaled.

    Args:
        head: such as "9.9".
        queries: the positions that attend: one of every prompt (-1 is the last token), one for
            each, a list for each, or None for all.
        keys: the positions that they attend to, likewise. A key behind a query has no weight there.
        renormalise: whether the other weights of each query are scaled so that its weights sum to
            what they summed to before. With `Zero` this is the softmax without these keys. There
            is no default.

    Raises:
        AddressError: no head.
        AblationError: `renormalise` is neither True nor False.
    """
    match parse(head):
        case Head(layer, number) | HeadNode(layer, number, "pattern"):
            node = HeadNode(layer, number, "pattern")
        case other:
            raise AddressError(f"{other} is no head; attention is of a head such as 9.9")
    if not isinstance(renormalise, bool):
        raise AblationError(
            "attention: renormalise is True (the other weights of the queries are scaled up or "
            f"down) or False (they stay), and has no default; got {renormalise!r}"
        )
    return Attention(node, _fixed(queries), _fixed(keys), renormalise)


def _fixed(positions: Spans) -> Any:
    """Positions as whole numbers and tuples, which nobody changes later."""
    listed: Any = positions.tolist() if isinstance(positions, Tensor) else positions
    if not isinstance(listed, Iterable) or isinstance(listed, str):
        return listed
    return tuple(_fixed(one) for one in listed)


def _shown(positions: Spans) -> str:
    """Positions as text, the same for the same positions alone."""
    if positions is None:
        return "all"
    text = str(positions).replace("(", "[").replace(",)", "]").replace(")", "]")
    if len(text) <= 40:
        return text
    return f"{text[:20]} ... (sha256 {hashlib.sha256(text.encode()).hexdigest()[:8]})"


def between(run: Run, target: Attention, new: Fill) -> Fill:
    """Rows of the run's own pattern with the weights of some keys replaced.

    Args:
        run: the run; its pattern has been fetched.
        target: which queries and keys.
        new: gives whole rows of the pattern that takes its place there.

    Raises:
        PositionError: a prompt has no such position, a query sees no key, or nothing is left to
            renormalise.
    """
    queries, keys = map(run.prompts.locate_spans, (target.queries, target.keys))
    own = run.fetched(target.node)[:, target.node.head]  # [batch, query, key]
    _require_seen(target, queries, keys)
    places = torch.arange(own.shape[2], device=keys.index.device)
    is_key = (keys.index[:, :, None] == places).any(1).to(own.device)  # [batch, pos]
    if target.renormalise:
        _require_others(target, queries, take(own, queries.index), is_key)

    def fill(rows: slice, index: Tensor) -> Tensor:
        width = max(run.prompts.lengths[rows])
        old = take(own[rows].to(index.device), index)[..., :width]
        replaced = is_key[rows, None, :width].to(index.device).expand_as(old)
        changed = torch.where(replaced, new(rows, index).to(old), old)
        if not target.renormalise:
            return changed
        taken = (old - changed).sum(-1, keepdim=True)
        others = old.masked_fill(replaced, 0).sum(-1, keepdim=True)
        scale = 1 + taken / others.masked_fill(others == 0, 1)  # 0 where there is no query
        return torch.where(replaced, changed, old * scale)

    return fill


def _require_seen(target: Attention, queries: PositionIndex, keys: PositionIndex) -> None:
    """Raises PositionError where no query of a prompt can see any of its keys."""
    last = queries.index.amax(1)
    first = keys.index.masked_fill(~keys.valid, torch.iinfo(torch.long).max).amin(1)
    if blind := (first > last).nonzero().flatten().tolist():
        prompt = blind[0]
        raise PositionError(
            f"{target}: in prompt {prompt} every key is behind every query (the first key is "
            f"{int(first[prompt])}, the last query {int(last[prompt])}), so there is no attention"
        )


def _require_others(target: Attention, queries: PositionIndex, old: Tensor, is_key: Tensor) -> None:
    """Raises PositionError where a query has no weight on other keys that could be scaled."""
    others = old.masked_fill(is_key[:, None], 0).sum(-1)
    empty = (others <= 0) & queries.valid.to(others.device)
    if bool(empty.any()):
        prompt, column = empty.nonzero()[0].tolist()
        raise PositionError(
            f"{target}: query {int(queries.index[prompt, column])} of prompt {prompt} has no "
            "weight on any other key, so nothing is left to renormalise"
        )


def require_own_queries(
    group: Sequence[Address | Attention], queries: Mapping[Address | Attention, PositionIndex]
) -> None:
    """Raises PositionError where two targets of a row set the same query's weights."""
    seen: set[tuple[Address, int, int]] = set()
    for target in group:
        if not isinstance(target, Attention):
            continue
        for prompt, positions in enumerate(queries[target].index.tolist()):
            for position in filter(lambda position: position >= 0, positions):
                cell = (target.node, prompt, position)
                if cell in seen:
                    raise PositionError(
                        f"{target} and another target of its row both replace weights of query "
                        f"{position} in prompt {prompt}; give one target with the keys of both"
                    )
                seen.add(cell)
