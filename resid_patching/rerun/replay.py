"""The model's own blocks, called again on changed states, with edits made at its hooks.

A clean run records what each block was called with (mask, positions, rotation tables). A replay
calls the same blocks on a stack of changed states with the same arguments; caches of keys and
values are left out. Hooks fire as ever, so whatever a block does is done.

Stacks lie [variant, prompt] on the batch axis: row v * n_prompts + i.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from resid_patching.address import (
    MLP,
    Attn,
    AttnBias,
    Embed,
    Head,
    HeadInput,
    HeadNode,
    MLPBias,
    Neuron,
    PosEmbed,
    Stream,
    hook_name,
)
from resid_patching.models import HookFunction, ModelView
from resid_patching.rerun.edits import Edit, HeldEdit, Variant

Change = Callable[[Tensor], Tensor]


class BlockCalls:
    """What each block was called with in a clean run of some prompts."""

    def __init__(self, view: ModelView) -> None:
        self.view = view
        self.calls: dict[int, tuple[bool, tuple[Any, ...], dict[str, Any]]] = {}
        self.n_prompts = 0

    def record(self, run_forward: Callable[[], Any]) -> None:
        """Runs a forward pass and keeps each block's arguments."""
        handles = []
        for layer, block in enumerate(self.view.model.blocks):
            handles.append(block.register_forward_pre_hook(self._keeper(layer), with_kwargs=True))
        try:
            run_forward()
        finally:
            for handle in handles:
                handle.remove()

    def _keeper(self, layer: int) -> Callable[..., None]:
        def keep(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self.n_prompts = hidden.shape[0]
            named = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            self.calls[layer] = (bool(args), args[1:], named)  # the states are kept elsewhere

        return keep

    def arguments(self, layer: int) -> dict[str, Any]:
        """The keyword arguments a block was called with."""
        return self.calls.get(layer, (False, (), {}))[2]

    def call(self, layer: int, states: Tensor) -> Tensor:
        """A block on stacked states [stack, pos, d_model]."""
        by_position, others, kwargs = self.calls[layer]
        times = states.shape[0] // self.n_prompts
        rest = tuple(self._stacked(value, times) for value in others)
        named = {name: self._stacked(value, times, name) for name, value in kwargs.items()}
        if by_position:
            output = self.view.model.blocks[layer](states, *rest, **named)
        else:
            named["hidden_states"] = states
            output = self.view.model.blocks[layer](**named)
        return output[0] if isinstance(output, tuple) else output

    def _stacked(self, value: Any, times: int, name: str = "") -> Any:
        """An argument for a stack: tensors by prompt are repeated, key-value caches dropped."""
        if isinstance(value, Tensor):
            by_prompt = value.ndim > 0 and value.shape[0] == self.n_prompts and self.n_prompts > 1
            return value.repeat(times, *[1] * (value.ndim - 1)) if by_prompt else value
        if isinstance(value, tuple | list):
            return type(value)(self._stacked(item, times) for item in value)
        if name == "use_cache":
            return False
        is_cache = "past" in name or "Cache" in type(value).__name__
        return None if is_cache else value


def hook_changes(
    view: ModelView, variants: Sequence[Variant], rows: slice
) -> dict[str, HookFunction]:
    """Hook functions that make the edits of a stack of variants.

    Args:
        view: the model.
        variants: the edits of each variant in the stack.
        rows: which prompts of the batch the stack holds.

    Returns:
        Hook name -> function of the stacked activation.
    """
    return _HookChanges(view, variants, rows).functions()


class _HookChanges:
    def __init__(self, view: ModelView, variants: Sequence[Variant], rows: slice) -> None:
        self.view = view
        self.rows = rows
        self.n_prompts = rows.stop - rows.start
        self.n_rows = self.n_prompts * len(variants)
        # Within one hook the order is: embeddings or whole writes, biases, the state they lead to.
        self.changes: dict[str, list[tuple[int, Change]]] = defaultdict(list)
        self.read: set[str] = set()
        self.seen: dict[str, Tensor] = {}
        for number, variant in enumerate(variants):
            for edit in variant:
                self._add(number, edit)

    def functions(self) -> dict[str, HookFunction]:
        """One function a hook."""
        found: dict[str, HookFunction] = {}
        for name in self.read:
            self.changes.setdefault(name, [])
        for name, changes in self.changes.items():
            found[name] = self._function(name, [c for _, c in sorted(changes, key=lambda x: x[0])])
        return found

    def _function(self, name: str, changes: list[Change]) -> HookFunction:
        def change(activation: Tensor) -> Tensor | None:
            if changes:  # a position embedding may come once for all prompts
                activation = activation.expand(self.n_rows, *activation.shape[1:]).clone()
                for apply in changes:
                    apply(activation)
            if name in self.read:
                self.seen[name] = activation
            return activation if changes else None

        return change

    def _add(self, number: int, edit: Edit) -> None:
        match edit.site:
            case AttnBias(layer):
                bias = self.view.b_O(layer).detach()
                self._put(hook_name(Attn(layer)), 1, self._shifting(number, edit, bias))
            case MLPBias(layer):
                bias = self.view.b_out(layer).detach()
                self._put(hook_name(MLP(layer)), 1, self._shifting(number, edit, bias))
            case Embed() if isinstance(edit, HeldEdit):
                self._put(hook_name(Stream(0, "pre")), -1, self._starting(number, edit))
            case Embed() | PosEmbed() if not isinstance(edit, HeldEdit):
                self._put(hook_name(Stream(0, "pre")), -1, self._moving_start(number, edit))
            case Stream(layer, "mid"):
                # TransformerBridge's hook_resid_mid reaches the MLP but not the skip path, so the
                # state is set by what the attention layer adds.
                self.read.add(hook_name(Stream(layer, "pre")))
                self._put(hook_name(Attn(layer)), 2, self._reaching(number, edit, layer))
            case _:
                self._put(hook_name(edit.site), 0, self._setting(number, edit))

    def _put(self, name: str, order: int, change: Change) -> None:
        self.changes[name].append((order, change))

    def _where(
        self, number: int, edit: Edit, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Stack rows, positions, and the new values there [cells, ...]."""
        index = edit.positions.index[self.rows].to(device)
        row, column = (index >= 0).nonzero(as_tuple=True)
        values = edit.fill(self.rows, index).to(device)[row, column]
        return row + number * self.n_prompts, index[row, column], values

    def _setting(self, number: int, edit: Edit) -> Change:
        def apply(activation: Tensor) -> Tensor:
            row, position, values = self._where(number, edit, activation.device)
            values = values.to(activation.dtype)
            match edit.site:
                case HeadNode(_, head, "pattern"):  # a prompt may have been continued
                    n_new = activation.shape[-1] - values.shape[-1]
                    activation[row, head, position] = torch.nn.functional.pad(values, (0, n_new))
                case Head(_, head) | HeadNode(_, head, _) | HeadInput(_, head, _):
                    activation[row, position, head] = values
                case Neuron(_, index):
                    activation[row, position, index] = values
                case _:
                    activation[row, position] = values
            return activation

        return apply

    def _shifting(self, number: int, edit: Edit, bias: Tensor) -> Change:
        def apply(activation: Tensor) -> Tensor:
            row, position, values = self._where(number, edit, activation.device)
            activation[row, position] += (values - bias.to(values)).to(activation.dtype)
            return activation

        return apply

    def _moving_start(self, number: int, edit: Edit) -> Change:
        """A change of the embeddings, as a change of the stream's start; fill gives new - old."""
        return self._shifting(number, edit, torch.zeros((), device="cpu"))

    def _reaching(self, number: int, edit: Edit, layer: int) -> Change:
        def apply(activation: Tensor) -> Tensor:
            row, position, values = self._where(number, edit, activation.device)
            before = self.seen[hook_name(Stream(layer, "pre"))][row, position]
            activation[row, position] = values.to(activation.dtype) - before
            return activation

        return apply

    def _starting(self, number: int, edit: Edit) -> Change:
        """The stream's start: a new embedding, beside the position embedding that is there."""
        name = hook_name(PosEmbed())
        if self.view.has_pos_embed:
            self.read.add(name)

        def apply(activation: Tensor) -> Tensor:
            row, position, values = self._where(number, edit, activation.device)
            if self.view.has_pos_embed:
                beside = self.seen[name].expand(self.n_rows, *self.seen[name].shape[1:])
                values = values + beside[row, position].to(values)
            activation[row, position] = values.to(activation.dtype)
            return activation

        return apply
