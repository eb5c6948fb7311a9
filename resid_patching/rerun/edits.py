"""Edits: what is put in the place of what, at which positions.

An edit replaces the activation of one site at some positions of every prompt. A variant is a set
of edits made together. Sites act in stages of a layer, and the stage says from where the model
has to be run again.

    stage 0   resid_pre (and input, embed, pos_embed in layer 0)
    stage 1   q, k, v, pattern, z of a head; the attention layer; its bias
    stage 2   resid_mid
    stage 3   neurons; the MLP; its bias
    stage 4   resid_post
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from resid_patching.address import (
    MLP,
    Address,
    Attn,
    AttnBias,
    Embed,
    Head,
    HeadInput,
    HeadNode,
    Input,
    MLPBias,
    Neuron,
    PosEmbed,
    Stream,
    hook_name,
)
from resid_patching.errors import AddressError, HeadMismatchError, UnsupportedModelError
from resid_patching.models import Memory, ModelView, report, require
from resid_patching.prompts import PositionIndex

Fill = Callable[[slice, Tensor], Tensor]
"""Called with rows of the batch and positions [rows, n]; gives the new values [rows, n, ...]."""

_ATTENTION = (Head, HeadInput, HeadNode, Attn, AttnBias)
_STATES = {"pre": 0, "mid": 2, "post": 4}


@dataclass(frozen=True, eq=False)
class Edit:
    """New values for one site at some positions.

    Attributes:
        site: what is replaced.
        positions: where, in every prompt.
        fill: gives the new values.
    """

    site: Address
    positions: PositionIndex
    fill: Fill


Variant = tuple[Edit, ...]


@dataclass(frozen=True, eq=False)
class HeldEdit(Edit):
    """An edit that is on whenever a run's model runs. Of embeddings, too, fill gives new values.

    Attributes:
        goes_on: whether it also acts on tokens that are written behind the prompts.
    """

    goes_on: bool


def stage(site: Address) -> tuple[int, int]:
    """The (layer, stage) at which a site acts.

    Raises:
        AddressError: the site cannot be replaced.
    """
    if isinstance(site, Input | Embed | PosEmbed):
        return (0, 0)
    if isinstance(site, Stream):
        return (site.layer, _STATES[site.place])
    if isinstance(site, _ATTENTION):
        return (site.layer, 1)
    if isinstance(site, MLP | Neuron | MLPBias):
        return (site.layer, 3)
    raise AddressError(
        f"{site} cannot be replaced; it is no sender, stream state or node of a head"
    )


def clean_hook(site: Address) -> str | None:
    """The hook that holds a site's own value in a run; None for a bias, which is a weight."""
    if isinstance(site, AttnBias | MLPBias):
        return None
    if isinstance(site, Embed):
        return hook_name(Stream(0, "pre"))
    return hook_name(site)


def site_value(view: ModelView, site: Address, activation: Tensor | None) -> Tensor:
    """A site's own value [rows, pos, ...], from the activation of its hook.

    `embed` needs the position embedding taken off first (`Embed` is not handled here).
    """
    match site:
        case AttnBias(layer):
            return view.b_O(layer).detach()[None, None]
        case MLPBias(layer):
            return view.b_out(layer).detach()[None, None]
    assert activation is not None
    match site:
        case HeadNode(_, head, "pattern"):
            return activation[:, head]
        case Head(_, head) | HeadNode(_, head, _) | HeadInput(_, head, _):
            return activation[:, :, head]
        case Neuron(_, index):
            return activation[:, :, index]
        case _:
            return activation


def require_site(view: ModelView, site: Address) -> None:
    """Raises AddressError where this model has no such site."""
    stage(site)
    layer = getattr(site, "layer", 0)
    if layer >= view.n_layers:
        raise AddressError(
            f"{site} does not exist: {view.name} has layers 0 to {view.n_layers - 1}"
        )
    if isinstance(site, Head | HeadInput | HeadNode):
        key_value = isinstance(site, HeadInput) and site.which in ("k", "v")
        count = view.n_kv_heads if key_value else view.n_heads
        if site.head >= count:
            kind = "key-value heads" if key_value and count < view.n_heads else "heads"
            raise AddressError(f"{site} does not exist: layer {layer} has {kind} 0 to {count - 1}")
    _require_part(view, site)


def _require_part(view: ModelView, site: Address) -> None:
    has_mlp = not view.attn_only
    if isinstance(site, MLP | MLPBias | Neuron) and not has_mlp:
        raise AddressError(f"{site} does not exist: {view.name} has no MLPs")
    if isinstance(site, Neuron) and site.index >= view.n_neurons(site.layer):
        last = view.n_neurons(site.layer) - 1
        raise AddressError(f"{site} does not exist: layer {site.layer} has neurons 0 to {last}")
    if isinstance(site, Stream) and site.place == "mid" and (view.parallel or not has_mlp):
        why = "attention and MLP read the same state" if view.parallel else "there are no MLPs"
        raise AddressError(f"{site} does not exist in {view.name}: {why}. Use resid_pre or _post.")
    if isinstance(site, PosEmbed) and not view.has_pos_embed:
        raise AddressError(f"pos_embed does not exist: {view.name} adds no learned position")
    if isinstance(site, AttnBias | MLPBias):
        _require_added(view, site)
    name = clean_hook(site)
    if name is not None and name not in view.hook_points:
        raise AddressError(f"{site} cannot be read: {view.name} ({view.kind}) has no hook {name}")


def _require_added(view: ModelView, bias: AttnBias | MLPBias) -> None:
    """Raises where a norm or a factor stands between a bias and the stream."""
    parts, write = ("heads", "attn") if isinstance(bias, AttnBias) else ("neurons", "mlp")
    if failure := report(view).failures.get(parts):
        raise type(failure)(
            f"{bias} cannot be replaced: in {view.name} ({view.kind}) {parts} and bias do not sum "
            f"to what the layer adds to the stream. Replace {write}.{bias.layer}, the whole write."
        )


_acting: Memory[set[str]] = Memory(lambda view: set())


def require_acting(view: ModelView, sites: Iterable[Address]) -> None:
    """Raises where what is put at a head's hooks is not the head's, or does not act.

    TransformerBridge leaves the attention of some models to the wrapped module, and shows its
    pattern only afterwards: the hook fires, and an edit there is thrown away. And where heads mix
    values of another width than their queries and keys, it lays the hooks out in another way.

    Raises:
        HeadMismatchError: the hook does not show one vector for each head.
        UnsupportedModelError: the edit is thrown away.
        HookNotFiredError: the hook never fires.
    """
    of_heads = [site for site in sites if isinstance(site, Head | HeadNode | HeadInput)]
    if any(not is_inside_attention(site) for site in of_heads):
        require(view, "z")
    inside = {hook_name(site): site for site in of_heads if is_inside_attention(site)}
    if not inside:
        return
    known = _acting.of(view)
    for name in inside.keys() - known:
        site = inside[name]
        if not _acts(view, site):
            raise UnsupportedModelError(
                f"{site} cannot be replaced: {view.name} ({view.kind}) has used the value before "
                f"its hook {name} shows it, and throws an edit away. Replace z instead."
            )
        known.add(name)


def is_inside_attention(site: Address) -> TypeGuard[HeadInput | HeadNode]:
    """Whether a site acts through the attention pattern or values: q, k, v or the pattern."""
    is_pattern = isinstance(site, HeadNode) and site.which == "pattern"
    return is_pattern or isinstance(site, HeadInput)


def _acts(view: ModelView, site: HeadInput | HeadNode) -> bool:
    """Whether noise at a hook changes what the layer writes, on a few tokens.

    Raises:
        HeadMismatchError: the hook is not laid out by heads.
    """
    name, write = hook_name(site), hook_name(Attn(site.layer))
    is_key_value = isinstance(site, HeadInput) and site.which in ("k", "v")
    count = view.n_kv_heads if is_key_value else view.n_heads
    n = min(3 if count == 4 else 4, view.n_ctx)  # so that positions are not taken for heads
    tokens = torch.arange(n, device=view.input_device)[None] % view.d_vocab
    generator = torch.Generator().manual_seed(0)
    seen: list[Tensor] = []
    shape: list[int] = []

    def disturb(activation: Tensor) -> Tensor:
        shape[:] = activation.shape
        noise = torch.rand(activation.shape, generator=generator, device="cpu")
        return activation + noise.to(activation)

    def read(activation: Tensor) -> None:
        seen.append(activation.detach().clone())

    view.forward(tokens, {write: read})
    view.forward(tokens, {name: disturb, write: read})
    by_head = [1, n, count] if isinstance(site, HeadInput) else [1, count, n]
    if shape[:3] != by_head or len(shape) != 4:
        raise HeadMismatchError(
            f"{site} cannot be replaced: {name} of {view.name} ({view.kind}) is laid out as "
            f"{shape} for {n} tokens and {count} heads. Replace the whole attn.{site.layer}."
        )
    return not torch.equal(seen[0], seen[-1])
