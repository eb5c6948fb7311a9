"""A weight of a module, where it has one that can be read as numbers, and why it cannot be."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def optional_weight(owner: Any, name: str) -> Tensor | None:
    """A weight of a module, or None where it shows none that can be read.

    Args:
        owner: the module, or None.
        name: TransformerLens's name of the weight. On a TransformerBridge it is a property, which
            raises where the wrapped model has no such matrix.
    """
    found = _look_up(owner, name)
    return found if isinstance(found, Tensor) else None


def why_unread(owner: Any, name: str) -> str | None:
    """Why a weight that is there cannot be read, as half a sentence; None where it is absent."""
    found = _look_up(owner, name)
    return found if isinstance(found, str) else None


def _look_up(owner: Any, name: str) -> Tensor | str | None:
    try:
        weight = getattr(owner, name, None)
    except NotImplementedError as error:
        return str(error).split(". ")[0].rstrip(".")
    if not isinstance(weight, Tensor):
        return None
    if weight.is_meta:
        return (
            f"{name} is offloaded to disk or to the CPU, so it has no numbers outside the forward "
            "pass; load the whole model into memory"
        )
    if not weight.is_floating_point() or weight.element_size() < 2:
        kept = str(weight.dtype).removeprefix("torch.")
        return f"{name} is quantised (kept as {kept} {list(weight.shape)}); load it unquantised"
    return weight
