"""Rows on one clean run: capture and direct logit attribution."""

from __future__ import annotations

from typing import Any

import torch
from bench.common import (
    ANSWER,
    D,
    D_MLP,
    FOIL,
    LAYERS,
    LENGTH,
    PROMPTS,
    Case,
    Cases,
    forward,
    forward_flops,
    ids,
)
from torch import Tensor

import resid_patching as rp
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
    yield from _from_ids(model)
    for prompts, length in SHAPES:
        tokens = ids(prompts, length)
        with torch.no_grad():
            _, cache = model.run_with_cache(tokens)
        yield from _from_cache(model, tokens, cache, f"{prompts} x {length}")


def _from_ids(model: Any) -> Cases:
    """Beside TransformerLens 4.3's own tool; it is not in 3.9."""
    try:
        from transformer_lens.tools.analysis import direct_logit_attribution
    except ImportError:
        return
    for prompts, length in SHAPES:
        tokens = ids(prompts, length)
        for by in ("component", "head"):

            def theirs(tokens: Tensor = tokens, by: str = by) -> Tensor:
                with torch.no_grad():
                    found = direct_logit_attribution(
                        model, tokens, ANSWER, FOIL, unit=by, pos=-1
                    ).attribution
                return found if by == "component" else found[: 12 * 12]

            yield Case(
                f"attribution by {by}, from ids, {prompts} x {length}",
                lambda tokens=tokens, by=by: _attribution(rp.capture(model, tokens), by),
                "tools.analysis.direct_logit_attribution",
                theirs,
                pick=_of_parts(model, by),
                flops=forward_flops(prompts, length),
            )


def _from_cache(model: Any, tokens: Tensor, cache: Any, size: str) -> Cases:
    n_prompts = len(tokens)

    def components() -> Tensor:
        with torch.no_grad():
            stack, _ = cache.decompose_resid(pos_slice=-1, return_labels=True)
            return cache.logit_attrs(stack, ANSWER, incorrect_tokens=FOIL, pos_slice=-1)

    def heads() -> Tensor:
        with torch.no_grad():
            stack = cache.stack_head_results(pos_slice=-1)
            return cache.logit_attrs(stack, ANSWER, incorrect_tokens=FOIL, pos_slice=-1)

    def neurons() -> Tensor:
        with torch.no_grad():
            stack = cache.stack_neuron_results(LAYERS, pos_slice=-1)
            return cache.logit_attrs(stack, ANSWER, incorrect_tokens=FOIL, pos_slice=-1)

    flops = {"component": 0.0, "head": 2.0 * n_prompts * LAYERS * D * D, "neuron": 0.0}
    flops["neuron"] = 2.0 * n_prompts * LAYERS * D_MLP + 2.0 * LAYERS * D_MLP * D
    for by, theirs in (("component", components), ("head", heads), ("neuron", neurons)):
        yield Case(
            f"attribution by {by}, from a cache, {size}",
            lambda by=by: _attribution(rp.capture(model, tokens, cache=cache), by),
            "ActivationCache, stacked parts and logit_attrs",
            theirs,
            pick=_of_parts(model, by),
        )


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
