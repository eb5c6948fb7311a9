"""A diagnostic: what path effects would be if receivers' norms did not answer the change.

Many tools freeze the norm in front of a receiver at its clean scale, so that paths add up. That is
an approximation; beside the exact effect it shows how far it can be trusted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from resid_patching.ablation.ablating import ablate, variants_of
from resid_patching.ablation.kinds import Path, refusal
from resid_patching.ablation.targets import Targets, find_rows
from resid_patching.metrics import Metric, as_metric
from resid_patching.paths import patch_paths
from resid_patching.prompts import Spans
from resid_patching.result import Result, provenance
from resid_patching.run import Run


@dataclass(frozen=True, eq=False, repr=False)
class Linearised(Result):
    """Path effects with the receivers' norms frozen: values approximate `exact`.

    Attributes:
        exact: the effects with live norms, as `ablate` gives them; shaped as values.
    """

    kind: ClassVar[str] = "linearised"

    exact: Tensor

    @property
    def error(self) -> Tensor:
        """Linearised - exact."""
        return self.values - self.exact


def linearised_paths(
    run: Run,
    targets: Targets,
    how: Path,
    *,
    metric: Metric | Callable[..., Tensor],
    positions: Spans = None,
    joint: bool = False,
) -> Linearised:
    """Path effects as they would be with the norm of each receiver frozen, beside the exact ones.

    The norms in front of the receivers (of the heads, the MLP, or the logits) keep the clean run's
    scale. Everything else is as in `ablate`: MLPs between sender and receiver are recomputed with
    live norms, and the model behind the receivers is run again.

    Args:
        run: as in `ablate`.
        targets: as in `ablate`.
        how: the path.
        metric: as in `ablate`.
        positions: as in `ablate`.
        joint: as in `ablate`.

    Raises:
        AblationError: `how` is no `Path`.
        UnsupportedModelError: the model's blocks are not covered by the closed form.
    """
    if not isinstance(how, Path):
        raise refusal(f"linearised_paths was given {how!r}, which is no Path")
    exact = ablate(run, targets, how, metric=metric, positions=positions, joint=joint)
    groups = find_rows(run.view, targets, joint=joint)
    senders = variants_of(run, groups, how, [run.prompts.locate_spans(positions)])
    reading = as_metric(metric).bind(run)
    found = patch_paths(run, senders, how.ends, reading, mlps=how.mlps, frozen_norms=True)
    patched = found.patched if how.is_sweep else found.patched[:, 0]
    plan = f"linearised (receivers' norms frozen, approximate): {exact.provenance.plan}"
    return Linearised(
        values=patched - found.baseline,
        axes=exact.axes,
        unit=exact.unit,
        provenance=provenance(run, plan),
        exact=exact.total,
    )
