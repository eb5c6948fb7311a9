"""Targets: what can be replaced, listed and checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from resid_patching.ablation.attending import Attention
from resid_patching.address import (
    MLP,
    Address,
    Attn,
    AttnBias,
    Edge,
    Embed,
    Head,
    HeadInput,
    HeadNode,
    Input,
    MLPBias,
    Neuron,
    PosEmbed,
    Stream,
    parse,
)
from resid_patching.decomposition import writers_of
from resid_patching.errors import AddressError
from resid_patching.models import Model, ModelView
from resid_patching.paths import view_of
from resid_patching.rerun import require_site
from resid_patching.run import Run

Target: TypeAlias = Address | Attention
Row: TypeAlias = tuple[Target, ...]
"""What is replaced together, in one row of the result."""
Targets: TypeAlias = (
    str | Target | Edge | Sequence[str | Target | tuple[str | Target, ...]] | Sequence[str | Edge]
)


def heads(model: Model | Run) -> list[Head]:
    """Every head of a model, in order of layers."""
    view = view_of(model)
    return [Head(layer, h) for layer in range(view.n_layers) for h in range(view.n_heads)]


def writers(model: Model | Run) -> list[Address]:
    """Every component that writes to the stream: embeddings, attention layers, MLPs."""
    return list(writers_of(view_of(model), "component"))


def streams(model: Model | Run) -> list[Stream]:
    """Every state of the stream between layers, and in their middle where there is one."""
    view = view_of(model)
    has_mid = not (view.parallel or view.attn_only)
    places = ("pre", "mid") if has_mid else ("pre",)
    found = [Stream(layer, place) for layer in range(view.n_layers) for place in places]
    return [*found, Stream(view.n_layers - 1, "post")]


def neurons(model: Model | Run, layer: int) -> list[Neuron]:
    """Every neuron of one layer.

    Raises:
        AddressError: no such layer.
    """
    view = view_of(model)
    if not 0 <= layer < view.n_layers:
        raise AddressError(f"{view.name} has layers 0 to {view.n_layers - 1}, not {layer}")
    return [Neuron(layer, index) for index in range(view.n_neurons(layer))]


def list_targets(targets: Targets) -> list[Any]:
    """Targets as a list, also of one."""
    is_many = isinstance(targets, Iterable) and not isinstance(targets, str)
    given: Any = targets
    return list(given) if is_many else [given]


def windows_of(targets: Targets, size: int) -> list[Row]:
    """Neighbours of a list as rows of `ablate`: `rp.windows_of(["attn.0", "attn.1", ...], 5)`.

    Each window holds `size` consecutive targets, and begins one target after the window before it.
    There are no shorter windows at the ends: n targets give n - size + 1 windows, so the first and
    the last target are in one window alone. Neighbours are those of the list, whatever their
    layers: give one target a layer, or a tuple a layer, whose members stay together.

    Args:
        targets: in the order of the model.
        size: how many of them a window holds.

    Raises:
        AddressError: no address, or a size below 1 or above the number of targets.
    """
    rows = _read_rows(targets)
    if not 1 <= size <= len(rows):
        raise AddressError(f"windows of {size} were asked for, of {len(rows)} targets")
    starts = range(len(rows) - size + 1)
    return [tuple(one for row in rows[n : n + size] for one in row) for n in starts]


def find_rows(view: ModelView, targets: Targets, *, joint: bool = False) -> list[Row]:
    """Targets as rows, each of what is replaced together.

    Args:
        view: the model, which must have all of them.
        targets: single targets, tuples of them, or texts such as "9.6 + 9.9".
        joint: all of them in one row.

    Raises:
        AddressError: a target that the model lacks; the same twice in a row, or a part of another;
            a row that is given twice; or one tuple in the place of a list.
    """
    rows = _read_rows(list_targets(targets) if joint else targets)
    if joint:
        rows = [tuple(target for row in rows for target in row)]
    seen: dict[frozenset[Target], Row] = {}
    for row in rows:
        for target in row:
            require_site(view, site_of(target))
        require_apart(row)
        places = frozenset(map(_place, row))
        if places in seen:
            raise _twice(name_of_row(row), name_of_row(seen[places]))
        seen[places] = row
    return rows


def _read_rows(targets: Targets) -> list[Row]:
    if isinstance(targets, tuple):
        raise AddressError(
            'one tuple of targets can be read in two ways: write [("9.6", "9.9")] for one row, '
            'in which they are replaced together, or ["9.6", "9.9"] for one row each'
        )
    return [_read_row(target) for target in list_targets(targets)]


def _read_row(given: str | Target | tuple[str | Target, ...]) -> Row:
    """One row: a tuple, a text with "+" between its parts, or a single target."""
    if isinstance(given, str):
        given = tuple(given.split("+"))
    if not isinstance(given, tuple):
        given = (given,)
    if not given:
        raise AddressError("an empty tuple names no target")
    return tuple(one if isinstance(one, Attention) else parse(one) for one in given)


def name_of_row(row: Row) -> str:
    """What a row is called in results."""
    return " + ".join(map(str, row)) or "nothing"


def site_of(target: Target) -> Address:
    """The place of the model at which a target is replaced."""
    return target.node if isinstance(target, Attention) else target


def _place(target: Target) -> Target:
    """What a target replaces: a head is replaced by its z."""
    if isinstance(target, HeadNode) and target.which == "z":
        return Head(target.layer, target.head)
    return target


def _twice(one: str, other: str) -> AddressError:
    return AddressError(f"{one} was given twice" + (f" (once as {other})" if other != one else ""))


def require_apart(row: Row) -> None:
    """Raises AddressError where a row holds a place twice, or a place and a part of it."""
    seen: dict[Target, Target] = {}
    for target in row:
        place = _place(target)
        if place in seen:
            raise _twice(str(target), str(seen[place]))
        seen[place] = target
    for target in row:
        for whole in wholes_of(target):
            if whole in seen:
                raise AddressError(
                    f"{target} is a part of {whole}, so replacing both is replacing {whole} "
                    "alone; give the whole or its parts"
                )


def wholes_of(target: Target) -> tuple[Address, ...]:
    """What a target is a part of: the start, a layer's attention or MLP, a head's whole pattern."""
    match target:
        case Attention(node):
            return node, Attn(node.layer)
        case Head(layer) | AttnBias(layer) | HeadInput(layer) | HeadNode(layer):
            return (Attn(layer),)
        case Neuron(layer) | MLPBias(layer):
            return (MLP(layer),)
        case Embed() | PosEmbed():
            return (Input(),)
        case _:
            return ()
