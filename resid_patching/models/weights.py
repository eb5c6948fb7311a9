"""A weight of a module, where it has one that can be read as numbers, and why it cannot be."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor


def optional_weight(owner: Any, name: str) -> Tensor | None:
    """A weight of a module, or None where it shows none that can be read.

    Args:
        owner: the module, or None.
        name: TransformerLens's name of the weight. On a TransformerBridge it is a property, which
            raises where the wrapped model has no such matrix, or none that it can lay out by heads.
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
    except (NotImplementedError, ValueError) as error:
        said = str(error)
        if "meta device" in said:
            return _offloaded(name)
        if "quantiz" in said:
            kept = re.search(r"because (it is a \S+|its dtype is [\w.]+)", said)
            return f"{name} is quantised" + (f": {kept[1]}" if kept else "")
        return said.split(". ")[0].rstrip(".")
    if not isinstance(weight, Tensor):
        return None
    if weight.is_meta:
        return _offloaded(name)
    if not weight.is_floating_point() or weight.element_size() < 2:
        return f"{name} is quantised: its dtype is {weight.dtype}"
    return weight


def _offloaded(name: str) -> str:
    return (
        f"{name} is offloaded to disk or to the CPU, so it has no numbers outside the forward "
        "pass; load the whole model into memory"
    )
