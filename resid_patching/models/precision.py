"""What our arithmetic is made in, whatever the caller's settings: no autocast, float64 where it is.

The model and our sums run in the dtypes that their tensors have. An autocast of the caller would
turn products of float32 weights into bfloat16 without a word, so it is off inside the analyses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from jaxtyping import Bool
from torch import Tensor

from resid_patching.errors import NotFiniteError

# Relative to the largest term: rounding of the model's own sums and matrix products.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}

_AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")


@contextlib.contextmanager
def uncast() -> Iterator[None]:
    """Nothing is autocast. Also a decorator."""
    with contextlib.ExitStack() as stack:
        for device in _AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Nothing is autocast, and no graph is recorded. Also a decorator."""
    with torch.no_grad(), uncast():
        yield


def require_finite_at(
    values: Tensor,
    real: Bool[Tensor, "batch pos"],
    dtype: torch.dtype,
    what: str,
    *,
    first: int = 0,
) -> None:
    """Raises where numbers of the model's own at real positions are NaN or infinite.

    Args:
        values: [batch, pos] or [batch, pos, d]; positions that a prompt lacks may hold anything.
        real: where a prompt has a position.
        dtype: what the model computes in.
        what: how the message calls the numbers, such as `the model's own last state`.
        first: the number of the first prompt.

    Raises:
        NotFiniteError: they are; the prompt and the dtype are named.
    """
    if values.ndim == 3:  # the extremes, either of which is NaN where any entry is
        values = torch.stack(values.aminmax(dim=-1), -1)
    else:
        values = values[..., None]
    finite = values.isfinite().all(-1)
    wrong = (~finite & real.to(finite.device)).any(1)
    if bool(wrong.any()):
        raise NotFiniteError(
            f"prompt {first + int(wrong.long().argmax())}: {what} is NaN or infinite in "
            f"{name_of(dtype)}, so nothing that is measured on it could be trusted. "
            f"{remedy(dtype)}"
        )


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name, such as float16."""
    return str(dtype).removeprefix("torch.")


def remedy(dtype: torch.dtype) -> str:
    """What to do where the model's own numbers are not finite in a dtype."""
    if dtype == torch.float16:
        return "float16 overflows beyond 65504. Load the model in float32 or bfloat16."
    return "Its weights, a hook or an intervention make it so."


def float64_home(device: torch.device) -> torch.device:
    """Where float64 sums of tensors on a device are made: there, or on the CPU (Apple's has none).

    Args:
        device: where the tensors are.
    """
    try:
        torch.zeros((), dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.device("cpu")
    return device
