"""The first move of a fit: regress the last state on each layer's, in closed form.

With x a state of a layer, y the last state of the same token and weights w = 1 / |y|^2 (the final
norm divides by about |y|), per layer:

    minimise   sum w |y - x - A x - b|^2 + lambda tr(C) / d_model |A|^2
    A' = (C + lambda tr(C) / d_model)^-1 D,    b = mean(y - x) - A mean(x)

C and D are the weighted covariances of x with itself and with y - x. The penalty pulls A to zero,
the logit lens. It needs no unembedding: about a tenth of a KL step's cost for each token.

The statistics of two sets of tokens add up to those of their union, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from resid_patching.processes import Team


@dataclass
class Statistics:
    """Weighted means and covariances, in float64.

    Attributes:
        total: sum of the weights.
        mean_x: [layer, d_model].
        mean_y: [d_model].
        xx: sum w (x - mean)(x - mean)' [layer, d_model, d_model].
        xy: sum w (x - mean)(y - mean)' [layer, d_model, d_model].
        tokens: how many.
    """

    total: Float[Tensor, ""]
    mean_x: Float[Tensor, "layer d_model"]
    mean_y: Float[Tensor, " d_model"]
    xx: Float[Tensor, "layer d_model d_model"]
    xy: Float[Tensor, "layer d_model d_model"]
    tokens: int = 0

    @classmethod
    def empty(cls, n_layers: int, d_model: int, device: torch.device | str = "cpu") -> Statistics:
        """Of no tokens."""
        square = (n_layers, d_model, d_model)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        total = torch.zeros((), dtype=torch.float64, device=device)
        return cls(total, zeros(n_layers, d_model), zeros(d_model), zeros(*square), zeros(*square))

    def add(
        self, states: Sequence[Float[Tensor, "token d_model"]], last: Float[Tensor, "token d_model"]
    ) -> None:
        """Adds tokens.

        Args:
            states: for each layer, the states.
            last: their last states.
        """
        weight = 1 / last.pow(2).sum(-1)
        batch = Statistics.empty(len(states), last.shape[-1], self.total.device)
        batch.total += weight.sum().to(batch.total)
        batch.mean_y += (weight @ last / weight.sum()).to(batch.total)
        # Centred by the batch's own means before anything is squared: a few coordinates of a
        # stream are far from zero in every token, and float32 would lose the rest beside them.
        root = weight.sqrt()[:, None]
        y = root * (last - batch.mean_y.to(last))
        for layer, x in enumerate(states):
            batch.mean_x[layer] += (weight @ x / weight.sum()).to(batch.total)
            x = root * (x - batch.mean_x[layer].to(x))
            batch.xx[layer] += (x.T @ x).to(batch.total)
            batch.xy[layer] += (x.T @ y).to(batch.total)
        batch.tokens = len(last)
        self.merge(batch)

    def merge(self, other: Statistics) -> None:
        """Adds the statistics of other tokens."""
        total = self.total + other.total
        if not float(total):
            return
        shift_x, shift_y = other.mean_x - self.mean_x, other.mean_y - self.mean_y
        between = self.total * other.total / total
        for layer, x in enumerate(shift_x):  # one at a time: all squares at once are large
            self.xx[layer] += other.xx[layer] + between * torch.outer(x, x)
            self.xy[layer] += other.xy[layer] + between * torch.outer(x, shift_y)
        self.mean_x += other.total / total * shift_x
        self.mean_y += other.total / total * shift_y
        self.total = total
        self.tokens += other.tokens

    def sum_over(self, team: Team) -> None:
        """Adds the statistics of the other processes of a team; all have the sum after it."""
        if team.size == 1:
            return
        total = team.sum(self.total.clone())
        mean_x = team.sum(self.total * self.mean_x) / total
        mean_y = team.sum(self.total * self.mean_y) / total
        shift_x, shift_y = self.mean_x - mean_x, self.mean_y - mean_y
        for layer, x in enumerate(shift_x):  # one at a time: all squares at once are large
            self.xx[layer] += self.total * torch.outer(x, x)
            self.xy[layer] += self.total * torch.outer(x, shift_y)
        team.sum(self.xx)
        team.sum(self.xy)
        self.total, self.mean_x, self.mean_y = total, mean_x, mean_y
        self.tokens = sum(team.gather(self.tokens))

    def spread(self) -> Float[Tensor, " layer"]:
        """Root mean square of a layer's states, weighted."""
        variance = self.xx.diagonal(dim1=-2, dim2=-1).mean(-1) / self.total
        return (variance + self.mean_x.pow(2).mean(-1)).sqrt()


class Solver:
    """The regression of one layer, for any penalty at little cost.

    Args:
        statistics: of the training tokens.
        layer: which.
    """

    def __init__(self, statistics: Statistics, layer: int) -> None:
        self.values, self.vectors = torch.linalg.eigh(statistics.xx[layer])
        self.target = self.vectors.T @ (statistics.xy[layer] - statistics.xx[layer])
        self.mean_x = statistics.mean_x[layer]
        self.mean_y = statistics.mean_y

    def solve(
        self, penalty: float
    ) -> tuple[Float[Tensor, "d_model d_model"], Float[Tensor, " d_model"]]:
        """A and b at a penalty lambda, in float64."""
        values = self.values.clamp_min(0)
        shrunk = self.target / (values + penalty * values.mean())[:, None]
        weight = (self.vectors @ shrunk).T.contiguous()
        return weight, self.mean_y - self.mean_x - weight @ self.mean_x
