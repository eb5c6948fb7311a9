"""What our arithmetic is made in, whatever the caller's settings: no autocast, float64 where it is.

The model and our sums run in the dtypes that their tensors have. An autocast of the caller would
turn products of float32 weights into bfloat16 without a word, so it is off inside the analyses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

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
