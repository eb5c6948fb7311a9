"""Values written at several sites of a whole stack of variants at once.

All variants of the stack are written at the same sites and the same positions of every prompt,
each with values of its own: what a sweep over senders into one set of readers needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from resid_patching.address import MLP, HeadInput, Stream
from resid_patching.models import ModelView
from resid_patching.rerun.clean import Clean
from resid_patching.rerun.deltas import Deltas
from resid_patching.rerun.edits import stage
from resid_patching.rerun.plain import PlainBlocks

Site: TypeAlias = HeadInput | MLP | Stream


@dataclass(frozen=True, eq=False)
class Written:
    """What is written where.

    Attributes:
        index: positions [rows, n], -1 where a prompt has none.
        values: new values by site [variant, rows, n, ...]; heads' inputs before any rotation.
        changes: new - clean [variant, rows, n, d_model], for stream states and MLPs.
        moved: where a variant's values may differ from the clean ones [variant, rows, n]; elsewhere
            they are exactly those.
    """

    index: Tensor
    values: dict[Site, Tensor]
    changes: dict[Site, Tensor]
    moved: Tensor

    @property
    def valid(self) -> Tensor:
        """True where a prompt has the position [rows, n]."""
        return self.index >= 0

    def first_moved(self, lengths: Tensor) -> Tensor:
        """The first position of each prompt [rows] that differs in any variant; else its last."""
        moved = self.moved.any(0) & self.valid
        last = lengths - 1
        return torch.where(moved, self.index, last[:, None]).amin(1).minimum(last)

    def acts_in(self, layer: int) -> bool:
        """Whether anything is written in a layer."""
        return any(site.layer == layer for site in self.values)

    def of(self, sites: list[Site]) -> Written:
        """The same with some of its sites alone."""
        changes = {site: self.changes[site] for site in sites if site in self.changes}
        values = {site: self.values[site] for site in sites}
        return Written(self.index, values, changes, self.moved)

    def part(self, variants: slice) -> Written:
        """Some of the variants."""
        values = {site: value[variants] for site, value in self.values.items()}
        changes = {site: change[variants] for site, change in self.changes.items()}
        return Written(self.index, values, changes, self.moved[variants])

    def by_stage(self, view: ModelView) -> list[tuple[tuple[int, int], Written]]:
        """Its sites stage by stage; in parallel blocks attention and MLP are one stage."""
        found: dict[tuple[int, int], list[Site]] = {}
        for site in self.values:
            layer, place = stage(site)
            place = 1 if place == 3 and view.parallel else place
            found.setdefault((layer, place), []).append(site)
        return [(key, self.of(found[key])) for key in sorted(found)]


class StageChange:
    """What the writes of one stage change in the stream behind it, the stream before it clean."""

    def __init__(self, clean: Clean, plain: PlainBlocks, deltas: Deltas) -> None:
        self.clean, self.plain, self.deltas = clean, plain, deltas

    def at(self, written: Written, rows: Tensor) -> Tensor:
        """The change at positions [rows, r]: [variant, rows, r, d_model]; garbage at -1."""
        total: Tensor | None = None
        inputs = {s: value for s, value in written.values.items() if isinstance(s, HeadInput)}
        if inputs:
            total = self._through_attention(written, inputs, rows)
        for change in written.changes.values():
            spread = _spread(change, written.index, self.clean.width)
            spread = spread[:, torch.arange(len(rows))[:, None], rows.clamp_min(0)]
            total = spread if total is None else total + spread
        assert total is not None
        return total

    def _through_attention(
        self, written: Written, inputs: dict[HeadInput, Tensor], rows: Tensor
    ) -> Tensor:
        """The change of an attention layer's write; heads that nothing reaches are left out."""
        plain, layer = self.plain, next(iter(inputs)).layer
        group = plain.n_heads // plain.n_kv_heads
        heads = sorted(
            {
                head
                for site in inputs
                for head in (
                    [site.head]
                    if site.which == "q"
                    else range(site.head * group, (site.head + 1) * group)
                )
            }
        )
        n_variants = next(iter(inputs.values())).shape[0]
        clean = dict(zip("qkv", self.deltas.projected(layer), strict=True))
        parts: dict[str, Tensor] = {}
        for which, part in clean.items():
            # The clean run is the last variant, so that both are made by one product.
            changed = [site for site in inputs if site.which == which]
            wanted = heads if which == "q" else [head // group for head in heads]
            kept = part[:, :, wanted]
            if changed:
                whole = part[None].repeat(n_variants + 1, 1, 1, 1, 1)
                for site in changed:
                    self._put(whole[:-1, :, :, site.head], inputs[site], which, written)
                kept = whole[:, :, :, wanted]
            parts[which] = kept
        q = parts["q"] if parts["q"].ndim == 5 else parts["q"][None]
        safe = rows.clamp_min(0)
        q = q[:, torch.arange(len(rows))[:, None], safe]
        z = plain.attend_some(q, parts["k"], parts["v"], safe)
        W_O = self.clean.view.W_O(layer).detach()[heads]
        return torch.einsum("vbrhd,hdm->vbrm", z[:-1] - z[-1:], W_O.to(z))

    def _put(self, target: Tensor, values: Tensor, which: str, written: Written) -> None:
        """Writes a head's new inputs [variant, rows, n, d_head], rotated, in place."""
        row, column = written.valid.nonzero(as_tuple=True)
        if which != "v":
            values = self.plain.rotate(values[..., None, :], written.index.clamp_min(0))
            values = values[..., 0, :]
        place = written.index[row, column]
        # Values that did not move come from another product than the clean ones: keep these.
        moved = written.moved[:, row, column, None]
        new = torch.where(moved, values[:, row, column].to(target.dtype), target[:, row, place])
        target[:, row, place] = new


def _spread(values: Tensor, index: Tensor, width: int) -> Tensor:
    """[variant, rows, n, d] at positions [rows, n] -> [variant, rows, width, d], else zero."""
    full = values.new_zeros(*values.shape[:2], width, values.shape[-1])
    row, column = (index >= 0).nonzero(as_tuple=True)
    full[:, row, index[row, column]] = values[:, row, column]
    return full
