"""Moving translators between raw and centred weights, where that is exact.

Centring the weights that write to the stream turns every state h into h' = P h, P = I - 11'/d,
which a LayerNorm does not see. A translator u = h + A h + b then becomes:

    centred -> raw    A = A' P,  b = b'            always exact: P u = P u'
    raw -> centred    A' = A,    b' = b            exact only where P A 1 = 0, because the mean of
                                                   h, which A may read, is gone from h'

Folding the final norm and centring the unembedding change no state and leave A and b as they are.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from resid_patching.errors import LensBasisError

_CENTRED_TOLERANCE = 1e-6


def centred_to_raw(weight: Float[Tensor, "layer d_model d_model"]) -> Tensor:
    """A = A' P."""
    return weight - weight.mean(-1, keepdim=True)


def require_blind_to_mean(weight: Float[Tensor, "layer d_model d_model"]) -> None:
    """Raises where a translator reads the mean of a raw state.

    Raises:
        LensBasisError: P A 1 is not 0.
    """
    read = weight.sum(-1)
    read = read - read.mean(-1, keepdim=True)
    scale = weight.norm(dim=(-2, -1)).clamp_min(1e-30)
    worst = read.norm(dim=-1) / (scale * weight.shape[-1] ** 0.5)
    if float(worst.max()) > _CENTRED_TOLERANCE:
        layer = int(worst.argmax())
        raise LensBasisError(
            "the lens was fitted on raw weights and reads the mean of the stream (translator "
            f"{layer}: |P A 1| is {float(worst[layer]):.1e} of its size), which centred weights "
            "no longer hold. Fit a lens on the centred model, or load the model raw."
        )


def require_layer_norm(norm: str) -> None:
    """Raises where the final norm sees the mean.

    Raises:
        LensBasisError: the norm is no LayerNorm.
    """
    if norm != "LN":
        raise LensBasisError(
            f"raw and centred weights are the same model under a LayerNorm alone; the final norm "
            f"here is {norm}, which sees the mean"
        )
