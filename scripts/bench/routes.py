"""Rows on paths and edges: to the logits, to queries, every edge alone, and edges together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch import Tensor

import resid_patching as rp
from bench.common import (
    ANSWER,
    D_MLP,
    FOIL,
    LAYERS,
    LENGTH,
    PROMPTS,
    VOCAB,
    Case,
    Cases,
    D,
    block_flops,
    forward,
    forward_flops,
    ids,
    logit_difference,
)
from resid_patching.address import MLP, Attn, Head, Logits, MLPIn, hook_name

METRIC = rp.logit_diff(ANSWER, FOIL)

# Where base and source differ: the second name alone (a swapped subject), or from the first name
# on (three other names).
ONE_TOKEN, THREE_TOKENS = (10,), (3, 5, 10)
QUERIES = ("9.9.q", "9.6.q", "10.0.q")


def pair(places: Sequence[int] = THREE_TOKENS) -> tuple[Tensor, Tensor]:
    """Base and source ids that differ at some places."""
    generator = torch.Generator().manual_seed(1)
    base = ids(seed=1)
    source = base.clone()
    source[:, list(places)] = torch.randint(VOCAB, (PROMPTS, len(places)), generator=generator)
    return base, source


def paths(model: Any) -> Cases:
    """All heads to the logits, and to the queries of three heads, at the last position.

    Both captures are made anew each time. The peer is the paper's passes with hooks, one sender
    at a time.
    """
    base, source = pair()
    senders = rp.heads(model)
    some = senders[:: len(senders) // 4]
    mlps = sum(4.0 * PROMPTS * D * D_MLP * (LAYERS - head.layer) for head in senders)
    captures = 2 * forward_flops(PROMPTS, LENGTH)
    after = block_flops(PROMPTS, LENGTH) * sum(
        LAYERS - 9 - (head.layer >= 9) for head in senders if head.layer < 10
    )
    for name, to, extra in (("logits", "logits", 0.0), ("q of three heads", QUERIES, after)):

        def ours(to: Any = to) -> Tensor:
            runs = rp.capture(model, base), rp.capture(model, source)
            ends = to if isinstance(to, str) else list(to)
            how = rp.Path(to=ends, using=rp.Resample(runs[1]), mlps="recompute")
            return rp.ablate(runs[0], senders, how, metric=METRIC, positions=-1).total

        yield Case(
            f"paths of {len(senders)} heads -> {name}, last position, {PROMPTS} x {LENGTH}",
            ours,
            f"the paper's three passes, {len(some)} senders timed and scaled",
            lambda to=to: three_passes(model, base, source, some, to),
            share=len(some) / len(senders),
            pick=lambda values: values[[senders.index(head) for head in some]].nan_to_num(),
            flops=captures + mlps + extra,
            plain=forward(model, base),
        )


def three_passes(
    model: Any, base: Tensor, source: Tensor, senders: Sequence[Any], to: Any
) -> Tensor:
    """The same by the paper's algorithm, one sender at a time [sender, prompt]."""
    layers = range(model.cfg.n_layers)
    effects = []
    receivers = [] if to == "logits" else [rp.parse(text) for text in to]
    with torch.no_grad():
        logits, clean = model.run_with_cache(base)
        _, other = model.run_with_cache(source)
        baseline = logit_difference(logits)
        for head in senders:
            hooks = [(hook_name(Attn(n)), _holding(clean[hook_name(Attn(n))])) for n in layers]
            z = clean[hook_name(head)].clone()
            z[:, -1, head.head] = other[hook_name(head)][:, -1, head.head]
            hooks[head.layer] = (hook_name(Head(head.layer, 0)), _holding(z))
            seen: dict[str, Tensor] = {}
            hooks += [
                (hook_name(receiver), _keeping(seen, hook_name(receiver))) for receiver in receivers
            ]
            logits = model.run_with_hooks(base, fwd_hooks=hooks)
            if receivers:
                writes = [
                    (hook_name(receiver), _writing(seen[hook_name(receiver)], receiver.head))
                    for receiver in receivers
                ]
                logits = model.run_with_hooks(base, fwd_hooks=writes)
            effects.append(logit_difference(logits) - baseline)
    return torch.stack(effects)


def _holding(value: Tensor) -> Callable[..., Tensor]:
    return lambda activation, hook: value


def _keeping(seen: dict[str, Tensor], name: str) -> Callable[..., None]:
    def keep(activation: Tensor, hook: Any) -> None:
        seen[name] = activation.clone()

    return keep


def _writing(value: Tensor, head: int) -> Callable[..., Tensor]:
    def write(activation: Tensor, hook: Any) -> Tensor:
        activation = activation.clone()
        activation[:, -1, head] = value[:, -1, head]
        return activation

    return write


def grids(model: Any) -> Cases:
    """Every head to every later head's query, beside TransformerLens 4.3's own tool.

    Rows before the first token that differs are the same in base and source and cost us nothing.
    TransformerLens is timed on the 24 edges of one sender of the last layer but two; the whole
    grid takes it thousands of forward passes.
    """
    try:
        from transformer_lens.patching import get_act_patch_direct_path
    except ImportError:
        return
    ends = rp.receivers(*rp.inputs(model, "q"))
    senders = rp.heads(model)
    layer = LAYERS - 3
    timed = (LAYERS - layer - 1) * model.cfg.n_heads
    n_edges = sum(12 * 12 * end for end in range(LAYERS))
    for places in (ONE_TOKEN, THREE_TOKENS):
        base, source = pair(places)

        def ours(base: Tensor = base, source: Tensor = source) -> Tensor:
            runs = rp.capture(model, base), rp.capture(model, source)
            how = rp.Path(to=ends, using=rp.Resample(runs[1]), mlps="freeze")
            return rp.ablate(runs[0], senders, how, metric=METRIC).patched.mean(-1)

        with torch.no_grad():
            _, clean = model.run_with_cache(source)
            _, corrupted = model.run_with_cache(base)

        def theirs(base: Tensor = base, clean: Any = clean, corrupted: Any = corrupted) -> Tensor:
            with torch.no_grad(), redirect_stderr(StringIO()):
                found = get_act_patch_direct_path(
                    model,
                    base,
                    clean,
                    corrupted,
                    lambda logits: logit_difference(logits).mean(),
                    layer,
                    0,
                    verbose=False,
                )
            return found[layer + 1 :].flatten()

        yield Case(
            f"grid of {n_edges} head -> q edges, prompts differ from position {places[0]} on",
            ours,
            f"patching.get_act_patch_direct_path, {timed} edges timed once and scaled",
            theirs,
            share=timed / n_edges,
            pick=lambda values: values[senders.index(Head(layer, 0))][-timed:],
            flops=sum(_edges(LENGTH - places[0])),
            once=True,
        )


def _edges(n_rows: int) -> Iterator[float]:
    """What the edges into each layer need.

    In the receiver's layer the product into the MLP is of rank d_head, and in the last layer keys
    and values are folded onto the few queries that are read.
    """
    rows, read = PROMPTS * n_rows, PROMPTS
    keys = LENGTH - (n_rows - 1) / 2
    d_head = D // 12
    for layer in range(1, LAYERS):
        edges = 144 * layer
        last = read * 2 * (4 * D * D + 2 * D * D_MLP)
        if layer == LAYERS - 1:
            yield edges * (
                4 * read * LENGTH * d_head + 2 * read * d_head * D + read * 4 * D * D_MLP
            )
            continue
        own = 2 * rows * (d_head * D + d_head * D_MLP + D * D_MLP) + 4 * rows * keys * d_head
        between = (LAYERS - 2 - layer) * block_flops(rows, keys)
        yield edges * (own + between + last + 2 * rows * 2 * 12 * D)


def edges(model: Any) -> Cases:
    """Every edge of the model replaced alone, and sets of edges replaced together.

    The peer of single edges is one forward pass an edge with a hook at the receiver, on 24 edges of
    each family, timed and scaled. Sets have no peer; they are told in plain forward passes.
    """
    base, source = pair(range(3, LENGTH))
    every = rp.edges(model)
    families: dict[str, list[rp.Edge]] = {}
    for edge in every:
        kind = getattr(edge.receiver, "which", type(edge.receiver).__name__)
        families.setdefault(kind, []).append(edge)
    some = [e for found in families.values() for e in found[:: max(1, len(found) // 24)][:24]]

    def alone() -> Tensor:
        runs = rp.capture(model, base), rp.capture(model, source)
        return rp.ablate(runs[0], every, rp.Resample(runs[1]), metric=METRIC).total

    numbers = [every.index(edge) for edge in some]
    yield Case(
        f"all {len(every):,} edges one by one, {PROMPTS} x {LENGTH}, differ from position 3 on",
        alone,
        f"a hooked forward pass an edge, {len(some)} edges of all families timed and scaled",
        lambda: hooked_edges(model, base, source, some),
        share=len(some) / len(every),
        pick=lambda values: values[numbers],
        once=True,
    )
    runs = rp.capture(model, base), rp.capture(model, source)
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randperm(len(every), generator=generator)[:1000].tolist()
    for name, chosen in (("1,000", [every[n] for n in drawn]), (f"all {len(every):,}", every)):

        def together(chosen: list[rp.Edge] = chosen) -> Tensor:
            how = rp.Resample(runs[1])
            return rp.ablate(runs[0], chosen, how, metric=METRIC, joint=True).total

        yield Case(
            f"{name} edges together, {PROMPTS} x {LENGTH}", together, plain=forward(model, base)
        )


def hooked_edges(model: Any, base: Tensor, source: Tensor, edges: Sequence[rp.Edge]) -> Tensor:
    """The same the usual way: what the receiver reads by hand, then a forward pass with a hook."""
    effects = []
    with torch.no_grad():
        logits, clean = model.run_with_cache(base)
        _, other = model.run_with_cache(source)
        baseline = logit_difference(logits)
        for edge in edges:
            change = _write(model, other, edge.sender) - _write(model, clean, edge.sender)
            receiver = edge.receiver
            if isinstance(receiver, Logits):
                state = clean[f"blocks.{LAYERS - 1}.hook_resid_post"] + change
                effects.append(logit_difference(model.unembed(model.ln_final(state))) - baseline)
                continue
            block = model.blocks[receiver.layer]
            if isinstance(receiver, MLPIn):
                name = hook_name(MLP(receiver.layer))
                state = clean[f"blocks.{receiver.layer}.hook_resid_mid"] + change
                hook = _holding(block.mlp(block.ln2(state)))
            else:
                name, head = hook_name(receiver), receiver.head
                state = block.ln1(clean[f"blocks.{receiver.layer}.hook_resid_pre"] + change)
                weight = getattr(block.attn, f"W_{receiver.which.upper()}")[head]
                bias = getattr(block.attn, f"b_{receiver.which.upper()}")[head]
                hook = _putting(state @ weight + bias, head)
            logits = model.run_with_hooks(base, fwd_hooks=[(name, hook)])
            effects.append(logit_difference(logits) - baseline)
    return torch.stack(effects)


def _write(model: Any, cache: Any, sender: Any) -> Tensor:
    value = cache[hook_name(sender)]
    if not isinstance(sender, Head):
        return value
    return value[:, :, sender.head] @ model.blocks[sender.layer].attn.W_O[sender.head]


def _putting(value: Tensor, head: int) -> Callable[..., Tensor]:
    def put(activation: Tensor, hook: Any) -> Tensor:
        activation = activation.clone()
        activation[:, :, head] = value
        return activation

    return put
