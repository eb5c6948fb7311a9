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
    Path(to="logits", using=..., mlps=...)     only what it sends to chosen receivers

An ablation shows what removing a part does in *this* run. It does not show that the part is
unnecessary: others may have taken over, and the kinds disagree where the model relies on a
part's average. Sign: a negative total on a logit difference means the target pushed the answer up.

Source: Wang et al. 2022 (arXiv 2211.00593) on mean ablation; Chan et al. 2022, "Causal
Scrubbing", on resampling; McGrath et al. 2023 (arXiv 2307.15771) on later layers that repair.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from resid_patching.ablation.attending import Attention, require_own_queries
from resid_patching.ablation.effect import Effect
from resid_patching.ablation.fills import Fills
from resid_patching.ablation.held import positions_text, unheld
from resid_patching.ablation.kinds import Kind, Path, count_prompts, require_kind
from resid_patching.ablation.sharing import Rows, Shared, identity_of
from resid_patching.ablation.targets import (
    Row,
    Target,
    Targets,
    find_rows,
    list_targets,
    name_of_row,
    require_apart,
    site_of,
)
from resid_patching.errors import AblationError, PositionError
from resid_patching.metrics import Metric, as_metric
from resid_patching.models import exact, require
from resid_patching.notebook import bar
from resid_patching.paths import (
    EdgeSet,
    find_edges,
    is_edge,
    patch_paths,
    patch_together,
    require_receivers,
    require_senders,
)
from resid_patching.processes import Team
from resid_patching.prompts import PositionIndex, Spans
from resid_patching.rerun import EVERYTHING, Edit, Route, Variant, rerun
from resid_patching.rerun.engine import prompt_chunks
from resid_patching.result import Axis, provenance
from resid_patching.run import Run


@exact()
def ablate(
    run: Run,
    targets: Targets,
    how: Kind,
    *,
    metric: Metric | Callable[..., Tensor],
    positions: Spans | str = None,
    joint: bool = False,
    routes: Sequence[Route] = ("plain", "replay", "full"),
    progress: Callable[[int], object] | None = None,
    rows: str | os.PathLike[str] | Rows | None = None,
    team: Team | None = None,
) -> Effect:
    """Replaces targets and measures what that does.

    Args:
        run: the run that is changed; it is the base, and what the metric is read from.
        targets: addresses or their texts: writers, stream states, a head's q, k, v, z and pattern
            (k and v by key-value head), and `rp.attention(...)`. A tuple of them in the list is one
            row, whose members are replaced together. Paths start at writers alone. Or edges, such
            as "9.6->10.0.q" or `rp.edges(run)`: of what the sender writes, the receiver alone hears
            the replacement, and the model behind the receiver is run again.
        how: `Zero()`, `Mean(...)`, `Resample(...)` or `Path(...)`. There is no default.
        metric: `rp.logit_diff(...)` or another of `metrics`, or a function of logits.
        positions: where the targets are replaced: None for all together, one position of every
            prompt, one for each prompt, several for each ([[2, 3, 4], [2, 3]], replaced together),
            or "each" for every position in turn. For a pattern these are the rows that attend.
            `rp.attention(...)` names positions of its own.
        joint: replace all targets together, in one row; else one row at a time. What the model
            computes later wins: a state keeps the value it is set to, whatever was written into
            it, and so does a head's z, whatever its query is.
        routes: how the engine may run the variants; all give the same numbers.
        progress: called with the number of variants just done, for each group of prompts. Without
            it, a Jupyter notebook shows a bar, and nothing else does.
        rows: a file in which each row is saved as soon as it is found. If the file already holds
            rows of this sweep, the sweep continues from them, and the result is that of an unbroken
            sweep, to the last bit on the same kind of machine.
        team: `rp.team()` where a launcher started several processes, which then share the work. All
            make this call with the same arguments, and each gets the whole result, to the last bit
            that of one process.

    Returns:
        An `Effect` [target, batch] whose text names the kind. Of a `Path` to `rp.receivers(...)` it
        is [target, receiver, batch], NaN where no write reaches a receiver; at each position in
        turn [target, position, batch], NaN where a prompt has no such position.

    Raises:
        AblationError: the kind is missing, a text, a class, or lacks what it needs.
        AddressError: a target or receiver this model does not have; or, replaced together, a layer
            and a part of it, which would be the layer alone.
        PositionError: a prompt has no such position, or a span and what takes its place are of
            unequal length.
        PromptError: prompts of unequal length where a kind needs equal ones.
        NotFiniteError: the model's own states overflow on a prompt.
        SweepMismatchError: `rows` holds rows of another sweep.
        ResultFormatError: `rows` is damaged, or no file of rows.
        LostProcessError: a process of the team has ended.
        UnequalProcessesError: the processes of the team were given different sweeps.
    """
    kind = require_kind(how)
    listed = list_targets(targets)
    edges = EdgeSet(find_edges(run.view, listed)) if any(map(is_edge, listed)) else None
    if edges is None:
        groups = find_rows(run.view, targets, joint=joint)
    else:
        groups = [(sender,) for sender in edges.senders]
    each = isinstance(positions, str)
    if edges is not None:
        _require_edges(kind, joint and (rows is not None or team is not None))
        for senders in edges.heard.values() if joint else ():
            require_apart(senders)
    if each:
        _require_each(positions, kind, edges is not None)
    all_targets = [target for group in groups for target in group]
    if positions is not None and any(isinstance(target, Attention) for target in all_targets):
        raise AblationError(
            "rp.attention(...) names its queries itself; leave out positions=, or ablate the other "
            "targets in a call of their own"
        )
    if isinstance(kind, Path):
        require_senders(list(map(site_of, all_targets)))
        require_receivers(run.view, kind.ends)
    chosen = as_metric(metric)
    require(run.view, "stream", "readout")
    reading = chosen.bind(run)
    places = run.prompts.each_position() if each else [run.prompts.locate_spans(positions)]
    variants = variants_of(run, groups, kind, places)
    labels = tuple(map(name_of_row, groups)) if edges is None else edges.labels(joint)
    axes = [Axis("target", labels), Axis("batch", tuple(range(len(run))))]
    where = _where_text(positions, places, all_targets)
    origin = provenance(run, _plan(run, kind, chosen, where, joint, edges is not None))
    team = Team() if team is None else team
    share = EVERYTHING
    if variants and (rows is not None or team.size > 1):
        beside = tuple(range(len(places))) if each else None
        identity = identity_of(run, kind, chosen, reading, places, labels, origin, routes)
        names = _names(labels, kind, beside) if edges is None else edges.names
        share = Shared(run.view, team, names, identity, rows)
    columns = len(kind.ends.sets) if isinstance(kind, Path) else 1
    n_rows = len(variants) * columns if edges is None else len(edges.edges)
    n_changes = n_rows * len(prompt_chunks(run, 0))
    with bar(n_changes if progress is None else None, "change") as shown:
        options: dict[str, Any] = {"routes": routes, "progress": progress or shown, "share": share}
        if edges is not None and joint:
            found: Any = patch_together(run, variants, edges, reading)
        elif edges is not None:
            options |= {"mlps": "freeze", "wanted": set(edges.cells)}
            found = patch_paths(run, variants, edges.ends, reading, **options)
        elif isinstance(kind, Path):
            found = patch_paths(run, variants, kind.ends, reading, mlps=kind.mlps, **options)
        else:
            found = rerun(run, variants, reading, **options)
    ends = kind.ends if isinstance(kind, Path) else edges and edges.ends
    patched, direct = found.patched, found.direct
    if edges is not None and joint:
        patched, direct = patched[:, 0], direct[:, 0]
    elif edges is not None:
        senders, receivers = zip(*edges.cells, strict=True)
        patched, direct = (t[list(senders), list(receivers)] for t in (patched, direct))
    elif each:
        axes.insert(1, Axis("position", tuple(range(len(places)))))
        patched, direct = _by_place(patched, places), _by_place(direct, places)
    elif isinstance(kind, Path) and kind.is_sweep:
        axes.insert(1, Axis("receiver", kind.ends.labels))
    elif isinstance(kind, Path):
        patched, direct = patched[:, 0], direct[:, 0]
    return Effect(
        values=patched - found.baseline,
        axes=tuple(axes),
        unit=chosen.unit,
        provenance=origin,
        how=str(kind) if edges is None else f"{kind}, along each edge",
        metric=str(chosen),
        joint=joint,
        positions=where,
        baseline=found.baseline,
        patched=patched,
        direct=direct - found.baseline,
        weights=None if chosen.weights is None else chosen.weights(run),
        routes=found.routes,
        token_texts=run.prompts.token_texts if each or isinstance(positions, int) else None,
        path_to=ends.labels if ends is not None else None,
    )


def _require_edges(kind: Kind, shares_one_row: bool) -> None:
    """Raises AblationError for what is not done to edges."""
    if isinstance(kind, Path):
        raise AblationError(
            "an edge says where it ends, so it takes no Path; give Zero(), Mean(...) or "
            "Resample(...)"
        )
    if shares_one_row:
        raise AblationError("edges replaced together are one row; leave out rows= and team=")


def _names(
    labels: Sequence[str], kind: Kind, places: Sequence[int] | None
) -> list[list[tuple[str, str | int | None]]]:
    """What the cells of each variant are called in rows."""
    if places is not None:
        return [[(label, place)] for label in labels for place in places]
    beside = kind.ends.labels if isinstance(kind, Path) and kind.is_sweep else (None,)
    return [[(label, column) for column in beside] for label in labels]


def _require_each(positions: str, kind: Kind, of_edges: bool) -> None:
    if positions != "each":
        raise PositionError(
            f"positions are whole numbers, None for all, or 'each'; got {positions!r}"
        )
    if of_edges or isinstance(kind, Path):
        raise AblationError(
            "a path is sent from one set of positions at a time; call ablate once for each "
            "position instead of positions='each'"
        )


def _by_place(values: Tensor, places: Sequence[PositionIndex]) -> Tensor:
    """[target * place, batch] -> [target, place, batch], NaN where a prompt has no such place."""
    has = torch.stack([place.valid.any(1) for place in places]).to(values.device)
    return values.unflatten(0, (-1, len(places))).masked_fill(~has, torch.nan)


def variants_of(
    run: Run, groups: Sequence[Row], kind: Kind, places: Sequence[PositionIndex]
) -> list[Variant]:
    """The edits of each row of an ablation, place by place; for a path, those of its senders."""
    targets = list(dict.fromkeys(target for group in groups for target in group))
    replaced = places[0] if len(places) == 1 else run.locate(None)
    fills = Fills(run, kind.using if isinstance(kind, Path) else kind, targets, replaced)
    new = {target: fills.fill(target) for target in targets}
    queries: dict[Target, PositionIndex] = {
        target: run.prompts.locate_spans(target.queries)
        for target in targets
        if isinstance(target, Attention)
    }
    for group in groups:
        require_own_queries(group, queries)
    return [
        tuple(
            Edit(site_of(one), unheld(run, site_of(one), queries.get(one, place)), new[one])
            for one in group
        )
        for group in groups
        for place in places
    ]


def measure(run: Run, metric: Metric | Callable[..., Tensor]) -> Float[Tensor, " batch"]:
    """A metric on a run as it is: for a source, what a base's effects are compared with.

    Args:
        run: the run.
        metric: `rp.logit_diff(...)` or another of `metrics`, or a function of logits.
    """
    require(run.view, "stream", "readout")
    return rerun(run, [], as_metric(metric).bind(run)).baseline


def _plan(run: Run, kind: Kind, metric: Metric, where: str, joint: bool, of_edges: bool) -> str:
    together = " (joint)" if joint else ""
    if of_edges:
        return f"{kind} along each edge{together}, sent from {where}, effect on {metric}"
    if isinstance(kind, Path):
        base = f"base of {count_prompts(run)}"
        return f"{kind}{together}, sent from {where}, {base}, effect on {metric}"
    return f"{kind} ablation{together} at {where}, effect on {metric}"


def _where_text(
    positions: Spans | str, places: Sequence[PositionIndex], targets: Sequence[Target]
) -> str:
    """Where targets are replaced, in words."""
    if n_own := sum(isinstance(target, Attention) for target in targets):
        own = "the queries of each attention target"
        return own if n_own == len(targets) else f"all positions; {own}"
    return positions_text(positions, places)
