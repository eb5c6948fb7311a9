"""States and teachers of windows of tokens, for fitting. Position 0 is left out.

The first position holds states unlike any other's (often a hundred times as long), which a fit
would spend itself on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from resid_patching.address import Address, hook_name
from resid_patching.errors import DivergedError
from resid_patching.lens.states import last_state
from resid_patching.lens.steps import Teacher, kl_only
from resid_patching.lens.unembed import Unembedding
from resid_patching.models import ModelView, name_of, remedy


@dataclass(frozen=True, eq=False)
class Harvest:
    """States of the tokens of some windows.

    Attributes:
        states: for each layer [token, d_model], in our precision.
        last: the last state of each [token, d_model].
        logits: the model's logits [token, d_vocab], or None.
    """

    states: tuple[Float[Tensor, "token d_model"], ...]
    last: Float[Tensor, "token d_model"]
    logits: Float[Tensor, "token d_vocab"] | None


def harvest(
    view: ModelView,
    tokens: Int[Tensor, "window pos"],
    addresses: Sequence[Address],
    *,
    logits: bool,
) -> Harvest:
    """Runs windows and takes the states at the addresses and the last state.

    Args:
        view: the model.
        tokens: ids [window, pos].
        addresses: what each layer of the lens reads.
        logits: whether the unembedding is run and its output taken.

    Raises:
        HookNotFiredError: a state never appeared.
    """
    unembedding = Unembedding.of(view)
    held: dict[Address, Tensor] = {}
    last = last_state(view)
    wanted = list(dict.fromkeys([*addresses, last]))

    def keeper(address: Address) -> Any:
        def keep(tensor: Tensor) -> None:
            full = tensor.expand(len(tokens), *tensor.shape[1:])
            held[address] = unembedding.cast(full.detach()[:, 1:].flatten(0, 1)).clone()

        return keep

    functions = {hook_name(a): keeper(a) for a in wanted}
    tokens, output = tokens.to(view.input_device), None
    if logits:
        output = view.forward(tokens, functions)
    else:
        view.forward_blocks(tokens, functions)
    taken = None if output is None else output[:, 1:].flatten(0, 1)
    return Harvest(tuple(held[a] for a in addresses), held[last], taken)


def require_finite_harvest(
    view: ModelView, found: Harvest, addresses: Sequence[Address], of: str
) -> None:
    """Raises where the model's own states or logits are NaN or infinite.

    Args:
        view: the model.
        found: what it made of some windows.
        addresses: of the states.
        of: what the windows are for, such as `validation text`.

    Raises:
        DivergedError: they are; the layer and the dtype are named.
    """
    labels = (f"layer {address}" for address in addresses)
    named = [*zip(labels, found.states, strict=True), ("the last state", found.last)]
    if found.logits is not None:
        named.append(("the logits", found.logits))
    for label, tensor in named:
        if not bool(torch.stack(tensor.aminmax()).isfinite().all()):
            raise DivergedError(
                f"{label}, {of}: the model's own numbers are NaN or infinite in "
                f"{name_of(view.dtype)}. {remedy(view.dtype)}"
            )


@dataclass(frozen=True, eq=False)
class Held:
    """Validation tokens: the states of every layer, and what the model says there.

    Attributes:
        unembedding: the model's readout.
        states: for each layer [token, d_model].
        teacher: the model's own distribution at these tokens.
    """

    unembedding: Unembedding
    states: tuple[Float[Tensor, "token d_model"], ...]
    teacher: Teacher

    @classmethod
    def of(
        cls, view: ModelView, tokens: Int[Tensor, "window pos"], addresses: Sequence[Address]
    ) -> Held:
        """The states of validation windows.

        Raises:
            DivergedError: the model's own states or logits are not finite there.
        """
        unembedding = Unembedding.of(view)
        parts, teachers = [], []
        for window in tokens.split(1):
            found = harvest(view, window, addresses, logits=True)
            assert found.logits is not None
            require_finite_harvest(view, found, addresses, "validation text")
            parts.append(found.states)
            teachers.append(Teacher.of(unembedding, found.logits))
        states = tuple(torch.cat(layer) for layer in zip(*parts, strict=True))
        return cls(unembedding, states, _joined_teachers(teachers))

    def kl(self, layer: int, weight: Tensor, bias: Tensor, *, every: int = 1) -> float:
        """Mean KL(final || lens) of a translator, in nats.

        Args:
            layer: whose states.
            weight: A [d_model, d_model].
            bias: b [d_model].
            every: take one token of so many.
        """
        where = slice(None, None, every)
        states = self.states[layer][where]
        moved = states + torch.nn.functional.linear(states, weight.to(states), bias.to(states))
        return float(kl_only(self.unembedding, moved, self.teacher.take(where)).mean())

    def __len__(self) -> int:
        return len(self.teacher)


def _joined_teachers(teachers: list[Teacher]) -> Teacher:
    logits = [t.logits for t in teachers if t.logits is not None]
    return Teacher(
        torch.cat([t.p_log_p for t in teachers]),
        torch.cat([t.mean_row for t in teachers]),
        torch.cat([t.mean_bias for t in teachers]),
        torch.cat(logits) if logits else None,
    )
