"""How the cost of each sweep grows over 1, 2 and 4 times the targets, prompts and length."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import resid_patching as rp
from bench.common import LENGTH, PROMPTS, ids, peak_mb
from bench.sweeps import METRIC

SIZES = (1, 2, 4)
BASE_HEADS = 36
# What `max_bytes` is set to: peak memory has to stay below it, whatever the size.
MAX_BYTES = 2**28


def measure_growth(model: Any, repeats: int) -> list[dict[str, Any]]:
    """Times at 1x, 2x, 4x.

    Returns:
        A row for each sweep and what grows: seconds, their growth from 1x to 4x (at most 4 where
        a cost is no more than linear), and the slope of the second doubling over that of the
        first (1 where the cost is a constant and a linear part).
    """
    found = []
    for row, calls in _calls(model):
        calls[0]()
        times: list[list[float]] = [[] for _ in SIZES]
        for _ in range(repeats):
            for place, call in enumerate(calls):
                start = time.perf_counter()
                call()
                times[place].append(time.perf_counter() - start)
        seconds = [statistics.median(values) for values in times]
        first, second = seconds[1] - seconds[0], (seconds[2] - seconds[1]) / 2
        growth = {"slopes": second / first, "total": seconds[2] / seconds[0]}
        found.append({"row": row, "seconds": seconds, **growth})
    return found


def peaks(model: Any) -> dict[str, dict[str, list[float]]]:
    """Peak memory of the same rows at each size, in MB."""
    return {row: {"peaks": [peak_mb(call) for call in calls]} for row, calls in _calls(model)}


def _calls(model: Any) -> Iterator[tuple[str, list[Callable[[], Any]]]]:
    for name, sweep in _SWEEPS.items():
        for grows in ("targets", "prompts", "length"):
            yield f"{name}; {grows}", [_call(model, sweep, grows, size) for size in SIZES]


def _call(model: Any, sweep: Callable[..., Any], grows: str, size: int) -> Callable[[], Any]:
    sizes = {name: size if name == grows else 1 for name in ("targets", "prompts", "length")}
    heads = rp.heads(model)
    targets = heads[:: len(heads) // (BASE_HEADS * sizes["targets"])]
    shape = PROMPTS * sizes["prompts"], LENGTH * sizes["length"]
    base, source = ids(*shape, seed=1), ids(*shape, seed=2)
    return lambda: sweep(model, base, source, targets)


def _zero(model: Any, base: Any, source: Any, targets: Any) -> Any:
    run = rp.capture(model, base, max_bytes=MAX_BYTES)
    return rp.ablate(run, targets, rp.Zero(), metric=METRIC)


def _patching(model: Any, base: Any, source: Any, targets: Any) -> Any:
    run = rp.capture(model, base, max_bytes=MAX_BYTES)
    how = rp.Resample(rp.capture(model, source, max_bytes=MAX_BYTES))
    return rp.ablate(run, targets, how, metric=METRIC, positions=-1)


def _paths(model: Any, base: Any, source: Any, targets: Any) -> Any:
    run = rp.capture(model, base, max_bytes=MAX_BYTES)
    other = rp.capture(model, source, max_bytes=MAX_BYTES)
    how = rp.Path(to="logits", using=rp.Resample(other), mlps="recompute")
    return rp.ablate(run, targets, how, metric=METRIC)


_SWEEPS: dict[str, Callable[..., Any]] = {
    "zero, all positions": _zero,
    "resample, last position": _patching,
    "paths to the logits, all positions": _paths,
}
