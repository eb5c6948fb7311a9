"""What the ablation tests share: models to try, targets to replace, and the slow way to do it."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import zoo
from reference import ablation as slow
from torch import Tensor

import resid_patching as rp

ANSWER, FOIL = 3, 6
ROWS = [[3, 1, 4, 1, 5, 9], [27, 18, 28, 2, 7, 1], [31, 41, 5, 9, 26, 8]]
OTHERS = [[14, 15, 9, 2, 6, 5], [2, 7, 18, 28, 45, 4], [9, 9, 8, 7, 6, 40]]
RAGGED_OTHERS = [[1, 2, 3], [44, 43, 42, 41, 40], [8, 7, 6, 5, 4, 3, 2, 1]]
"""Rows of the lengths of `zoo.RAGGED` in another order: a shuffle can pair them in one way only."""

HOOKED_CELLS = (
    zoo.Cell(),
    zoo.Cell(parallel=True, folded=True),
    zoo.Cell("RMS", parallel=True, grouped=True),
    zoo.Cell("RMS", grouped=True, folded=True),
)
BRIDGES = ("gpt2_untied raw", "neox_parallel raw", "neox_sequential folded")
BRIDGE_CELLS = HOOKED_CELLS[-2:]


@dataclass(frozen=True)
class Toy:
    """A model with what the slow way needs to know of it."""

    label: str
    norm: str
    eps: float
    route: str
    """The fastest route that the model takes."""

    def __str__(self) -> str:
        return self.label

    @property
    def model(self) -> Any:
        return _model(self.label)

    @property
    def parallel(self) -> bool:
        return bool(self.model.cfg.parallel_attn_mlp)

    @property
    def n_kv_heads(self) -> int:
        return self.model.cfg.n_key_value_heads or zoo.N_HEADS

    @property
    def has_positions(self) -> bool:
        return rp.ModelView(self.model).has_pos_embed


@functools.cache
def _model(label: str) -> Any:
    backend, _, rest = label.partition(" ")
    for cell in zoo.MATRIX:
        if str(cell) == rest:
            return zoo.build(backend, cell)
    name, _, state = rest.partition(" ")
    return zoo.named(name, folded=state == "folded")


def _toys() -> tuple[Toy, ...]:
    # Attention of Hugging Face's rotary models takes its softmax in float32, even in float64.
    rows = [(f"hooked {cell}", cell.norm, zoo.EPS, "plain") for cell in HOOKED_CELLS]
    rows = rows if zoo.HAS_HOOKED else []
    rows += [(f"bridge {name}", "LN", zoo.EPS, "plain") for name in BRIDGES]
    rows += [(f"bridge {cell}", cell.norm, zoo.EPS, "replay") for cell in BRIDGE_CELLS]
    return tuple(Toy(*row) for row in rows)


TOYS = _toys()
BY_LABEL = {toy.label: toy for toy in TOYS}
PLAIN = BY_LABEL["hooked LN-sequential-full-untied-raw" if zoo.HAS_HOOKED else
                 "bridge gpt2_untied raw"]  # fmt: skip
GPT2 = BY_LABEL["bridge gpt2_untied raw"]
KINDS_OF_BACKEND = (PLAIN, GPT2) if zoo.HAS_HOOKED else (GPT2,)


def targets(toy: Toy) -> list[str]:
    """One or two sites of every family that the model has."""
    kv = toy.n_kv_heads - 1
    found = ["embed"] + ["pos_embed"] * toy.has_positions
    found += ["attn.1", "1.2", "attn.1.bias", "mlp.1", "mlp.1.5", "mlp.1.bias"]
    found += ["resid_pre.1", "resid_post.1", "resid_pre.0", "resid_post.2"]
    found += [] if toy.parallel else ["resid_mid.1"]
    found += ["1.2.q", f"1.{kv}.k", f"0.{kv}.v", "1.3.z", "1.2.pattern", "0.0", "mlp.2", "2.3.q"]
    return found


def joint_targets(toy: Toy) -> list[list[str]]:
    """Sets of sites that are replaced together: of one stage, of one layer, of several."""
    kv = toy.n_kv_heads - 1
    found = [
        ["1.0", "1.2", "attn.1.bias"],
        ["attn.1", "0.1", "attn.0.bias"],
        ["mlp.0.3", "mlp.0.9", "mlp.0.bias", "mlp.2"],
        ["1.0.q", f"1.{kv}.k", f"1.{kv}.v", "1.3.pattern", "1.1", "1.3.z"],
        ["embed", "0.1", "resid_post.0", "1.2.q", "mlp.2"],
        ["resid_pre.1", "resid_post.1", "2.0"],
    ]
    if not toy.parallel:
        found.append(["0.1", "resid_mid.1", "attn.1", "mlp.1.4"])
    if toy.has_positions:
        found.append(["embed", "pos_embed"])
    return found


class Slow:
    """The slow way on one model: runs of equal length, their activations made once."""

    def __init__(self, toy: Toy, rows: Sequence[Sequence[int]], own_hooks: Sequence[Any] = ()):
        self.toy, self.model, self.own_hooks = toy, toy.model, own_hooks
        self.weights = zoo.plain_weights(self.model)
        self.tokens = torch.tensor(rows)
        self.cache = slow.activations(self.model, self.tokens)
        self.clean = slow.forward(self.model, self.tokens, [], self.weights, own_hooks)

    def value(self, site: str) -> Tensor:
        return slow.value(site, self.cache, self.weights)

    def where(self, positions: Any) -> Tensor:
        """Positions [prompt, n]."""
        n, length = self.tokens.shape
        if positions is None:
            return torch.arange(length).expand(n, -1)
        if isinstance(positions, int):
            positions = [positions] * n
        spans = [[span] if isinstance(span, int) else span for span in positions]
        return torch.tensor([[position % length for position in span] for span in spans])

    def changed(self, sites: Sequence[str], positions: Any, new: Any) -> tuple[Tensor, Tensor]:
        """Logits with the sites replaced: the model run again, and everything later frozen.

        `new(site)` gives what is put in their place at every position [prompt, pos, ...].
        """
        index = self.where(positions)
        row = torch.arange(len(index))[:, None]
        changes = [(site, index, new(site)[row, index]) for site in sites]
        args = (self.model, self.tokens, changes, self.weights)
        total = slow.forward(*args, self.own_hooks)
        direct = slow.direct_logits(*args, self.cache, self.toy.norm, self.toy.eps)
        return total, direct

    def score(self, metric: str, logits: Tensor) -> Tensor:
        """A metric of logits [prompt]."""
        match metric:
            case "logit_diff":
                return slow.logit_diff(logits, ANSWER, FOIL)
            case "prob":
                return slow.probability(logits, ANSWER)
            case "loss":
                return slow.loss(logits, self.tokens)
            case "kl":
                return slow.divergence(self.clean, logits)
        return custom(logits)


def custom(logits: Tensor) -> Tensor:
    """A metric of the caller: something of every position and token."""
    return logits.tanh().mean((1, 2))


METRICS: dict[str, Any] = {
    "logit_diff": rp.logit_diff(ANSWER, FOIL),
    "prob": rp.prob(ANSWER),
    "loss": rp.loss(),
    "kl": rp.kl(),
    "custom": custom,
}


def in_another_order(sites: Sequence[str]) -> list[str]:
    """The same sites, shuffled."""
    return random.Random(0).sample(list(sites), len(sites))
