"""The second move of a fit: steps down the KL, each layer on its own tokens, clip and clock.

Every step runs a few windows once. All layers share the teacher; each draws its own positions,
so that their errors are not of the same tokens. A layer stops when its validation KL no longer
falls, and keeps the best translator that it had, which may be the one it started from.

Everything random is drawn from the seed, the step and the layer, so a step depends on nothing but
the parameters and the optimizers' state before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from resid_patching.errors import DivergedError
from resid_patching.lens.harvest import Harvest, Held
from resid_patching.lens.steps import Teacher, kl_and_gradient
from resid_patching.lens.unembed import Unembedding

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


def take_step(
    layers: list[Layer], plan: Plan, step: int, found: Harvest, unembedding: Unembedding
) -> list[float]:
    """One step of every layer that has not stopped.

    Returns:
        The mean KL of each layer's tokens before the step, in nats; NaN where it has stopped.

    Raises:
        DivergedError: a KL or a gradient is not finite.
    """
    assert found.logits is not None
    teacher = Teacher.of(unembedding, found.logits)
    buffer = unembedding.buffer(min(unembedding.block_rows, plan.step_tokens))
    kls = []
    for number, layer in enumerate(layers):
        if layer.stopped:
            kls.append(math.nan)
            continue
        generator = draw(plan.seed, step, number + 1)
        where = torch.randperm(len(teacher), generator=generator, device="cpu")[: plan.step_tokens]
        where = where.to(unembedding.device)
        kls.append(
            _step_layer(
                layer,
                plan,
                step,
                found.states[number][where],
                teacher.take(where),
                unembedding,
                buffer,
            )
        )
    return kls


def _step_layer(
    layer: Layer,
    plan: Plan,
    step: int,
    states: Tensor,
    teacher: Teacher,
    unembedding: Unembedding,
    buffer: Tensor,
) -> float:
    moved = states + torch.nn.functional.linear(states, layer.weight, layer.bias)
    kl, gradient = kl_and_gradient(unembedding, moved, teacher, buffer)
    on_weight = gradient.T @ states / len(states)
    on_bias = gradient.mean(0)
    norm = (on_weight.pow(2).sum() + on_bias.pow(2).sum()).sqrt()
    mean = float(kl.mean())
    if not math.isfinite(mean) or not math.isfinite(float(norm)):
        raise DivergedError(
            f"layer {layer.label}, step {step}: KL {mean:.3g}, gradient {float(norm):.3g}. Nothing "
            "more is changed; lower the learning rate (rate=...), or load the model in float32 if "
            "its own states overflow."
        )
    shrink = min(1.0, plan.clip / max(float(norm), 1e-30))
    layer.weight.grad, layer.bias.grad = on_weight * shrink, on_bias * shrink
    decay = 1 - step / plan.steps
    for optimizer in layer.optimizers:
        for group in optimizer.param_groups:
            group.setdefault("first_rate", group["lr"])
            group["lr"] = group["first_rate"] * decay
        optimizer.step()
    layer.weight.grad = layer.bias.grad = None
    return mean


def look(layers: list[Layer], plan: Plan, held: Held) -> list[float]:
    """The validation KL of each layer as it is; the best translators are kept."""
    kls = []
    for number, layer in enumerate(layers):
        if layer.stopped:
            kls.append(layer.kl)
            continue
        kl = held.kl(number, layer.weight, layer.bias)
        layer.look(kl, plan.patience)
        kls.append(kl)
    return kls


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
