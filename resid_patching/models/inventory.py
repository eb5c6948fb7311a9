"""The modules of a model, listed once, to see at each call whether anything about them changed."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch


class Inventory:
    """Every module of a model, with what may change about it.

    Walking the tree of a bridge takes a millisecond and more; holding the list against the tree
    a tenth of it.

    Attributes:
        modules: every module, once.
        points: those that are hook points.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.modules = list(_walk(model))
        self.points: list[Any] = [m for m in self.modules if hasattr(m, "fwd_hooks")]
        registers = [module._modules for module in self.modules]
        self._parents = [register for register in registers if register]
        self._leaves = [register for register in registers if not register]
        self._children = [tuple(register.values()) for register in self._parents]
        weights = [module._parameters for module in self.modules]
        self._weights = [register for register in weights if register]
        self._weightless = [register for register in weights if not register]

    def is_current(self) -> bool:
        """Whether the model still consists of these modules."""
        if any(self._leaves) or any(self._weightless):
            return False
        children = map(tuple, map(dict.values, self._parents))
        return all(map(operator.eq, children, self._children))

    def fingerprint(self) -> tuple[int, int]:
        """Of the weights, edited or replaced, and of the number of hooks at every point."""
        weights = [
            # Tensors made under inference_mode count no versions.
            (id(parameter), 0 if parameter.is_inference() else parameter._version)
            for register in self._weights
            for parameter in register.values()
            if parameter is not None
        ]
        hooks = [len(point.fwd_hooks) for point in self.points]
        return hash(tuple(weights)), hash(tuple(hooks))

    def has_temporary_hooks(self) -> bool:
        """Whether any hook is on that does not belong to the model for good."""
        return any(
            not getattr(handle, "is_permanent", False)
            for point in self.points
            if point.fwd_hooks
            for handle in point.fwd_hooks
        )


def _walk(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Every module once; `Module.modules()` builds names on the way and is slow."""
    seen = {model}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        yield module
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
