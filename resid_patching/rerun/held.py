"""Edits that are on whenever a run's model runs: the intervention of `rp.ablated`."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from resid_patching.address import Address, Embed, PosEmbed
from resid_patching.models import HookFunction, ModelView
from resid_patching.prompts import PositionIndex
from resid_patching.rerun.edits import HeldEdit, Variant, stage
from resid_patching.rerun.replay import hook_changes
from resid_patching.run import Run


@dataclass(frozen=True, eq=False)
class Held:
    """The edits of a run; a `run.Intervention`.

    Attributes:
        view: the model.
        text: what is replaced, in words.
        edits: the edits; of two at one site and position the later one counts.
    """

    view: ModelView
    text: str
    edits: tuple[HeldEdit, ...]

    def __str__(self) -> str:
        return self.text

    @property
    def sites(self) -> tuple[Address, ...]:
        """What is replaced."""
        return tuple(edit.site for edit in self.edits)

    def hooks(self, rows: slice, width: int | None = None) -> dict[str, HookFunction]:
        """The functions that make the edits; see `run.Intervention`."""
        edits = self.edits if width is None else tuple(_until(e, width) for e in self.edits)
        return hook_changes(self.view, [edits], rows)

    def holds(self, site: Address, where: PositionIndex) -> Bool[Tensor, "batch n"]:
        """At which positions a site itself is replaced."""
        found = torch.zeros_like(where.valid)
        for edit in self.edits:
            if edit.site == site:
                found |= (where.index[:, :, None] == edit.positions.index[:, None]).any(2)
        return found & where.valid

    def digest(self) -> str:
        """A hash of sites, positions and values."""
        found = hashlib.sha256()
        for edit in self.edits:
            index = edit.positions.index
            values = edit.fill(slice(0, len(index)), index)[edit.positions.valid]
            numbers = values.detach().to("cpu", torch.float64).numpy().tobytes()
            found.update(f"{edit.site} {edit.goes_on} {index.tolist()};".encode() + numbers)
        return found.hexdigest()


def _until(edit: HeldEdit, width: int) -> HeldEdit:
    """The edit in prompts that were continued to some width."""
    if not edit.goes_on:
        return edit
    index = edit.positions.index
    everywhere = torch.arange(width, device=index.device).expand(len(index), width)
    return dataclasses.replace(edit, positions=PositionIndex(everywhere))


def held_in(run: Run) -> tuple[HeldEdit, ...]:
    """The edits that a run carries; none in a plain run."""
    return run.intervention.edits if isinstance(run.intervention, Held) else ()


def beside(
    held: Iterable[HeldEdit], variants: Sequence[Variant], layers: range | None
) -> list[Variant]:
    """Variants with the edits of their run: at one site and position the variant's count.

    Args:
        held: the run's edits.
        variants: the edits of each variant.
        layers: the blocks that are called alone, where the model does not run whole.
    """
    if layers is not None:
        starts = (Embed, PosEmbed)
        held = [e for e in held if not isinstance(e.site, starts) and stage(e.site)[0] in layers]
    return [(*held, *variant) for variant in variants]


def acts_from(held: Iterable[HeldEdit], start: tuple[int, int]) -> bool:
    """Whether any of a run's edits acts at a (layer, stage) or behind it."""
    return any(stage(edit.site) >= start for edit in held)
