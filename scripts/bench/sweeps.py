"""Rows that run a model again with parts of it replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import resid_patching as rp
from bench.common import (
    ANSWER,
    FOIL,
    LAYERS,
    LENGTH,
    PROMPTS,
    Case,
    Cases,
    ids,
    logit_difference,
    rest_flops,
)
from resid_patching.address import MLP, Attn, Head, Stream, hook_name

METRIC = rp.logit_diff(ANSWER, FOIL)
SOME, FEW = 24, 6  # targets that the peer is timed on, on short prompts and on a long one


def sweep_targets(model: Any) -> list[Any]:
    """144 heads, 12 attention layers, 12 MLPs."""
    layers = range(model.cfg.n_layers)
    return [*rp.heads(model), *(Attn(layer) for layer in layers), *(MLP(layer) for layer in layers)]


def ablations(model: Any) -> Cases:
    """Zero and mean sweeps of every head and layer, at all positions and at the last."""
    reference = rp.capture(model, ids(PROMPTS, LENGTH, seed=3))
    kinds = {"zero": rp.Zero(), "mean": rp.Mean(reference, over=("batch",))}
    tokens, targets = ids(PROMPTS, LENGTH), sweep_targets(model)
    for name, kind in kinds.items():
        yield from _sweeps(model, tokens, name, kind, targets, SOME)


def long_ablations(model: Any) -> Cases:
    """The zero sweep of every fourth target on one long prompt."""
    yield from _sweeps(model, ids(1, 512), "zero", rp.Zero(), sweep_targets(model)[::4], FEW)


def _sweeps(
    model: Any, tokens: Tensor, name: str, kind: Any, targets: list[Any], n_timed: int
) -> Cases:
    run = rp.capture(model, tokens)
    peers = targets[:: len(targets) // n_timed]
    prompts, length = tokens.shape
    # The peer's clean pass is made beforehand: what is timed of it can be scaled.
    with torch.no_grad():
        baseline = logit_difference(model(tokens))
    means = _means(model, kind) if name == "mean" else {}
    for position in (None, -1):
        rows = tokens.numel() if position is None else prompts
        keys = (length + 1) / 2 if position is None else length
        where = "all positions" if position is None else "last position"
        yield Case(
            f"{name} sweep of {len(targets)} targets, {where}, {prompts} x {length}",
            functools.partial(_total, run, targets, kind, position),
            f"run_with_hooks, {len(peers)} timed and scaled",
            functools.partial(by_hooks, model, tokens, peers, position, means, baseline),
            share=len(peers) / len(targets),
            pick=lambda values: values[[targets.index(target) for target in peers]],
            flops=sum(_rest_of(target, rows, keys, prompts) for target in targets),
        )


def _total(run: rp.Run, targets: Sequence[Any], kind: Any, position: int | None) -> Tensor:
    return rp.ablate(run, targets, kind, metric=METRIC, positions=position).total


def _rest_of(target: Any, rows: int, keys: float, read: int) -> float:
    if isinstance(target, MLP):
        return rest_flops(target.layer + 1, rows, keys, read)
    return rest_flops(target.layer, rows, keys, read, from_mid=True)


def _means(model: Any, kind: rp.Mean) -> dict[str, Tensor]:
    tokens = kind.reference.prompts.tokens
    wanted = {hook_name(target) for target in sweep_targets(model)}
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens, names_filter=lambda name: name in wanted)
    return {name: cache[name].mean(0) for name in wanted}


def by_hooks(
    model: Any,
    tokens: Tensor,
    targets: Sequence[Any],
    position: int | None,
    means: dict[str, Tensor],
    baseline: Tensor,
) -> Tensor:
    """The same sweep, one `run_with_hooks` a target: effects [target, prompt]."""
    with torch.no_grad():
        effects = []
        for target in targets:
            name = hook_name(target)
            hooks = [(name, _replacing(target, position, means.get(name)))]
            logits = model.run_with_hooks(tokens, fwd_hooks=hooks)
            effects.append(logit_difference(logits) - baseline)
    return torch.stack(effects)


def _replacing(target: Any, position: int | None, mean: Tensor | None) -> Callable[..., Tensor]:
    where = slice(None) if position is None else position

    def replace(activation: Tensor, hook: Any) -> Tensor:
        activation = activation.clone()
        new = 0 if mean is None else mean[where]
        if isinstance(target, Head):
            new = 0 if mean is None else mean[where][..., target.head, :]
            activation[:, where, target.head] = new
        else:
            activation[:, where] = new
        return activation

    return replace


def activation_patching(model: Any) -> Cases:
    """Every stream state at every position, from a source that differs at every token but one."""
    from transformer_lens import patching

    base, source = ids(seed=1), ids(seed=2)
    base[:, 0] = source[:, 0]
    states = [Stream(layer, "pre") for layer in range(LAYERS)]

    def ours() -> Tensor:
        how = rp.Resample(rp.capture(model, source))
        run = rp.capture(model, base)
        return rp.ablate(run, states, how, metric=METRIC, positions="each").patched.mean(-1)

    def theirs() -> Tensor:
        with torch.no_grad():
            _, clean = model.run_with_cache(source)
            return patching.get_act_patch_resid_pre(
                model, base, clean, lambda logits: logit_difference(logits).mean()
            )

    flops = 0.0
    for layer in range(LAYERS):
        for place in range(1, LENGTH):
            rows = PROMPTS * (LENGTH - place)
            flops += rest_flops(layer, rows, (LENGTH + place) / 2, PROMPTS)
    yield Case(
        f"activation patching, {LAYERS} states x {LENGTH} positions, {PROMPTS} x {LENGTH}",
        ours,
        "patching.get_act_patch_resid_pre (once)",
        theirs,
        flops=flops,
        once=True,
    )
