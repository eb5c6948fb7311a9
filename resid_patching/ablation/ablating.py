"""One ablation API: zero, mean, resample, each named; total beside direct effect.

    effect = ablate(run, heads(model), Zero(), metric=logit_diff(" Mary", " John"))
    effect.baseline, effect.patched, effect.total, effect.direct, effect.indirect

    total    = metric(model run again with the target replaced) - baseline
    direct   = metric(the same change of the stream carried to the last state, every later
               write frozen, final norm live) - baseline
    indirect = total - direct: what the rest of the model made of the change

The kind has no default: "head X does Y" means nothing without what X was replaced with.

    Zero()                                     the target writes nothing
    Mean(reference, over=("batch",))           its mean over other prompts; over is required
    Resample(source, pairing="rowwise")        its value on other prompts
    Path(to="logits", using=..., mlps=...)     only what it sends to chosen readers

An ablation shows what removing a part does in *this* run. It does not show that the part is
unnecessary: others may have taken over, and the kinds disagree where the model relies on a
part's average. Sign: a negative total on a logit difference means the target pushed the answer up.

Source: Wang et al. 2022 (arXiv 2211.00593) on mean ablation; Chan et al. 2022, "Causal
Scrubbing", on resampling; McGrath et al. 2023 (arXiv 2307.15771) on later layers that repair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from resid_patching.ablation.effect import Effect
from resid_patching.ablation.fills import Fills
from resid_patching.ablation.kinds import Kind, Path, count_prompts, require_kind
from resid_patching.ablation.targets import Targets, find_sites
from resid_patching.address import Address
from resid_patching.metrics import Metric, as_metric
from resid_patching.models import require
from resid_patching.paths import patch_paths, require_readers, require_senders
from resid_patching.prompts import Positions
from resid_patching.rerun import Edit, Route, Variant, rerun
from resid_patching.result import Axis, provenance
from resid_patching.run import Run


def ablate(
    run: Run,
    targets: Targets,
    how: Any = None,
    *,
    metric: Any,
    positions: Positions = None,
    joint: bool = False,
    routes: Sequence[Route] = ("plain", "replay", "full"),
    progress: Callable[[int], None] | None = None,
) -> Effect:
    """Replaces targets and measures what that does.

    Args:
        run: the run that is changed; it is the base, and what the metric is read from.
        targets: addresses or their texts: writers, stream states, and a head's q, k, v, z and
            pattern (k and v by key-value head). Paths start at writers alone.
        how: `Zero()`, `Mean(...)`, `Resample(...)` or `Path(...)`. There is no default.
        metric: `rp.logit_diff(...)` or another of `metrics`, or a function of logits.
        positions: where the targets are replaced: None for all, one position of every prompt, or
            one for each prompt. For a pattern these are the rows that attend.
        joint: replace all targets together, in one row; else one at a time, one row each.
        routes: how the engine may run the variants; all give the same numbers.
        progress: called with the number of variants just done, for each group of prompts.

    Returns:
        An `Effect` [target, batch] whose text names the kind; of a `Path` to `rp.readers(...)`
        an `Effect` [target, reader, batch], NaN where no write reaches a reader.

    Raises:
        AblationError: the kind is missing, a text, a class, or lacks what it needs.
        AddressError: a target or reader this model does not have.
        PositionError: a prompt has no such position.
        PromptError: prompts of unequal length where a kind needs equal ones.
    """
    kind = require_kind(how)
    sites = find_sites(run.view, targets)
    if isinstance(kind, Path):
        require_senders(sites, joint=joint)
        require_readers(run.view, kind.ends)
    chosen = as_metric(metric)
    require(run.view, "stream", "readout")
    reading = chosen.bind(run)
    variants = variants_of(run, sites, kind, positions, joint=joint)
    labels = (" + ".join(map(str, sites)) or "nothing",) if joint else tuple(map(str, sites))
    axes = [Axis("target", labels), Axis("batch", tuple(range(len(run))))]
    options: dict[str, Any] = {"routes": routes, "progress": progress}
    if isinstance(kind, Path):
        found: Any = patch_paths(run, variants, kind.ends, reading, mlps=kind.mlps, **options)
        if kind.is_sweep:
            axes.insert(1, Axis("reader", kind.ends.labels))
        else:
            found = replace(found, patched=found.patched[:, 0], direct=found.direct[:, 0])
    else:
        found = rerun(run, variants, reading, **options)
    return _effect(run, kind, chosen, positions, joint, tuple(axes), found)


def variants_of(
    run: Run, sites: Sequence[Address], kind: Kind, positions: Positions, *, joint: bool
) -> list[Variant]:
    """The edits of each row of an ablation; for a path, those of its senders."""
    source = kind.using if isinstance(kind, Path) else kind
    where = run.locate(positions)
    fills = Fills(run, source, where, list(sites))
    edits = [Edit(site, where, fills.fill(site)) for site in sites]
    return [tuple(edits)] if joint else [(edit,) for edit in edits]


def measure(run: Run, metric: Any) -> Float[Tensor, " batch"]:
    """A metric on a run as it is: for a source, what a base's effects are compared with.

    Args:
        run: the run.
        metric: `rp.logit_diff(...)` or another of `metrics`, or a function of logits.
    """
    require(run.view, "stream", "readout")
    return rerun(run, [], as_metric(metric).bind(run)).baseline


def _effect(
    run: Run,
    kind: Kind,
    metric: Metric,
    positions: Positions,
    joint: bool,
    axes: tuple[Axis, ...],
    found: Any,
) -> Effect:
    where = _positions_text(positions)
    together = " (joint)" if joint else ""
    if isinstance(kind, Path):
        base = f"base of {count_prompts(run)}"
        plan = f"{kind}{together}, sent from {where}, {base}, effect on {metric}"
    else:
        plan = f"{kind} ablation{together} at {where}, effect on {metric}"
    weights = getattr(metric, "weights", None)
    return Effect(
        values=found.patched - found.baseline,
        axes=axes,
        unit=metric.unit,
        provenance=provenance(run.view, run.prompts, plan),
        how=str(kind),
        metric=str(metric),
        joint=joint,
        positions=where,
        baseline=found.baseline,
        patched=found.patched,
        direct=found.direct - found.baseline,
        weights=None if weights is None else weights(run),
        routes=found.routes,
    )


def _positions_text(positions: Positions) -> str:
    if positions is None:
        return "all positions"
    return f"position {positions}" if isinstance(positions, int) else "one position a prompt"
