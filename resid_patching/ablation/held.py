"""Runs that carry an intervention: an ablated run is a run like any other.

    without = rp.ablated(run, "attn.6", rp.Zero())
    rp.compare(rp.direct_logit_attribution(without, " Mary", " John"), dla)   who made up for it
    rp.ablate(without, "9.9", rp.Zero(), metric=...)                          what 9.9 does then

    interaction of a and b = effect of b in the run without a, minus effect of b in the run

Everything that reads an ablated run reads the model with the replacement on, as if hooks that made
it stayed on: activations, logits, lenses, attribution, patterns, and the baseline of `ablate`.
"""

from __future__ import annotations

from collections.abc import Sequence

from resid_patching.ablation.fills import Fills
from resid_patching.ablation.kinds import Mean, Path, Source, Zero, refusal, require_kind
from resid_patching.ablation.targets import Attention, Targets, find_rows, site_of, wholes_of
from resid_patching.address import (
    Address,
    AttnBias,
    Embed,
    HeadInput,
    HeadNode,
    MLPBias,
    PosEmbed,
    Stream,
)
from resid_patching.errors import AblationError
from resid_patching.models import exact, require
from resid_patching.prompts import PositionIndex, Spans
from resid_patching.rerun import Held, HeldEdit, held_in, require_acting
from resid_patching.run import Run

_SHOWN = 6


@exact()
def ablated(run: Run, targets: Targets, how: Source, *, positions: Spans = None) -> Run:
    """The run of the same prompts with targets replaced, all together, whenever the model runs.

    What the model computes later wins, as in `ablate`: a state keeps the value that it is set to.
    The values of a mean or of another run are read now. The model is not changed.

    Args:
        run: the run; it may itself be ablated, and keeps its own replacements. Of two at one place
            the new one counts. A cache that was given to it is not read.
        targets: addresses or their texts, as in `ablate`. Of biases, replace the whole write.
        how: `Zero()`, `Mean(...)` or `Resample(...)`. There is no default.
        positions: where: None for all, one position of every prompt, one for each, or a list for
            each.

    Returns:
        A `Run`; its text, and the provenance of what is read from it, name the replacement.

    Raises:
        AblationError: a path, a bias, no kind, or a kind that lacks what it needs.
        AddressError: a target that this model does not have, or a layer and a part of it.
        PositionError: a prompt has no such position.
        PromptError: prompts of unequal length where a kind needs equal ones.
        UnsupportedModelError: the model throws away what is put at a hook.
        ModelChangedError: the model computes otherwise than when the run was captured.
    """
    kind, view = require_kind(how), run.view
    if isinstance(kind, Path):
        raise refusal("a run cannot carry a path, only a part of the model that is replaced whole")
    (row,) = find_rows(view, targets, joint=True)
    if any(isinstance(target, Attention) for target in row):
        raise AblationError("a run cannot carry rp.attention(...); replace a pattern or a head")
    sites = [site_of(target) for target in row]
    if not sites:
        raise AblationError("a run that is ablated needs a target, such as 'attn.6'")
    if biases := [site for site in sites if isinstance(site, AttnBias | MLPBias)]:
        whole = str(biases[0]).removesuffix(".bias")
        raise AblationError(f"a run cannot carry another {biases[0]}; replace {whole}, the write")
    view.require_unchanged()
    require(view, "stream", "readout")
    require_acting(view, sites)
    where = run.prompts.locate_spans(positions)
    fills = Fills(run, kind, sites, where)
    edits = tuple(
        HeldEdit(site, where, fills.value(site), positions is None and _goes_on(kind, site))
        for site in sites
    )
    text = f"{kind} ablation of {_listed(sites)} at {positions_text(positions, [where])}"
    text = text if run.intervention is None else f"{run.intervention} and {text}"
    held = Held(view, text, (*held_in(run), *edits))
    return Run(view, run.prompts, run.max_bytes, intervention=held)


def _goes_on(kind: Source, site: Address) -> bool:
    """Whether a kind has one value for all positions, also for those that are written later."""
    if isinstance(kind, Mean):
        is_pattern = isinstance(site, HeadNode) and site.which == "pattern"
        return not is_pattern and ("pos" in kind.over or kind.at is not None)
    return isinstance(kind, Zero)


def _listed(sites: list[Address]) -> str:
    shown = ", ".join(map(str, sites[:_SHOWN]))
    return f"{shown} and {len(sites) - _SHOWN} more" if len(sites) > _SHOWN else shown


def unheld(run: Run, site: Address, where: PositionIndex) -> PositionIndex:
    """Positions without those where a run has replaced what a site is a part of.

    There the part has no effect, to the last bit.
    """
    whole = _whole_of(site)
    if run.intervention is None or whole is None:
        return where
    return PositionIndex(where.index.masked_fill(run.intervention.holds(whole, where), -1))


def _whole_of(site: Address) -> Address | None:
    """What a site is a part of at its own position; keys and values act on later ones, too."""
    match site:
        case Embed() | PosEmbed():
            return Stream(0, "pre")
        case HeadInput(_, _, "k" | "v"):
            return None
    return next(iter(wholes_of(site)), None)


def positions_text(positions: Spans | str, places: Sequence[PositionIndex]) -> str:
    """Positions in words, from what was given and from where it was found."""
    if positions is None:
        return "all positions"
    if isinstance(positions, str):
        return "each position in turn"
    if isinstance(positions, int):
        return f"position {positions}"
    sizes = sorted(set(places[0].valid.sum(1).tolist()))
    if sizes == [1]:
        return "one position a prompt"
    return f"{' to '.join(map(str, {sizes[0]: 0, sizes[-1]: 0}))} positions a prompt"
