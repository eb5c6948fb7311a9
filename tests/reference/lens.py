"""Lenses the slow way: one state vector at a time, every distribution written out.

Nothing of ours is imported, and nothing is shared between layers, positions or quantities.
"""

import math

import torch
from torch import Tensor


def normalise(vector: Tensor, weights: dict[str, Tensor], norm: str, eps: float) -> Tensor:
    """Return one state [d_model] behind the final norm, by its own statistics."""
    if norm == "LN":
        vector = vector - vector.mean()
    scale = ((vector**2).mean() + eps) ** 0.5
    return vector / scale * weights["gain"] + weights["shift"]


def logits(
    vector: Tensor, weights: dict[str, Tensor], norm: str, eps: float, softcap: float | None = None
) -> Tensor:
    """Return what the model would say if this state [d_model] were its last."""
    found = normalise(vector, weights, norm, eps) @ weights["W_U"] + weights["b_U"]
    return found if softcap is None else softcap * torch.tanh(found / softcap)


def probabilities(logits: Tensor) -> list[float]:
    """Return softmax(logits), as numbers."""
    highest = float(logits.max())
    weights = [math.exp(float(z) - highest) for z in logits]
    return [w / math.fsum(weights) for w in weights]


def entropy(q: list[float]) -> float:
    """Return -sum q log q."""
    return -math.fsum(x * math.log(x) for x in q if x > 0)


def kl(p: list[float], q: list[float]) -> float:
    """Return sum p log(p/q)."""
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def jensen_shannon(p: list[float], q: list[float]) -> float:
    """Return the mean divergence of two distributions from their mean."""
    m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return (kl(p, m) + kl(q, m)) / 2


def total_variation(p: list[float], q: list[float]) -> float:
    """Return half of the sum of |p - q|."""
    return math.fsum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2


def translate(vector: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return h + A h + b, one output at a time."""
    found = [vector[i] + (weight[i] * vector).sum() + bias[i] for i in range(len(vector))]
    return torch.stack(found)


def mean_kl(
    states: Tensor,
    final: Tensor,
    weight: Tensor,
    bias: Tensor,
    weights: dict[str, Tensor],
    norm: str,
    eps: float,
    softcap: float | None = None,
) -> Tensor:
    """Return the mean over tokens of KL(final || lens), for autograd.

    Args:
        states: [token d_model].
        final: the model's logits [token d_vocab].
        weight: A [d_model d_model].
        bias: b [d_model].
        weights: gain, shift, W_U, b_U.
        norm: LN or RMS.
        eps: of the norm.
        softcap: of the output, or None.
    """
    total = torch.zeros((), dtype=states.dtype)
    for state, own in zip(states, final, strict=True):
        z = logits(state + weight @ state + bias, weights, norm, eps, softcap)
        log_p, log_q = own.log_softmax(-1), z.log_softmax(-1)
        total = total + (log_p.exp() * (log_p - log_q)).sum()
    return total / len(states)


def ridge(states: Tensor, finals: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Return A, b minimising sum w |y - x - A x - b|^2 + penalty mean(var) |A|^2, w = 1/|y|^2.

    Solved as one least-squares problem, with the penalty written as d_model further rows.

    Args:
        states: x [token d_model].
        finals: y [token d_model].
        penalty: relative to the mean weighted variance of a coordinate of x, times sum w.
    """
    d_model = states.shape[1]
    w = 1 / (finals**2).sum(-1)
    mean = (w[:, None] * states).sum(0) / w.sum()
    variance = (w[:, None] * (states - mean) ** 2).sum() / d_model
    root = w.sqrt()[:, None]
    rows = torch.cat([root * states, root], 1)
    further = torch.cat(
        [torch.eye(d_model, dtype=w.dtype), torch.zeros(d_model, 1, dtype=w.dtype)], 1
    )
    rows = torch.cat([rows, (penalty * variance).sqrt() * further])
    target = torch.cat([root * (finals - states), torch.zeros(d_model, d_model, dtype=w.dtype)])
    solution = torch.linalg.lstsq(rows, target).solution
    return solution[:-1].T, solution[-1]
