"""A normalisation, and how it is read off a model's module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from resid_patching.errors import ReadoutMismatchError
from resid_patching.models.weights import optional_weight, why_unread


@dataclass(frozen=True)
class Norm:
    """A normalisation y = ((x - mean(x)) / sigma) * gain + bias, or without the mean for RMSNorm.

    Attributes:
        kind: `LN`, `RMS`, or None where the model has no norm.
        gain: gamma [d_model].
        bias: beta [d_model].
        eps: added to the variance before the root.
    """

    kind: Literal["LN", "RMS"] | None
    gain: Float[Tensor, " d_model"]
    bias: Float[Tensor, " d_model"]
    eps: float

    def scale(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, " *batch"]:
        """The divisor sigma at each position, from the statistics of x itself."""
        if self.kind is None:
            return torch.ones_like(x[..., 0])
        if self.kind == "LN":
            x = x - x.mean(-1, keepdim=True)
        return (x.pow(2).mean(-1) + self.eps).sqrt()

    def __call__(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """The norm of states.

        Args:
            x: [*batch, d_model].
            scale: another divisor than x's own (None: live statistics), broadcast over *batch.
        """
        sigma = (self.scale(x) if scale is None else scale)[..., None]
        if self.kind == "LN":
            x = x - x.mean(-1, keepdim=True)
        return x / sigma * self.gain + self.bias

    def fold(self, direction: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n d_model"]:
        """The direction g for which (y - bias) . direction = (x . g) / sigma, exactly."""
        folded = direction * self.gain
        return folded - folded.mean(-1, keepdim=True) if self.kind == "LN" else folded


def read_norm(
    cfg: Any, module: Any | None, d_model: int, dtype: torch.dtype, device: torch.device
) -> Norm:
    """The norm that a module of HookedTransformer or TransformerBridge computes.

    Args:
        cfg: the model's configuration.
        module: the module; None for no norm.
        d_model: the width of what is normalised.
        dtype: of gain and bias.
        device: where these go.

    Raises:
        ReadoutMismatchError: gain or bias cannot be read.
    """
    ones = torch.ones(d_model, dtype=dtype, device=device)
    kind = _kind(cfg, module)
    if kind is None:
        return Norm(None, ones, torch.zeros_like(ones), 0.0)
    gain = _first(module, "w", "weight")
    bias = _first(module, "b", "bias") if kind == "LN" else None
    gain = ones if gain is None else gain.detach().to(device, dtype)
    if _gain_is_offset(cfg, module):
        gain = gain + 1
    bias = torch.zeros_like(ones) if bias is None else bias.detach().to(device, dtype)
    return Norm(kind, gain, bias, _eps(cfg, module))


def _kind(cfg: Any, module: Any | None) -> Literal["LN", "RMS"] | None:
    if module is None or getattr(cfg, "normalization_type", "LN") is None:
        return None
    if (uses_rms := getattr(module, "uses_rms_norm", None)) is not None:
        return "RMS" if uses_rms else "LN"
    original = getattr(module, "original_component", None)
    if "RMS" in type(module).__name__ or "RMS" in type(original).__name__:
        return "RMS"
    # Of a bare wrapper of TransformerBridge, whose own name says nothing, the configuration knows.
    is_layer_norm = original is None or isinstance(original, torch.nn.LayerNorm)
    return "LN" if is_layer_norm or not getattr(cfg, "uses_rms_norm", False) else "RMS"


def _gain_is_offset(cfg: Any, module: Any) -> bool:
    """Gemma's bridges store gain - 1; HookedTransformer stores the gain."""
    if (offset := getattr(module, "uses_weight_offset", None)) is not None:
        return bool(offset)
    is_bridge = hasattr(module, "original_component")
    return is_bridge and bool(getattr(cfg, "rmsnorm_uses_offset", False))


def _eps(cfg: Any, module: Any) -> float:
    original = getattr(module, "original_component", None)
    for owner, name in ((original, "eps"), (original, "variance_epsilon"), (module, "eps")):
        value = getattr(owner, name, None)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return float(getattr(cfg, "eps", 1e-5))


def _first(owner: Any, *names: str) -> Tensor | None:
    for name in names:
        if (weight := optional_weight(owner, name)) is not None:
            return weight
        if why := why_unread(owner, name):
            raise ReadoutMismatchError(f"a norm of the model cannot be read: {why}")
    return None
