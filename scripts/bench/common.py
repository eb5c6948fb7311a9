"""A case: two routes to the same numbers, timed in turn, beside the machine's own limit."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PROMPTS, LENGTH, ANSWER, FOIL = 8, 15, 100, 200
D, D_MLP, LAYERS, HEADS, VOCAB = 768, 3072, 12, 12, 50257


@dataclass
class Case:
    """One row of the table.

    Attributes:
        name: what is computed.
        ours: our route to it.
        peer: the other route, in words; empty where there is none.
        theirs: the other route; called with nothing.
        share: how much of the work `theirs` does; its time is divided by this.
        pick: which of our numbers `theirs` computed.
        flops: floating-point operations that the answer needs (two a multiply-add).
        tolerance: largest difference of the two sides that is rounding.
        plain: a plain forward pass, where the row is told in such.
        once: timed once, because it takes minutes.
    """

    name: str
    ours: Callable[[], Tensor]
    peer: str = ""
    theirs: Callable[[], Tensor] | None = None
    share: float = 1.0
    pick: Callable[[Tensor], Tensor] = lambda values: values
    flops: float = 0.0
    tolerance: float = 1e-3
    plain: Callable[[], Tensor] | None = None
    once: bool = False


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Times a case and compares its sides.

    Returns:
        Medians in seconds, their ratio, the largest difference, and the share of the rate of a
        large matrix product that ours reaches.
    """
    sides: dict[str, Callable[[], Any]] = {"limit": _large_product, "ours": case.ours}
    if case.theirs is not None:
        sides["theirs"] = case.theirs
    if case.plain is not None:
        sides["plain"] = case.plain
    if not case.once:
        for side in sides.values():  # the first call of a process is slower
            side()
    times: dict[str, list[float]] = {name: [] for name in sides}
    values: dict[str, Any] = {}
    for _ in range(1 if case.once else repeats):
        for name, side in sides.items():
            start = time.perf_counter()
            values[name] = side()
            times[name].append(time.perf_counter() - start)
    seconds = {name: statistics.median(found) for name, found in times.items()}
    rate = _PRODUCT_FLOPS / seconds["limit"]
    row: dict[str, Any] = {"row": case.name, "ours": seconds["ours"], "peer": case.peer}
    row["gflops"] = rate / 1e9
    row["limit"] = case.flops / rate / seconds["ours"] if case.flops else None
    if case.plain is not None:
        row["forwards"] = seconds["ours"] / seconds["plain"]
    if case.theirs is not None:
        row["theirs"] = seconds["theirs"] / case.share
        row["ratio"] = row["theirs"] / row["ours"]
        row["difference"] = difference(case.pick(values["ours"]), values["theirs"])
        require_equal(case.name, row["difference"], case.tolerance)
    return row


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference; NaN on both sides is none."""
    if ours.shape != theirs.shape:
        raise SystemExit(f"shapes {tuple(ours.shape)} and {tuple(theirs.shape)} cannot be compared")
    both = ours.isnan() & theirs.isnan()
    return float((ours.double() - theirs.double()).masked_fill(both, 0).abs().max())


def require_equal(name: str, found: float, tolerance: float) -> None:
    """Stops where the two sides did not compute the same numbers."""
    if not found < tolerance:
        raise SystemExit(f"{name}: the two sides differ by {found:.1e}; nothing is reported")


_SIZE = 2048
_PRODUCT_FLOPS = 2.0 * _SIZE**3
_square: list[Tensor] = []


def _large_product() -> Tensor:
    if not _square:
        generator = torch.Generator().manual_seed(0)
        _square.append(torch.randn(_SIZE, _SIZE, generator=generator))
    return _square[0] @ _square[0]


def peak_mb(call: Callable[[], Any]) -> float:
    """How far the resident memory of this process rises above where it stood, in MB."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status("VmRSS")
    found = call()
    peak = _status("VmHWM") - before
    del found
    return peak / 1024


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


# Models and prompts


def gpt2_shaped(backend: str, *, processed: bool = False) -> Any:
    """A model of GPT-2 small's shape with random weights.

    Args:
        backend: `hooked` or `bridge`.
        processed: for a bridge, its compatibility mode.
    """
    if backend == "hooked":
        from transformer_lens import HookedTransformer, HookedTransformerConfig

        config = HookedTransformerConfig(
            n_layers=LAYERS,
            d_model=D,
            n_ctx=1024,
            d_head=D // HEADS,
            n_heads=HEADS,
            d_mlp=D_MLP,
            d_vocab=VOCAB,
            act_fn="gelu_new",
            normalization_type="LN",
            seed=0,
        )
        return HookedTransformer(config).eval()
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(attn_implementation="eager")).eval()
    bridge = build_bridge_from_module(model, "GPT2LMHeadModel", hf_config=model.config).eval()
    if processed:
        bridge.enable_compatibility_mode(disable_warnings=True)
    return bridge


def ids(prompts: int = PROMPTS, length: int = LENGTH, seed: int = 0) -> Tensor:
    """Random ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (prompts, length), generator=generator)


def logit_difference(logits: Tensor) -> Tensor:
    """Answer minus foil at the last position [prompt]."""
    return logits[:, -1, ANSWER] - logits[:, -1, FOIL]


def forward(model: Any, tokens: Tensor) -> Callable[[], Tensor]:
    """A plain forward pass."""

    def plain() -> Tensor:
        with torch.no_grad():
            return model(tokens)

    return plain


# Operations


def block_flops(rows: float, keys: float) -> float:
    """One block on some rows that attend to so many keys each."""
    return 2 * rows * (4 * D * D + 2 * D * D_MLP) + 4 * rows * keys * D


def forward_flops(prompts: int, length: int, read: int = 0) -> float:
    """A forward pass, and the logits of some rows."""
    rows = prompts * length
    return LAYERS * block_flops(rows, (length + 1) / 2) + 2.0 * read * D * VOCAB


def rest_flops(layer: int, rows: int, keys: float, read: int, *, from_mid: bool = False) -> float:
    """What follows a changed state of some rows, up to the last states of the rows that are read.

    Args:
        layer: the layer where the change starts.
        rows: rows that changed.
        keys: keys that each attends to.
        read: rows of the last state that are read, of the changed ones.
        from_mid: the change starts behind the layer's attention.
    """
    mlp = 4.0 * D * D_MLP
    total = 0.0
    if from_mid:
        total += (read if layer == LAYERS - 1 else rows) * mlp
        layer += 1
    if layer < LAYERS:
        total += max(0, LAYERS - 1 - layer) * block_flops(rows, keys)
        last = 4.0 * D * D * (rows + read) + 4.0 * read * keys * D + read * mlp
        total += last  # keys and values of every row; queries, outputs and MLP where it is read
    return total


Cases = Iterator[Case]
