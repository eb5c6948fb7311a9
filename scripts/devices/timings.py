"""The benchmark's main rows on a device, beside the CPU: capture, sweep, paths, lens, KL step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from bench import common, lenses, routes, streams, sweeps
from torch import Tensor

CPU = torch.device("cpu")
# The first case of each group of the benchmark: 8 prompts of 15 tokens (lenses: of 128).
ROWS = {
    "capture": streams.captures,
    "zero sweep": sweeps.ablations,
    "paths": routes.paths,
    "logit lens": lenses.reading,
    "KL step": lenses.fitting,
}


@dataclass(frozen=True)
class Timing:
    """One row on one device.

    Attributes:
        row: what is computed.
        device: on what.
        dtype: of the model.
        seconds: the median.
        peak_mb: memory above where it stood, or None where the device does not tell.
    """

    row: str
    device: str
    dtype: str
    seconds: float
    peak_mb: float | None


def timings(device: torch.device, dtype: torch.dtype, repeats: int) -> Iterator[Timing]:
    """Every row on a model of GPT-2 small's shape with random weights."""
    model = torch.nn.Module.to(common.gpt2_shaped("bridge"), device, dtype)
    model.cfg.device = str(device)
    for make in ROWS.values():
        case = next(make(model))
        peak = _peak_mb(case, device)  # in the first call, which is slower and not timed
        times = [_seconds(case, device) for _ in range(repeats)]
        name = str(dtype).removeprefix("torch.")
        yield Timing(case.name, str(device), name, statistics.median(times), peak)


def _seconds(case: common.Case, device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    case.ours()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Waits until a device has done all it was given; the CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _peak_mb(case: common.Case, device: torch.device) -> float | None:
    if device.type == "cpu":
        try:
            return common.peak_mb(case.ours)
        except OSError:  # only Linux tells
            return None
    memory: Any = getattr(torch, device.type, None)
    if not hasattr(memory, "max_memory_allocated"):
        return None
    memory.reset_peak_memory_stats(device)
    before = memory.memory_allocated(device)
    kept: Tensor = case.ours()
    peak = memory.max_memory_allocated(device) - before
    del kept
    return peak / 2**20
