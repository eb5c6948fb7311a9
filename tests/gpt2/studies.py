"""Two studies of a model: prose without a part, and the heads of the indirect-object circuit."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import resid_patching as rp

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import ioi_study  # noqa: E402


def perplexity_ratio(model: Any, prose: str, target: str, length: int = 256) -> float:
    """How many times the perplexity on prose grows where a part is replaced by zero."""
    run = rp.capture(model, rp.windows(model, prose, length=length))
    effect = rp.ablate(run, target, rp.Zero(), metric=rp.loss())
    return float(effect.perplexity["ratio"].iloc[0])


@dataclass(frozen=True)
class Circuit:
    """The heads that the study names, strongest first.

    Attributes:
        movers: heads whose paths to the logits push the answer up.
        negative: heads whose paths push it down.
        behind: the six heads with the strongest paths into the queries of the first movers.
        correct: the share of prompts whose answer is the top prediction.
    """

    movers: list[str]
    negative: list[str]
    behind: list[str]
    correct: float


def circuit(model: Any, n: int, prepend_bos: bool | None = None) -> Circuit:
    """Looks for the circuit on n pairs of prompts whose sources have other names."""
    pairs = rp.indirect_object_prompts(model, n, seed=0, corrupt="names")
    options = {"n_heads": 5, "n_controls": 3, "seed": 0, "prepend_bos": prepend_bos}
    found = ioi_study.study(rp.ModelView(model), pairs, **options)
    to_queries = found.to_queries.total.nanmean(-1)[:, :3].nan_to_num().abs().amax(1)
    strongest = to_queries.topk(6).indices.tolist()
    return Circuit(
        movers=found.up,
        negative=found.down,
        behind=[found.to_queries.targets[n] for n in strongest],
        correct=float(found.is_top.double().mean()),
    )
