"""The second move of a fit: steps down the KL, each layer on its own tokens, clip and clock.

Every step runs a few windows once. All layers share the teacher; each draws its own positions,
so that their errors are not of the same tokens. A layer stops when its validation KL no longer
falls, and keeps the best translator that it had, which may be the one it started from.

Everything random is drawn from the seed, the step and the layer, so a step depends on nothing but
the parameters and the optimizers' state before it. Several processes make the same draws; each
runs its part of the windows, and the gradients of all are summed before they are used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from resid_patching.errors import DivergedError
from resid_patching.lens.harvest import Harvest, Held
from resid_patching.lens.steps import Teacher, kl_and_gradient
from resid_patching.lens.unembed import Unembedding
from resid_patching.models import float64_home
from resid_patching.processes import Team

Optimizer = Literal["muon", "adam", "sgd"]
Products = Literal["float32", "bfloat16"]
RATES: dict[str, float] = {"muon": 0.02, "adam": 0.002, "sgd": 0.1}
"""Learning rates at the first step; they fall to 0 in a line."""


@dataclass(frozen=True)
class Plan:
    """How the steps are made.

    Attributes:
        steps: how many.
        step_tokens: positions of each layer in a step.
        windows: windows that a step runs.
        optimizer: muon, adam or sgd.
        rate: learning rate at the first step.
        clip: largest norm of a layer's gradient.
        every: steps between looks at the validation tokens.
        patience: looks without a better KL after which a layer stops.
        seed: of every draw.
        products: precision of the steps' two large matrix products.
    """

    steps: int
    step_tokens: int
    windows: int
    optimizer: Optimizer
    rate: float
    clip: float
    every: int
    patience: int
    seed: int
    products: Products = "float32"


@dataclass
class Layer:
    """One translator while it is fitted.

    Attributes:
        label: the state that it reads.
        weight: A, the fp32 (or fp64) master copy.
        bias: b.
        scale: root mean square of the last state over that of this layer's.
        kl: its best validation KL so far.
        best_weight, best_bias: the translator that had it.
        waited: looks since then.
        stopped: whether it takes no more steps.
        optimizers: of A and b.
    """

    label: str
    weight: Float[Tensor, "d_model d_model"]
    bias: Float[Tensor, " d_model"]
    scale: float
    kl: float
    best_weight: Float[Tensor, "d_model d_model"]
    best_bias: Float[Tensor, " d_model"]
    waited: int = 0
    stopped: bool = False
    optimizers: list[Any] = field(default_factory=list)

    def look(self, kl: float, patience: int) -> None:
        """Takes note of a validation KL."""
        if kl < self.kl:
            self.kl, self.waited = kl, 0
            self.best_weight, self.best_bias = self.weight.clone(), self.bias.clone()
        else:
            self.waited += 1
            self.stopped = self.waited >= patience


def equip(layer: Layer, plan: Plan, last_spread: float) -> None:
    """Gives a layer its optimizers.

    States grow by orders of magnitude along the stream, and A must bridge that. Muon's and Adam's
    steps have a fixed size, so they are measured in units of the layer's own scale; SGD's are not.

    Raises:
        ValueError: this torch has no Muon.
    """
    weight, bias, rate = layer.weight, layer.bias, plan.rate
    if plan.optimizer == "sgd":
        layer.optimizers = [torch.optim.SGD([weight, bias], lr=rate, momentum=0.9, nesterov=True)]
        return
    of_bias = torch.optim.Adam([bias], lr=rate * last_spread)
    if plan.optimizer == "adam":
        entry = rate * layer.scale / len(bias) ** 0.5
        layer.optimizers = [torch.optim.Adam([weight], lr=entry), of_bias]
        return
    if not hasattr(torch.optim, "Muon"):
        raise ValueError("optimizer='muon' needs torch 2.9 or later; use 'adam' or 'sgd'")
    of_weight = torch.optim.Muon([weight], lr=rate * layer.scale, weight_decay=0.0)
    layer.optimizers = [of_weight, of_bias]


@dataclass(frozen=True)
class Shard:
    """What one process of a team runs of a step.

    Attributes:
        team: the processes.
        first: positions of the step's windows before its own.
        total: positions of all of the step's windows.
    """

    team: Team
    first: int
    total: int


def take_step(
    layers: list[Layer],
    plan: Plan,
    step: int,
    found: Sequence[Harvest],
    unembedding: Unembedding,
    part: Shard | None = None,
) -> list[float]:
    """One step of every layer that has not stopped.

    Each window is worked on by itself and their gradients are added in float64, so that a step is
    the same to the last bits on any number of processes.

    Args:
        layers: the translators.
        plan: how steps are made.
        step: which this is.
        found: the windows of the step that this process runs, one each; there may be none.
        unembedding: the model's readout.
        part: where among the step's windows they are; None where they are all.

    Returns:
        The mean KL of each layer's tokens before the step, in nats; NaN where it has stopped.

    Raises:
        DivergedError: a KL or a gradient is not finite.
        LostProcessError: another process of the team has ended.
    """
    teachers = []
    for window in found:
        assert window.logits is not None
        teachers.append(Teacher.of(unembedding, window.logits))
    part = Shard(Team(), 0, sum(map(len, teachers))) if part is None else part
    buffer = unembedding.buffer(min(unembedding.block_rows, plan.step_tokens))
    like = {"dtype": torch.float64, "device": float64_home(unembedding.device)}
    kls = []
    for number, layer in enumerate(layers):
        if layer.stopped:
            kls.append(math.nan)
            continue
        generator = draw(plan.seed, step, number + 1)
        drawn = torch.randperm(part.total, generator=generator, device="cpu")[: plan.step_tokens]
        sums = [torch.zeros(shape, **like) for shape in (layer.weight.shape, layer.bias.shape, ())]
        first = part.first
        for window, teacher in zip(found, teachers, strict=True):
            where = drawn[(drawn >= first) & (drawn < first + len(teacher))] - first
            first += len(teacher)
            if len(where):
                where = where.to(unembedding.device)
                states = window.states[number][where]
                parts = _sums(layer, states, teacher.take(where), unembedding, buffer)
                for whole, each in zip(sums, parts, strict=True):
                    whole += each.to(whole)
        means = [part.team.sum(whole) / len(drawn) for whole in sums]
        kls.append(_step_layer(layer, plan, step, *means))
    return kls


def _sums(
    layer: Layer, states: Tensor, teacher: Teacher, unembedding: Unembedding, buffer: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of A and b, and the KL, summed over tokens."""
    moved = states + torch.nn.functional.linear(states, layer.weight, layer.bias)
    kl, gradient = kl_and_gradient(unembedding, moved, teacher, buffer)
    return gradient.T @ states, gradient.sum(0), kl.sum()


def _step_layer(
    layer: Layer, plan: Plan, step: int, on_weight: Tensor, on_bias: Tensor, mean_kl: Tensor
) -> float:
    kl = float(mean_kl)
    norm = (on_weight.pow(2).sum() + on_bias.pow(2).sum()).sqrt()
    if not math.isfinite(kl) or not math.isfinite(float(norm)):
        raise DivergedError(
            f"layer {layer.label}, step {step}: KL {kl:.3g}, gradient {float(norm):.3g}. The "
            "fit has stopped; lower the learning rate (rate=...), or load the model in float32 if "
            "its own states overflow."
        )
    shrink = min(1.0, plan.clip / max(float(norm), 1e-30))
    layer.weight.grad = (on_weight * shrink).to(layer.weight)
    layer.bias.grad = (on_bias * shrink).to(layer.bias)
    decay = 1 - step / plan.steps
    for optimizer in layer.optimizers:
        for group in optimizer.param_groups:
            group.setdefault("first_rate", group["lr"])
            group["lr"] = group["first_rate"] * decay
        optimizer.step()
    layer.weight.grad = layer.bias.grad = None
    return kl


def validate(layers: list[Layer], held: Held, step: int) -> list[float]:
    """The validation KL of each layer as it is after a step; its best where it has stopped.

    Raises:
        DivergedError: one is not finite.
    """
    return [
        layer.kl
        if layer.stopped
        else require_number(
            held.kl(number, layer.weight, layer.bias), layer.label, f"after step {step}"
        )
        for number, layer in enumerate(layers)
    ]


def require_number(kl: float, label: str, when: str) -> float:
    """A validation KL, which is a number.

    Raises:
        DivergedError: it is NaN or infinite, which no comparison with the best so far would see.
    """
    if not math.isfinite(kl):
        raise DivergedError(
            f"layer {label}, {when}: the validation KL is {kl}. Lower the learning rate "
            "(rate=...), or load the model in float32."
        )
    return kl


def look(layers: list[Layer], plan: Plan, kls: Sequence[float]) -> None:
    """Takes note of the validation KL of each layer that has not stopped."""
    for layer, kl in zip(layers, kls, strict=True):
        if not layer.stopped:
            layer.look(kl, plan.patience)


def draw(seed: int, step: int, which: int) -> torch.Generator:
    """The generator of one draw, of its own for every seed, step and purpose."""
    mixed = (seed * 1_000_003 + step) * 1_000_033 + which
    return torch.Generator("cpu").manual_seed(mixed % 2**63)


def windows_of(n_windows: int, plan: Plan, step: int) -> Tensor:
    """Which windows a step runs: all in a shuffled order, then again in another one."""
    first = step * plan.windows
    numbers = []
    for place in range(first, first + plan.windows):
        epoch, index = divmod(place, n_windows)
        order = torch.randperm(n_windows, generator=draw(plan.seed, epoch, 0), device="cpu")
        numbers.append(int(order[index]))
    return torch.tensor(numbers, device="cpu")
