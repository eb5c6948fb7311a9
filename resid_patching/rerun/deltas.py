"""What a variant's edits change in the stream where they act, everything later frozen.

For edits of one stage this is also the state from which the model is run again: the clean state
behind the stage plus the delta. For a sender it is new write - old write; for a stream state it
is new state - old state; for q, k, v and patterns it is the change of the attention layer's
write.

    direct effect = metric(clean last state + delta) - baseline          (final norm live)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from resid_patching.address import (
    MLP,
    Attn,
    AttnBias,
    Embed,
    Head,
    HeadInput,
    HeadNode,
    MLPBias,
    Neuron,
    PosEmbed,
    Stream,
    hook_name,
)
from resid_patching.models import report, take
from resid_patching.rerun.clean import Clean
from resid_patching.rerun.edits import (
    Edit,
    Variant,
    clean_hook,
    is_inside_attention,
    site_value,
    stage,
)
from resid_patching.rerun.plain import PlainBlocks


class Deltas:
    """Deltas of variants over one clean run."""

    def __init__(
        self, clean: Clean, plain: PlainBlocks | None, replays: Callable[[], bool]
    ) -> None:
        self.clean, self.view, self.plain, self.replays = clean, clean.view, plain, replays
        failures = report(clean.view).failures
        self.heads_sum = "heads" not in failures
        self.neurons_sum = "neurons" not in failures
        self._mixing: dict[int, bool] = {}
        self._projected: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def projected(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Clean q, k (both rotated) and v of a layer [rows, pos, head, d_head]."""
        if layer not in self._projected:
            assert self.plain is not None
            positions = self.clean.positions.to(self.view.device)
            q, k, v = self.plain.project(layer, self.clean.act_pre(layer)[None], positions)
            self._projected[layer] = (q[0], k[0], v[0])
        return self._projected[layer]

    def keys_and_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Clean rotated keys and values of a layer [rows, pos, kv_head, d_head]."""
        return self.projected(layer)[1:]

    def changed(self, variant: Variant) -> Tensor:
        """Which prompts [rows] have any new value that differs from the clean one."""
        found = torch.zeros(len(self.clean), dtype=torch.bool, device=self.view.device)
        for edit in variant:
            found |= self.moved(edit).any(1)
        return found

    def moved(self, edit: Edit) -> Tensor:
        """Where an edit's new value differs from the clean one [rows, n]."""
        index, valid, new = self._new(edit)
        differs = new != self.old(edit, index)
        return (differs.flatten(2).any(2) if new.ndim > 2 else differs) & valid

    def _new(self, edit: Edit) -> tuple[Tensor, Tensor, Tensor]:
        index = edit.positions.index[self.clean.rows].to(self.view.device)
        values = self._ours(edit.fill(self.clean.rows, index))
        return index, index >= 0, values

    def old(self, edit: Edit, index: Tensor) -> Tensor:
        """The site's clean value at positions; zeros for embeddings, whose fill is a change."""
        site = edit.site
        if isinstance(site, Embed | PosEmbed):
            return torch.zeros((), device=self.view.device, dtype=self.view.compute_dtype)
        if isinstance(site, Stream):
            value = self.clean.state(site.layer, site.place)
        else:
            name = clean_hook(site)
            value = site_value(self.view, site, None if name is None else self.clean.acts[name])
        if value.shape[0] == 1 and value.shape[1] == 1:
            return self._ours(value)
        value = value.expand(len(self.clean), *value.shape[1:]).to(self.view.device)
        return self._ours(take(value, index))

    def _ours(self, value: Tensor) -> Tensor:
        """Where and in the precision that differences are made in: bfloat16 would lose them."""
        return value.to(self.view.device, self.view.compute_dtype)

    def closed(self, variant: Variant) -> bool:
        """Whether the variant's delta needs no call of the model's own blocks."""
        for edit in variant:
            match edit.site:
                case HeadInput(layer, _, _) | HeadNode(layer, _, "pattern"):
                    if self.plain is None or not self.heads_sum or not self._mixes(layer):
                        return False
                case Head() | HeadNode() | AttnBias():
                    if not self.heads_sum:
                        return False
                case Neuron() | MLPBias():
                    if not self.neurons_sum:
                        return False
        return True

    def _mixes(self, layer: int) -> bool:
        """Whether our own attention, of the model's q, k and v, gives the model's z."""
        if layer not in self._mixing:
            own = self.clean.act(Head(layer, 0)).flatten(2)
            self._mixing[layer] = self.clean.agree(self._mixed(layer, [], []).flatten(2), own)
        return self._mixing[layer]

    def frozen(self, variant: Variant) -> Tensor:
        """The change of the last state [rows, pos, d_model] with every later write frozen."""
        delta = self._no_change()
        variant = (*self._pins(variant), *variant)
        for key in sorted({stage(edit.site) for edit in variant}):
            edits = tuple(edit for edit in variant if stage(edit.site) == key)
            delta = self._through(delta, edits, *key)
        return delta

    def _pins(self, variant: Variant) -> Variant:
        """The run's own edits from a variant's first stage on; they keep their sites' values."""
        start = min((stage(edit.site) for edit in variant), default=None)
        held = [edit for edit in self.clean.held if start and stage(edit.site) >= start]
        held = [edit for edit in held if not isinstance(edit.site, Embed | PosEmbed)]
        return tuple(
            Edit(edit.site, edit.positions, lambda rows, index, edit=edit: self.old(edit, index))
            for edit in held
        )

    def _no_change(self) -> Tensor:
        shape = (len(self.clean), self.clean.width, self.view.d_model)
        start = self.clean.act_pre(0)
        return start.new_zeros(shape, dtype=self.view.compute_dtype)

    def _through(self, delta: Tensor, edits: Variant, layer: int, place: int) -> Tensor:
        if place in (1, 3):
            closed = self.closed(edits)
            return delta + (self._write(edits, layer) if closed else self._measured(edits, layer))
        delta = delta.clone()
        # A state is what it is set to, whatever the embeddings before it were changed to.
        for edit in sorted(edits, key=lambda edit: isinstance(edit.site, Stream)):
            index, valid, new = self._new(edit)
            row, column = valid.nonzero(as_tuple=True)
            where = (row, index[row, column])
            if isinstance(edit.site, Embed | PosEmbed):
                delta[where] += new[row, column].to(delta.dtype)
            else:
                old = self.old(edit, index)
                delta[where] = (new - old)[row, column].to(delta.dtype)
        return delta

    def _write(self, edits: Variant, layer: int) -> Tensor:
        """The change of one sublayer's write, in closed form."""
        change = self._no_change()
        inputs = [edit for edit in edits if is_inside_attention(edit.site)]
        heads = [edit for edit in edits if _is_z(edit)]
        if inputs:
            change = change + self._attention_change(inputs, heads, layer)
        else:
            for edit in heads:
                self._add_part(change, edit, self.view.W_O(layer)[_head(edit)])
        for edit in edits:
            if isinstance(edit.site, Neuron):
                self._add_part(change, edit, self.view.W_out(layer)[edit.site.index])
        for edit in edits:
            if isinstance(edit.site, Attn | MLP):
                self._put_whole(change, edit)
        for edit in edits:
            if isinstance(edit.site, AttnBias | MLPBias):
                self._add_part(change, edit, None)
        return change

    def _add_part(self, change: Tensor, edit: Edit, weight: Tensor | None) -> None:
        """Adds (new - old), through its output weight, at the edit's positions."""
        index, valid, new = self._new(edit)
        moved = new - self.old(edit, index)
        if weight is not None:
            weight = weight.detach().to(moved)
            moved = moved @ weight if weight.ndim == 2 else moved[..., None] * weight
        row, column = valid.nonzero(as_tuple=True)
        moved = moved.expand(*index.shape, moved.shape[-1])[row, column]
        change[row, index[row, column]] += moved.to(change.dtype)

    def _put_whole(self, change: Tensor, edit: Edit) -> None:
        """A whole write: what its parts were changed to no longer matters."""
        index, valid, new = self._new(edit)
        moved = new - self.old(edit, index)
        row, column = valid.nonzero(as_tuple=True)
        change[row, index[row, column]] = moved[row, column].to(change.dtype)

    def _attention_change(self, inputs: list[Edit], heads: list[Edit], layer: int) -> Tensor:
        """The change of an attention layer's write when q, k, v or patterns are replaced."""
        before = self._mixed(layer, [], [])
        after = self._mixed(layer, inputs, heads)
        moved = [number for number in range(self.view.n_heads) if self._touches(inputs, number)]
        moved = sorted({*moved, *(_head(edit) for edit in heads)})
        weight = self.view.W_O(layer).detach()[moved]
        difference = (after - before)[:, :, moved]
        return torch.einsum("bphd,hdm->bpm", difference, weight.to(difference))

    def _touches(self, inputs: list[Edit], head: int) -> bool:
        group = self.view.n_heads // self.view.n_kv_heads
        for edit in inputs:
            site = edit.site
            assert isinstance(site, HeadInput | HeadNode)
            by_key_value = isinstance(site, HeadInput) and site.which != "q"
            if site.head == (head // group if by_key_value else head):
                return True
        return False

    def _mixed(self, layer: int, inputs: list[Edit], heads: list[Edit]) -> Tensor:
        """Z [rows, pos, head, d_head] of a layer with its inputs replaced."""
        assert self.plain is not None
        parts = {w: self.clean.act(HeadInput(layer, 0, w)).clone() for w in ("q", "k", "v")}
        for edit in inputs:
            if isinstance(edit.site, HeadInput):
                self._set(parts[edit.site.which], edit, edit.site.head)
        positions = self.clean.positions.to(self.view.device)
        q, k = (self.plain.rotate(parts[w][None], positions) for w in ("q", "k"))
        z = self.plain.attend_causal(q, k, parts["v"][None])[0]
        for edit in inputs:
            if isinstance(edit.site, HeadNode):
                self._set(z, self._mixed_by_pattern(edit, parts["v"]), edit.site.head)
        for edit in heads:
            self._set(z, edit, _head(edit))
        return z

    def _mixed_by_pattern(self, edit: Edit, values: Tensor) -> Edit:
        """A replaced pattern as the z that it mixes."""
        site = edit.site
        assert isinstance(site, HeadNode)
        v = values[:, :, site.head // (self.view.n_heads // self.view.n_kv_heads)]

        def fill(rows: slice, index: Tensor) -> Tensor:
            return torch.einsum("bnk,bkd->bnd", edit.fill(rows, index).to(v), v)

        return Edit(HeadNode(site.layer, site.head, "z"), edit.positions, fill)

    def _set(self, tensor: Tensor, edit: Edit, head: int) -> None:
        index, valid, new = self._new(edit)
        row, column = valid.nonzero(as_tuple=True)
        tensor[row, index[row, column], head] = new[row, column].to(tensor.dtype)

    def _measured(self, edits: Variant, layer: int) -> Tensor:
        """The change of one sublayer's write, read at its hook while the model computes it."""
        clean, view = self.clean, self.view
        writer = Attn(layer) if stage(edits[0].site)[1] == 1 else MLP(layer)
        name = hook_name(writer)
        changes = clean.hooks([edits], range(layer, layer + 1) if self.replays() else None)
        seen: list[Tensor] = []
        edit_write = changes.pop(name, None)

        def read(activation: Tensor) -> Tensor | None:
            changed = None if edit_write is None else edit_write(activation)
            seen.append((activation if changed is None else changed).detach().clone())
            return changed

        changes[name] = read
        if self.replays():
            with view.watched(changes):
                clean.calls.call(layer, clean.act_pre(layer))
        else:
            view.forward(clean.tokens, changes)
        return self._ours(seen[-1]) - self._ours(clean.act(writer))


def _is_z(edit: Edit) -> bool:
    site = edit.site
    return isinstance(site, Head) or (isinstance(site, HeadNode) and site.which == "z")


def _head(edit: Edit) -> int:
    assert isinstance(edit.site, Head | HeadNode)
    return edit.site.head
