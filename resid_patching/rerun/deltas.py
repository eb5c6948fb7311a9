"""What edits change in the stream where they act, everything later frozen.

For a sender it is new write - old write; for a stream state it is new state - old state; for q, k,
v and patterns it is the change of the attention layer's write. From the clean state behind the
stage plus this change, the model is run again. And it is the direct effect:

    direct effect = metric(clean last state + change) - baseline          (final norm live)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from resid_patching.address import (
    MLP,
    QKV,
    Address,
    Attn,
    AttnBias,
    Embed,
    Head,
    HeadInput,
    HeadNode,
    Input,
    MLPBias,
    Neuron,
    PosEmbed,
    Stream,
    hook_name,
)
from resid_patching.models import report, take
from resid_patching.rerun.changes import Changes, Pin, Put, Stage
from resid_patching.rerun.clean import Clean, take_rows
from resid_patching.rerun.edits import Variant, is_inside_attention, stage
from resid_patching.rerun.plain import PlainBlocks

_ATTENTION = (Head, HeadInput, HeadNode, Attn, AttnBias)
_MLP = (Neuron, MLP, MLPBias)


class Deltas:
    """Changes of the stream over one clean run."""

    def __init__(
        self, clean: Clean, plain: PlainBlocks | None, replays: Callable[[], bool]
    ) -> None:
        self.clean, self.view, self.plain, self.replays = clean, clean.view, plain, replays
        failures = report(clean.view).failures
        self.heads_sum = "heads" not in failures
        self.neurons_sum = "neurons" not in failures
        self._mixing: dict[int, bool] = {}
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}

    def keys_and_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Clean rotated keys, and values, of a layer [rows, pos, kv_head, d_head]."""
        if layer not in self._seen:
            assert self.plain is not None
            _, k, v = self.plain.project(layer, self.clean.act_pre(layer)[None])
            self._seen[layer] = (self.plain.rotate(k, self.clean.positions)[0], v[0])
        return self._seen[layer]

    def closed(self, variant: Variant) -> bool:
        """Whether the variant's changes need no call of the model's own blocks."""
        return all(self.closed_site(edit.site) for edit in variant)

    def closed_site(self, site: Address) -> bool:
        """Whether what a site's layer writes follows from the site's value in closed form."""
        match site:
            case HeadInput(layer, _, _) | HeadNode(layer, _, "pattern"):
                return self.plain is not None and self.heads_sum and self._mixes(layer)
            case Head() | HeadNode() | AttnBias():
                return self.heads_sum
            case Neuron() | MLPBias():
                return self.neurons_sum
        return True

    def _mixes(self, layer: int) -> bool:
        """Whether our own attention, of the model's q, k and v, gives the model's z."""
        if layer not in self._mixing:
            assert self.plain is not None
            q, k, v = (self.clean.act(HeadInput(layer, 0, which))[None] for which in QKV)
            positions = self.clean.positions
            q, k = self.plain.rotate(q, positions), self.plain.rotate(k, positions)
            z = self.plain.attend(q, k, v, positions, positions)[0]
            own = self.clean.act(Head(layer, 0))
            self._mixing[layer] = self.clean.agree(z.flatten(2), own.flatten(2))
        return self._mixing[layer]

    def direct(self, changes: Changes, at: Tensor) -> Tensor:
        """The change of the last state [variant, rows, m, d_model] at positions [rows, m]."""
        delta = self._none(changes.n, at)
        for key in sorted({*changes.puts, *changes.pins}):
            self.through(delta, changes.puts.get(key, []), changes.pins.get(key, []), key, at)
        return delta

    def starting(self, changes: Changes, key: Stage, at: Tensor) -> Tensor:
        """The change behind a stage in the variants that start there, as `direct`."""
        puts, numbers = changes.starting(key)
        delta = self._none(len(numbers), at)
        self.through(delta, puts, changes.pins.get(key, []), key, at)
        return delta

    def _none(self, n: int, at: Tensor) -> Tensor:
        shape = (n, *at.shape, self.view.d_model)
        return torch.zeros(shape, dtype=self.view.compute_dtype, device=self.view.device)

    def through(
        self, delta: Tensor, puts: list[Put], pins: list[Pin], key: Stage, at: Tensor
    ) -> None:
        """A change before a stage -> behind it, in place, what is before the stage else frozen.

        A layer is never replaced together with a part of it; one that is held gives way to its own
        replacement alone.
        """
        if key[1] in (1, 3):
            for types, whole in ((_ATTENTION, Attn), (_MLP, MLP)):
                held = [pin for pin in pins if isinstance(pin.site, whole)]
                change = torch.zeros_like(delta) if held else delta
                mine = [put for put in puts if isinstance(put.site, types)]
                parts = [put for put in mine if not isinstance(put.site, whole)]
                self.write(change, parts, key[0], at, pins)
                for pin in held:
                    pin.clear(change, at)
                wholes = [put for put in mine if isinstance(put.site, whole)]
                self.write(change, wholes, key[0], at)
                if held:
                    delta += change
            return
        # A state is what it is set to, whatever the embeddings before it were changed to.
        for put in puts:
            if isinstance(put.site, Embed | PosEmbed):
                put.add(delta, at, put.values)
        for pin in pins:
            pin.clear(delta, at)
        for put in puts:
            if isinstance(put.site, Stream | Input):
                put.with_values(put.difference).set(delta, at)

    def write(
        self, delta: Tensor, puts: list[Put], layer: int, at: Tensor, pins: Sequence[Pin] = ()
    ) -> None:
        """Adds the change of one sublayer's write, in closed form, in place."""
        inside = [put for put in puts if is_inside_attention(put.site)]
        heads = [put for put in puts if _is_z(put)]
        if inside:
            mixed = {number for put in inside for number in put.numbers.tolist()}
            self._through_attention(delta, inside, _within(heads, mixed), pins, layer, at)
            everyone = {number for put in heads for number in put.numbers.tolist()}
            heads = _within(heads, everyone - mixed)
        for put in heads:
            put.add(delta, at, put.difference @ self._weight(self.view.W_O(layer)[put.head]))
        for put in puts:
            if isinstance(put.site, Neuron):
                weight = self._weight(self.view.W_out(layer)[put.site.index])
                put.add(delta, at, put.difference[..., None] * weight)
            elif isinstance(put.site, Attn | MLP | AttnBias | MLPBias):
                put.add(delta, at, put.difference)

    def _weight(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self.view.compute_dtype)

    def _through_attention(
        self,
        change: Tensor,
        inside: list[Put],
        heads: list[Put],
        pins: Sequence[Pin],
        layer: int,
        at: Tensor,
    ) -> None:
        """Adds what other q, k, v or patterns change of an attention layer's write.

        Each pair of a variant and a query head that it touches is mixed alone.
        """
        assert self.plain is not None
        clean, plain, view = self.clean, self.plain, self.view
        group = view.n_heads // view.n_kv_heads
        pairs: dict[tuple[int, int], int] = {}
        for put in [*inside, *heads]:
            for number in put.numbers.tolist():
                for head in self._query_heads(put):
                    pairs.setdefault((number, head), len(pairs))
        touched = torch.tensor([head for _, head in pairs], device=view.device)
        parts: dict[str, Tensor] = {}
        for which in QKV:
            own = clean.act(HeadInput(layer, 0, which))
            chosen = touched if which == "q" else touched // group
            parts[which] = own[:, :, chosen].permute(2, 0, 1, 3).clone()
        for put in inside:
            if isinstance(put.site, HeadInput):
                for head in self._query_heads(put):
                    self._at_pairs(put, pairs, head).set(parts[put.site.which], clean.positions)
        q = plain.rotate(take_rows(parts["q"], at)[:, :, :, None], at)[..., 0, :]
        k = plain.rotate(parts["k"][:, :, :, None], clean.positions)[..., 0, :]
        z = plain.attend_alone(q, k, parts["v"], at)
        for put in inside:
            if isinstance(put.site, HeadNode):
                mine = self._at_pairs(put, pairs, put.head)
                mixed = torch.einsum("kbnp,kbpd->kbnd", put.values.to(z), parts["v"][mine.numbers])
                mine.with_values(mixed).set(z, at)
        for pin in pins:
            if _is_z(pin):
                assert isinstance(pin.site, Head | HeadNode)
                mine = (touched == pin.site.head).nonzero()[:, 0]
                held = z[mine]
                pin.set(held, at)
                z[mine] = held
        for put in heads:
            self._at_pairs(put, pairs, put.head).set(z, at)
        own = take(clean.act(Head(layer, 0)), at)[:, :, touched].permute(2, 0, 1, 3)
        moved = self._moved_rows([*inside, *heads], pairs, at)
        difference = (z - own) * moved[..., None]
        weight = self._weight(view.W_O(layer))[touched]
        writes = torch.einsum("kbmd,kde->kbme", difference, weight.to(difference))
        numbers = torch.tensor([number for number, _ in pairs], device=change.device)
        change.index_add_(0, numbers, writes.to(change))

    def _query_heads(self, put: Put) -> range:
        """The query heads that a put at a head touches: of a key-value head its whole group."""
        if isinstance(put.site, HeadInput) and put.site.which != "q":
            group = self.view.n_heads // self.view.n_kv_heads
            return range(put.head * group, (put.head + 1) * group)
        return range(put.head, put.head + 1)

    def _at_pairs(self, put: Put, pairs: dict[tuple[int, int], int], head: int) -> Put:
        """A put whose variants are numbered as pairs with a head."""
        numbers = [pairs[number, head] for number in put.numbers.tolist()]
        return put.renumbered(torch.tensor(numbers))

    def _moved_rows(self, puts: list[Put], pairs: dict[tuple[int, int], int], at: Tensor) -> Tensor:
        """Where a pair's z can differ [pair, rows, m]; keys and values reach all later rows."""
        found = torch.zeros(len(pairs), *at.shape, dtype=torch.bool, device=at.device)
        for put in puts:
            for head in self._query_heads(put):
                numbers = self._at_pairs(put, pairs, head).numbers
                if isinstance(put.site, HeadInput) and put.site.which != "q":
                    first = torch.where(put.moved, put.index, self.clean.width).amin(2)
                    found[numbers] |= at >= first[:, :, None]
                else:
                    row, place, column = put.cells(at)
                    found[numbers[:, None], row, place] |= put.moved[:, row, column]
        return found

    def measured(self, variant: Variant, at: Tensor) -> Tensor:
        """The direct change [rows, m, d_model] where it has no closed form: read at hooks."""
        changes = Changes(self.clean, [variant])
        delta = self._none(1, at)
        for key in sorted({*changes.puts, *changes.pins}):
            edits = tuple(edit for edit in variant if self.clean.stage(edit.site) == key)
            if self.closed(edits):
                self.through(delta, changes.puts.get(key, []), changes.pins.get(key, []), key, at)
            else:
                for writer in (Attn(key[0]), MLP(key[0])):
                    part = tuple(e for e in edits if stage(e.site) == stage(writer))
                    if part:
                        delta = delta + take(self._measured(part, writer), at)
        return delta[0]

    def _measured(self, edits: Variant, writer: Attn | MLP) -> Tensor:
        """The change of one sublayer's write, read at its hook while the model computes it."""
        clean, view = self.clean, self.view
        name = hook_name(writer)
        changes = clean.hooks(
            [edits], range(writer.layer, writer.layer + 1) if self.replays() else None
        )
        seen: list[Tensor] = []
        edit_write = changes.pop(name, None)

        def read(activation: Tensor) -> Tensor | None:
            changed = None if edit_write is None else edit_write(activation)
            seen.append((activation if changed is None else changed).detach().clone())
            return changed

        changes[name] = read
        if self.replays():
            with view.watched(changes):
                clean.calls.call(writer.layer, clean.act_pre(writer.layer))
        else:
            view.forward(clean.tokens, changes)
        return clean.ours(seen[-1]) - clean.ours(clean.act(writer))


def _is_z(put: Put | Pin) -> bool:
    is_node = isinstance(put.site, HeadNode) and put.site.which == "z"
    return is_node or isinstance(put.site, Head)


def _within(puts: list[Put], numbers: set[int]) -> list[Put]:
    """The puts of some variants."""
    masks = [torch.tensor([n in numbers for n in put.numbers.tolist()]) for put in puts]
    return [put.of(mask) for put, mask in zip(puts, masks, strict=True) if bool(mask.any())]
