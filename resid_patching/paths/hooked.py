"""What receivers read, by a forward pass with everything but the senders held: any model's way.

The base prompts are run with the senders at their new values and all other heads, and with
mlps="freeze" all MLPs, at their clean ones; what the receivers see is kept. This is the third pass
of the paper's algorithm, made where the closed form does not cover a model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from resid_patching.address import (
    MLP,
    Attn,
    Head,
    HeadInput,
    MLPIn,
    Neuron,
    Receiver,
    Stream,
    hook_name,
)
from resid_patching.models import HookFunction, ModelView, take
from resid_patching.paths.closed import MLPs
from resid_patching.paths.receivers import site_of
from resid_patching.rerun import Changes, Chunk, Edit, Variant


def read_hooked(
    chunk: Chunk,
    index: Tensor,
    senders: Sequence[Variant],
    mlps: MLPs,
    receivers: Sequence[Receiver],
) -> dict[Receiver, Tensor]:
    """Each receiver's value with only the senders changed.

    Args:
        chunk: the prompts, after a clean pass that kept every sublayer's write.
        index: the senders' positions [rows, positions], -1 where a prompt has none.
        senders: the edits of each.
        mlps: what MLPs behind a sender do.
        receivers: which.

    Returns:
        Values [sender, rows, positions, ...] (of an MLP: its write), exactly the clean ones where
        no sender's value differs.
    """
    with_neurons = {e.site.layer for s in senders for e in s if isinstance(e.site, Neuron)}
    apart = [r for r in receivers if isinstance(r, MLPIn) and r.layer in with_neurons]
    found = _pass(chunk, index, senders, mlps, [r for r in receivers if r not in apart])
    for receiver in apart:
        # A neuron that is held would be held in what its own MLP makes of its input, too.
        free = [tuple(e for e in s if not _is_neuron(e, receiver.layer)) for s in senders]
        found |= _pass(chunk, index, free, mlps, [receiver])
    return found


def _is_neuron(edit: Edit, layer: int) -> bool:
    return isinstance(edit.site, Neuron) and edit.site.layer == layer


def _pass(
    chunk: Chunk,
    index: Tensor,
    senders: Sequence[Variant],
    mlps: MLPs,
    receivers: Sequence[Receiver],
) -> dict[Receiver, Tensor]:
    """One forward pass of a stack, with the senders at their new values and the rest held."""
    if not receivers:
        return {}
    wanted = {receiver: site_of(chunk.view, receiver) for receiver in receivers}
    names = {name for site in wanted.values() for name in _read_names(site)}
    seen: dict[str, Tensor] = {}
    hooks = _hooks(chunk, senders, mlps, names, seen)
    chunk.view.forward(chunk.clean.tokens.repeat(len(senders), 1), hooks)
    moved = Changes(chunk.clean, senders).moved_at(index)
    found: dict[Receiver, Tensor] = {}
    for receiver, site in wanted.items():
        value = _value(site, seen).unflatten(0, (len(senders), len(chunk.clean)))
        value = torch.stack([take(one, index) for one in value])
        clean = take(_value(site, chunk.clean.acts), index)
        mask = moved.reshape(*moved.shape, *[1] * (value.ndim - moved.ndim))
        found[receiver] = torch.where(mask, value, clean)
    return found


def _hooks(
    chunk: Chunk, senders: Sequence[Variant], mlps: MLPs, names: set[str], seen: dict[str, Tensor]
) -> dict[str, HookFunction]:
    """At each hook: hold the clean value, put the senders' in, keep what is read, in this order.

    Of an MLP what it makes of its own input is read, so there the reading comes first.
    """
    frozen = {name: chunk.clean.acts[name] for name in _frozen(chunk, senders, mlps)}
    changes = chunk.clean.hooks(senders)
    put = chunk.clean.hooks([()] * len(senders))  # by the run's intervention
    n_prompts, n = len(chunk.clean), len(senders)
    writes = {hook_name(MLP(layer)) for layer in range(chunk.view.n_layers)}

    def step(name: str) -> HookFunction:
        def run(activation: Tensor) -> Tensor | None:
            if name in names and name in writes:
                own = put[name](activation) if name in put else None
                seen[name] = (activation if own is None else own).detach().clone()
            new = activation
            if name in frozen:
                new = frozen[name].expand(n_prompts, *frozen[name].shape[1:])
                new = new.repeat(n, *[1] * (new.ndim - 1)).to(activation.dtype)
            if name in changes:
                changed = changes[name](new)
                new = new if changed is None else changed
            if name in names and name not in writes:
                seen[name] = new.detach().clone()
            return None if new is activation else new

        return run

    return {name: step(name) for name in {*frozen, *changes, *names}}


def names_to_keep(view: ModelView) -> set[str]:
    """The writes that are held."""
    layers = range(view.n_layers)
    kept = {hook_name(Attn(layer)) for layer in layers}
    return kept if view.attn_only else kept | {hook_name(MLP(layer)) for layer in layers}


def _frozen(chunk: Chunk, senders: Sequence[Variant], mlps: MLPs) -> set[str]:
    """Hooks that are held at their clean values before the senders are changed.

    In a layer with a sender inside a sublayer its parts are held, so that the sublayer itself
    makes its write of them; elsewhere the write is.
    """
    layers = range(chunk.view.n_layers)
    edits = [edit.site for sender in senders for edit in sender]
    with_heads = {site.layer for site in edits if isinstance(site, Head)}
    with_neurons = {site.layer for site in edits if isinstance(site, Neuron)}
    found = {hook_name(Head(layer, 0) if layer in with_heads else Attn(layer)) for layer in layers}
    if mlps == "freeze" and not chunk.view.attn_only:
        found |= {
            hook_name(Neuron(layer, 0) if layer in with_neurons else MLP(layer)) for layer in layers
        }
    return found


def _read_names(site: HeadInput | MLP | Stream) -> list[str]:
    if isinstance(site, Stream) and site.place == "mid":
        return [hook_name(Stream(site.layer, "pre")), hook_name(Attn(site.layer))]
    return [hook_name(site)]


def _value(site: HeadInput | MLP | Stream, acts: dict[str, Tensor]) -> Tensor:
    value = sum((acts[name] for name in _read_names(site)[1:]), acts[_read_names(site)[0]])
    return value[:, :, site.head] if isinstance(site, HeadInput) else value
