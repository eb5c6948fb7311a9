"""Targets: what can be replaced, listed and checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from resid_patching.address import (
    MLP,
    Address,
    Attn,
    AttnBias,
    Head,
    HeadInput,
    HeadNode,
    MLPBias,
    Neuron,
    Stream,
    parse,
)
from resid_patching.decomposition import writers_of
from resid_patching.errors import AddressError
from resid_patching.models import ModelView
from resid_patching.paths import view_of
from resid_patching.rerun import require_site

Targets: TypeAlias = str | Address | Sequence[str | Address]


def heads(model: Any) -> list[Head]:
    """Every head of a model, in order of layers."""
    view = view_of(model)
    return [Head(layer, h) for layer in range(view.n_layers) for h in range(view.n_heads)]


def writers(model: Any) -> list[Address]:
    """Every component that writes to the stream: embeddings, attention layers, MLPs."""
    return list(writers_of(view_of(model), "component"))


def streams(model: Any) -> list[Stream]:
    """Every state of the stream between layers, and in their middle where there is one."""
    view = view_of(model)
    has_mid = not (view.parallel or view.attn_only)
    places = ("pre", "mid") if has_mid else ("pre",)
    found = [Stream(layer, place) for layer in range(view.n_layers) for place in places]
    return [*found, Stream(view.n_layers - 1, "post")]


def neurons(model: Any, layer: int) -> list[Neuron]:
    """Every neuron of one layer.

    Raises:
        AddressError: no such layer.
    """
    view = view_of(model)
    if not 0 <= layer < view.n_layers:
        raise AddressError(f"{view.name} has layers 0 to {view.n_layers - 1}, not {layer}")
    return [Neuron(layer, index) for index in range(view.n_neurons(layer))]


def find_sites(view: ModelView, targets: Targets) -> list[Address]:
    """Targets as addresses of this model, each once."""
    if isinstance(targets, str) or not isinstance(targets, Iterable):
        targets = [targets]
    sites = [parse(target) for target in targets]
    for site in sites:
        require_site(view, site)
    seen: dict[Address, Address] = {}
    for site in sites:
        place = _written_place(site)
        if place in seen:
            other = "" if seen[place] == site else f" (once as {seen[place]})"
            raise AddressError(f"{site} was given twice{other}")
        seen[place] = site
    return sites


def _written_place(site: Address) -> Address:
    """What a site replaces: a head is replaced by its z."""
    if isinstance(site, HeadNode) and site.which == "z":
        return Head(site.layer, site.head)
    return site


def require_apart(sites: Sequence[Address]) -> None:
    """Raises AddressError where a layer is replaced together with a part of it."""
    for site in sites:
        whole = _whole_layer(site)
        if whole in sites:
            raise AddressError(
                f"{site} is a part of {whole}, so replacing both is replacing {whole} alone; give "
                "the whole or its parts"
            )


def _whole_layer(site: Address) -> Attn | MLP | None:
    """The attention layer or MLP that a site is inside of."""
    match site:
        case Head(layer) | AttnBias(layer) | HeadInput(layer) | HeadNode(layer):
            return Attn(layer)
        case Neuron(layer) | MLPBias(layer):
            return MLP(layer)
        case _:
            return None
