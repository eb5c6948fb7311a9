"""What `ioi.py` computes: from prompts of the indirect-object task to the heads they rest on."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import resid_patching as rp  # noqa: E402
from resid_patching.cli.frame import UsageError  # noqa: E402
from resid_patching.cli.progress import Progress  # noqa: E402


@dataclass(frozen=True, eq=False)
class Study:
    """What was found, step by step.

    Attributes:
        pairs: base and source prompts as texts.
        run: the base prompts on the model.
        differing: where base and source differ, for each pair.
        source: the logit difference of each source prompt [batch].
        is_top: whether the answer is the top prediction [batch].
        attribution: direct logit attribution by head, at END.
        to_logits: every head's path to the logits, from END.
        up, down: the strongest heads of these that push the answer up, and down; strongest first.
        to_queries: every head's path from END to the queries of `up`, side by side.
        knocked: the heads of `up` mean-ablated together.
        controls: as many other heads mean-ablated together, one effect for each random set.
        alone: the heads of `up` mean-ablated one at a time.
    """

    pairs: rp.PromptPairs
    run: rp.Run
    differing: list[list[Any]]
    source: Any
    is_top: Any
    attribution: rp.Attribution
    to_logits: rp.Effect
    up: list[str]
    down: list[str]
    to_queries: rp.Effect
    knocked: rp.Effect
    controls: list[rp.Effect]
    alone: rp.Effect

    @property
    def base(self) -> Any:
        """The logit difference of each base prompt [batch]."""
        return self.to_logits.baseline

    @property
    def unreached(self) -> list[str]:
        """The heads of `up` that no head writes before."""
        none = self.to_queries.total.isnan().all(-1).all(0)
        return [head for head, is_so in zip(self.up, none.tolist(), strict=True) if is_so]

    def left(self, effect: rp.Effect) -> float:
        """The share of the mean logit difference that is left; NaN where there is none to lose."""
        before = float(effect.baseline.double().mean())
        return float(effect.patched.double().mean()) / before if before > 0 else math.nan


def study(
    view: rp.ModelView,
    pairs: rp.PromptPairs,
    *,
    n_heads: int,
    n_controls: int,
    seed: int,
    prepend_bos: bool | None,
) -> Study:
    """Sweeps, finds and knocks out.

    Args:
        view: the model.
        pairs: prompts with answers, foils and the position END.
        n_heads: how many of the strongest heads are followed up.
        n_controls: random sets of other heads.
        seed: of these sets.
        prepend_bos: as in `rp.capture`.

    Raises:
        UsageError: no head pushes the answer up, or too few others are left to compare with.
    """
    answers, foils = list(pairs.answers or ()), list(pairs.foils or ())
    base = rp.capture(view, pairs.base, prepend_bos=prepend_bos)
    source = rp.capture(view, pairs.source, prepend_bos=prepend_bos)
    metric = rp.logit_diff(answers, foils)
    dla = rp.direct_logit_attribution(base, answers, foils, by="head", positions=-1)
    to_logits = _paths(base, source, "logits", metric, pairs)
    up = strongest(to_logits, n_heads, -1)
    others = [head for head in to_logits.targets if head not in up]
    sets = draw_sets(others, len(up), n_controls, seed)
    return Study(
        pairs=pairs,
        run=base,
        differing=rp.differences(base.prompts, source.prompts),
        source=rp.measure(source, metric),
        is_top=_is_top(base, dla.answers),
        attribution=dla,
        to_logits=to_logits,
        up=up,
        down=strongest(to_logits, n_heads, +1),
        to_queries=_paths(base, source, rp.receivers(*(f"{h}.q" for h in up)), metric, pairs),
        **_knocked_out(base, source, metric, up, sets),
    )


def strongest(effect: rp.Effect, k: int, sign: int) -> list[str]:
    """The k targets with the largest mean effects of one sign, largest first.

    Args:
        effect: the effects of targets.
        k: how many at most.
        sign: -1 for targets whose replacement lowers the metric, +1 for those that raise it.
    """
    means = dict(zip(effect.targets, effect.total.double().mean(-1).tolist(), strict=True))
    ranked = sorted(means, key=lambda target: -sign * means[target])
    return [target for target in ranked[:k] if sign * means[target] > 0]


def draw_sets(others: list[str], size: int, n: int, seed: int) -> list[list[str]]:
    """Distinct random sets of other heads; all of them where there are fewer than asked for.

    Args:
        others: the heads to draw from.
        size: heads in a set.
        n: how many sets.
        seed: of the draw.
    """
    if size == 0:
        raise UsageError(
            "no head pushes the answer up on these prompts, so there is nothing to follow"
        )
    if len(others) < size:
        raise UsageError(
            f"{size} heads were found and {len(others)} others are left, too few to compare with; "
            "give a smaller --heads"
        )
    rng = random.Random(seed)
    order = {head: place for place, head in enumerate(others)}
    drawn: dict[tuple[str, ...], None] = {}
    while len(drawn) < min(n, math.comb(len(others), size)):
        drawn[tuple(sorted(rng.sample(others, size), key=order.__getitem__))] = None
    return [list(heads) for heads in drawn]


def _paths(base: rp.Run, source: rp.Run, to: Any, metric: Any, pairs: rp.PromptPairs) -> rp.Effect:
    path = rp.Path(to=to, using=rp.Resample(source, pairing="rowwise"), mlps="recompute")
    senders = rp.heads(base)
    with Progress() as progress:
        progress.expect(len(base))
        tick = progress.ticker(base, len(senders) * len(path.ends.sets))
        return rp.ablate(
            base,
            senders,
            path,
            metric=metric,
            positions=list(pairs.positions["END"]),
            progress=tick,
        )


def _knocked_out(
    base: rp.Run, source: rp.Run, metric: Any, up: list[str], sets: list[list[str]]
) -> dict[str, Any]:
    """Mean-ablated together, the found heads and each random set; and the found heads alone."""
    mean = rp.Mean(source, over=("batch", "pos"))  # prompts differ in length
    with Progress() as progress:
        progress.expect(len(base))
        options: dict[str, Any] = {"metric": metric}
        options["progress"] = progress.ticker(base, len(up) + 1 + len(sets))
        return {
            "alone": rp.ablate(base, up, mean, **options),
            "knocked": rp.ablate(base, up, mean, joint=True, **options),
            "controls": [rp.ablate(base, heads, mean, joint=True, **options) for heads in sets],
        }


def _is_top(base: rp.Run, answers: tuple[int, ...]) -> Any:
    best = base.logits_at(-1)[:, 0].argmax(-1).cpu()
    return best == best.new_tensor(answers)
