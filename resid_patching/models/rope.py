"""Rotary positions whose frequencies depend on the length of the input.

    longrope   the short factors up to the original context, the long factors beyond it
    dynamic    the trained frequencies up to the original context; beyond it those of the longest
               input so far, which Hugging Face keeps for later inputs

Hugging Face chooses once for a whole batch, by its longest prompt. So prompts share a forward pass
only where each would get the same frequencies alone, and no pass sees what an earlier one left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class LengthRope:
    """Rotary positions of a model, or of one type of its layers, that depend on the length.

    Attributes:
        module: Hugging Face's rotary embedding.
        kind: its `rope_type`.
        context: the original context, in tokens.
        prefix: of the names of its buffers; empty where all layers share them.
    """

    module: torch.nn.Module
    kind: str
    context: int
    prefix: str

    def length_class(self, length: int) -> int:
        """Equal for lengths that get the same frequencies."""
        return int(length > self.context) if self.kind == "longrope" else max(length, self.context)

    def forget(self) -> None:
        """Goes back to the frequencies that a new model has; tensors are replaced, not edited."""
        buffers, name = self.module._buffers, f"{self.prefix}inv_freq"
        cached = f"{self.prefix}max_seq_len_cached"
        trained = vars(self.module).get("original_max_seq_len", self.context)
        grown = getattr(self.module, cached, trained) > trained
        start = getattr(self.module, f"{self.prefix}original_inv_freq" if grown else name)
        buffers[name] = start.clone()
        if grown:
            setattr(self.module, cached, trained)


def length_ropes(modules: Iterable[torch.nn.Module]) -> tuple[LengthRope, ...]:
    """The rotary positions, among a model's modules, that depend on the length of the input."""
    found = []
    for module in modules:
        kinds = vars(module).get("rope_type")
        by_layer_type = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type, kind in by_layer_type.items():
            prefix = "" if layer_type is None else f"{layer_type}_"
            if not isinstance(kind, str) or f"{prefix}inv_freq" not in module._buffers:
                continue
            if kind != "longrope" and "dynamic" not in kind:
                continue
            if kind == "longrope":
                settings = vars(module)["config"].rope_parameters
                settings = settings if layer_type is None else settings[layer_type]
                context = settings["original_max_position_embeddings"]
            else:
                context = vars(module)["original_max_seq_len"]
            found.append(LengthRope(module, kind, int(context), prefix))
    return tuple(found)


@contextlib.contextmanager
def independent(ropes: Sequence[LengthRope]) -> Iterator[None]:
    """Makes a forward pass independent of those before it, and leaves nothing for those after."""
    kept = [(r.module, dict(vars(r.module)), dict(r.module._buffers)) for r in ropes]
    try:
        for rope in ropes:
            rope.forget()
        yield
    finally:
        for module, attributes, buffers in kept:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
