"""What the tests of path patching share: senders, receivers, places, and the slow way to do it."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from reference import paths as slow
from torch import Tensor
from zoo_ablation import OTHERS, ROWS, Slow, Toy

import resid_patching as rp

MODES = ("freeze", "recompute")
PER_ROW = [0, 3, -1]
PLACES = {
    "all": (None, "logit_diff"),
    "last": (-1, "kl"),
    "third": (2, "custom"),
    "one a prompt": (PER_ROW, "loss"),
}
"""Positions of the senders, each with a metric that sees them."""

RAGGED_SOURCES = [[8, 7, 6, 5, 4, 3, 2, 1], [44, 43, 42], [1, 2, 3, 40, 41]]
"""A source for each row of `zoo.RAGGED`, of the same length."""


def senders(toy: Toy) -> list[str]:
    """One or two writers of every kind."""
    found = ["embed"] + ["pos_embed"] * toy.has_positions
    found += ["0.1", "1.2", "2.0", "attn.0", "attn.1.bias"]
    return [*found, "mlp.0", "mlp.1", "mlp.0.5", "mlp.1.9", "mlp.0.bias"]


def joint_senders(toy: Toy) -> list[list[str]]:
    """Sets of writers that send together: of one layer, of several, a neuron behind a head."""
    found = [
        ["0.1", "0.3", "mlp.1"],
        ["0.2", "mlp.1.5", "mlp.1.9"],
        ["embed", "1.0", "attn.0", "mlp.1.bias"],
        ["attn.0.bias", "0.2", "mlp.0.3", "mlp.0.bias", "2.1"],
    ]
    return found + [["embed", "pos_embed"]] * toy.has_positions


def receivers(toy: Toy) -> list[str]:
    """One or two receivers of every kind."""
    kv = toy.n_kv_heads - 1
    found = ["logits", "2.1.q", "1.3.q", f"2.{kv}.k", f"1.{kv}.v", "mlp.1.in", "mlp.2.in"]
    found += ["resid_pre.2", "resid_post.1", "resid_pre.0"]
    return found + ["resid_mid.1"] * (not toy.parallel)


def receivers_together(toy: Toy) -> list[list[str]]:
    """Sets of receivers that are written together: of one layer, of several, of all kinds."""
    kv = toy.n_kv_heads - 1
    found = [
        ["2.0.q", "2.3.q"],
        [f"2.{kv}.v", "2.0.q", f"2.{kv}.k"],
        ["1.1.q", "2.2.q", f"1.{kv}.k"],
        ["mlp.2.in", "mlp.1.in", "2.1.q"],
        ["resid_pre.1", "2.0.q", "mlp.1.in"],
        ["1.0.q", "logits"],
    ]
    return found if toy.parallel else [*found, ["resid_mid.2", "1.0.q", "mlp.2.in"]]


def columns(toy: Toy) -> list[list[str]]:
    """Every alternative of a grid: receivers alone, and receivers together."""
    return [[receiver] for receiver in receivers(toy)] + receivers_together(toy)


def few_senders() -> list[str]:
    """A writer of every family."""
    return ["embed", "0.1", "attn.1.bias", "mlp.0", "mlp.1.9"]


def few_columns(toy: Toy) -> list[list[str]]:
    """Receivers of every family, alone and together."""
    kv = toy.n_kv_heads - 1
    alone = [["logits"], ["2.1.q"], [f"2.{kv}.k"], ["mlp.1.in"], ["resid_pre.2"]]
    return [*alone, [f"2.{kv}.v", "2.0.q"], ["1.1.q", "mlp.2.in"]]


def grid(sets: Sequence[Sequence[str]]) -> Any:
    """The alternatives as the library takes them."""
    return rp.receivers(*[one[0] if len(one) == 1 else list(one) for one in sets])


def upstream(toy: Toy, layer: int, *, by_head: bool = False) -> list[str]:
    """All writers before a layer, together the whole stream."""
    found = ["embed"] + ["pos_embed"] * toy.has_positions
    for before in range(layer):
        heads = [*(f"{before}.{head}" for head in range(4)), f"attn.{before}.bias"]
        found += heads if by_head else [f"attn.{before}"]
        found.append(f"mlp.{before}")
    return found


New = Callable[[str], Tensor]


class SlowPaths(Slow):
    """The slow way on one model: runs of equal length, a pass for each thing that is noted."""

    def __init__(self, toy: Toy, rows: Sequence[Sequence[int]], own_hooks: Sequence[Any] = ()):
        super().__init__(toy, rows, own_hooks)
        self.cache = slow.activations(self.model, self.tokens, own_hooks)

    def record(
        self, sending: Sequence[str], reading: Sequence[str], new: New, positions: Any, mlps: str
    ) -> dict[str, Tensor]:
        """What each receiver would read [prompt, pos, ...]."""
        values = {sender: new(sender) for sender in sending}
        args = (self.model, self.tokens, sending, values, self.where(positions), mlps, reading)
        return slow.record(*args, self.cache, self.weights, self.own_hooks)

    def write(
        self, reading: Sequence[str], noted: dict[str, Tensor], positions: Any
    ) -> tuple[Tensor, Tensor]:
        """Logits with the receivers written: the model run again, and everything later frozen."""
        args = (self.model, self.tokens, reading, noted, self.where(positions))
        total = slow.write(*args, self.own_hooks)
        clean = (self.cache, self.weights, self.toy.norm, self.toy.eps)
        return total, slow.write_directly(*args, *clean, self.own_hooks)

    def reaches(self, sending: Sequence[str], reading: Sequence[str]) -> bool:
        """Whether any of the senders comes before any of the receivers."""
        n_layers = len(self.model.blocks)
        return any(
            slow.precedes(sender, receiver, n_layers, self.toy.parallel)
            for sender in sending
            for receiver in reading
        )

    def effect(
        self,
        sending: Sequence[str],
        reading: Sequence[str],
        new: New,
        positions: Any,
        mlps: str,
        metric: str,
        noted: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Total and direct effect [2, prompt], or NaN where no sender comes before a receiver."""
        if not self.reaches(sending, reading):
            return torch.full((2, len(self.tokens)), torch.nan, dtype=self.clean.dtype)
        if noted is None:
            noted = self.record(sending, reading, new, positions, mlps)
        base = self.score(metric, self.clean)
        both = [self.score(metric, x) - base for x in self.write(reading, noted, positions)]
        return torch.stack(both)


@functools.cache
def runs(toy: Toy) -> tuple[Any, Any]:
    """The base run and the source run of a toy; kept, because their clean activations are."""
    return rp.capture(toy.model, ROWS), rp.capture(toy.model, OTHERS)


@functools.cache
def twins(toy: Toy) -> tuple[SlowPaths, SlowPaths]:
    """The slow twins of `runs`."""
    return SlowPaths(toy, ROWS), SlowPaths(toy, OTHERS)


def dealt(n_rows: int, n_columns: int, part: int, parts: int, seed: int) -> list[tuple[int, int]]:
    """The cells of a grid that fall to one part: together the parts have every cell once."""
    cells = [(row, column) for row in range(n_rows) for column in range(n_columns)]
    return sorted(random.Random(seed).sample(cells, len(cells))[part::parts])
