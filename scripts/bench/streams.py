"""Rows on one clean run: capture and direct logit attribution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import resid_patching as rp
from bench.common import (
    ANSWER,
    FOIL,
    HEADS,
    LAYERS,
    LENGTH,
    PROMPTS,
    Case,
    Cases,
    forward,
    forward_flops,
    ids,
)
from resid_patching.address import hook_name

SHAPES = ((PROMPTS, LENGTH), (1, 512))


def captures(model: Any) -> Cases:
    """What every component wrote, fetched in one pass."""
    names = {hook_name(writer) for writer in rp.writers(model)}
    for prompts, length in SHAPES:
        tokens = ids(prompts, length)

        def ours(tokens: Tensor = tokens) -> Tensor:
            run = rp.capture(model, tokens)
            run.fetch_all(rp.writers(model))
            return run.fetch(rp.writers(model)[-1])

        def cached(tokens: Tensor = tokens) -> Tensor:
            with torch.no_grad():
                _, cache = model.run_with_cache(tokens, names_filter=lambda name: name in names)
            return cache[hook_name(rp.writers(model)[-1])]

        size = f"{prompts} x {length}"
        flops = forward_flops(prompts, length)
        yield Case(
            f"capture what {len(names)} components wrote, {size}",
            ours,
            "run_with_cache of the same hooks",
            cached,
            flops=flops,
            plain=forward(model, tokens),
        )


def attributions(model: Any) -> Cases:
    """Attribution at the last position, from ids and from a cache that is there already."""
    for prompts, length in SHAPES:
        tokens = ids(prompts, length)
        yield from _by_tool(model, tokens)
        yield from _by_cache(model, tokens)


def _by_tool(model: Any, tokens: Tensor) -> Cases:
    """Beside TransformerLens 4.3's own tool; it is not in 3.9."""
    try:
        from transformer_lens.tools.analysis import direct_logit_attribution
    except ImportError:
        return
    for by in ("component", "head"):

        def theirs(by: str = by) -> Tensor:
            with torch.no_grad():
                found = direct_logit_attribution(model, tokens, ANSWER, FOIL, unit=by, pos=-1)
            return found.attribution[: LAYERS * HEADS] if by == "head" else found.attribution

        yield Case(
            f"attribution by {by}, {_size(tokens)}",
            lambda by=by: _attribution(rp.capture(model, tokens), by),
            "tools.analysis.direct_logit_attribution",
            theirs,
            pick=_of_parts(model, by),
            flops=forward_flops(*tokens.shape),
        )


def _by_cache(model: Any, tokens: Tensor) -> Cases:
    """Beside the methods of ActivationCache: from ids, and where cache and run are there."""

    def attribute(cache: Any, by: str) -> Tensor:
        if by == "component":
            stack = cache.decompose_resid(pos_slice=-1)
        elif by == "head":
            stack = cache.stack_head_results(pos_slice=-1)
        else:
            stack = cache.stack_neuron_results(LAYERS, pos_slice=-1)
        return cache.logit_attrs(stack, ANSWER, incorrect_tokens=FOIL, pos_slice=-1)

    def cached(by: str) -> Tensor:
        with torch.no_grad():
            return attribute(model.run_with_cache(tokens)[1], by)

    for by in ("component", "head", "neuron"):
        yield Case(
            f"attribution by {by}, {_size(tokens)}",
            lambda by=by: _attribution(rp.capture(model, tokens), by),
            "run_with_cache, ActivationCache and logit_attrs",
            lambda by=by: cached(by),
            pick=_of_parts(model, by),
            flops=forward_flops(*tokens.shape),
        )
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
    run = rp.capture(model, tokens, cache=cache)

    def again(by: str) -> Tensor:
        with torch.no_grad():
            return attribute(cache, by)

    for by in ("component", "head", "neuron"):
        yield Case(
            f"attribution by {by} of a cache already there, {_size(tokens)}",
            lambda by=by: _attribution(run, by),
            "ActivationCache and logit_attrs",
            lambda by=by: again(by),
            pick=_of_parts(model, by),
        )


def _size(tokens: Tensor) -> str:
    return f"{tokens.shape[0]} x {tokens.shape[1]}"


def _attribution(run: rp.Run, by: Any) -> Tensor:
    return rp.direct_logit_attribution(run, ANSWER, FOIL, by=by).values[..., -1]


def _of_parts(model: Any, by: str) -> Any:
    """Our rows that stand for the parts TransformerLens has a row for."""

    def pick(values: Tensor) -> Tensor:
        if by == "component":
            return values[: 2 + 2 * LAYERS]
        if by == "head":
            return values[_rows(model, by, r"\d+\.\d+")]
        return values[_rows(model, by, r"mlp\.\d+\.\d+")]

    return pick


def _rows(model: Any, by: Any, pattern: str) -> list[int]:
    import re

    run = rp.capture(model, ids(1, 2))
    labels = rp.direct_logit_attribution(run, ANSWER, FOIL, by=by).axis("component").labels
    return [n for n, label in enumerate(labels) if re.fullmatch(pattern, str(label))]
