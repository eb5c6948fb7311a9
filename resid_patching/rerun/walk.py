"""Changed rows on their way through our own blocks, other values put in on the way."""

from __future__ import annotations

import torch
from torch import Tensor

from resid_patching.address import (
    MLP,
    QKV,
    Address,
    Attn,
    AttnBias,
    Head,
    HeadInput,
    HeadNode,
    MLPBias,
    Neuron,
    Stream,
    hook_name,
)
from resid_patching.rerun.changes import Changes, Pin, Put, Stage
from resid_patching.rerun.clean import Clean, take_rows
from resid_patching.rerun.deltas import Deltas
from resid_patching.rerun.edits import stage
from resid_patching.rerun.plain import PlainBlocks


class Walk:
    """A stack of variants from their first stages to the end of the model.

    Each variant joins behind its first stage, with the clean state there and what it changes of
    it. Where the model has a hook, what a variant edits later is put in. Rows before the first
    changed position are not run; their clean keys and values are seen. Behind the last layer's keys
    and values only the rows that are read are run.

    Args:
        plain: our blocks.
        clean: the clean run.
        deltas: what edits change in their first stage.
        changes: the variants, in order of their first stages.
        first: the first row that is run in each prompt [rows].
        read_at: positions at which the last state is wanted [rows, n]; -1 where there is none.
        control: the stage behind which the unchanged run goes along as the first variant, or None.
    """

    def __init__(
        self,
        plain: PlainBlocks,
        clean: Clean,
        deltas: Deltas,
        changes: Changes,
        first: Tensor,
        read_at: Tensor,
        control: Stage | None = None,
    ) -> None:
        self.view, self.plain, self.clean, self.deltas = clean.view, plain, clean, deltas
        self.changes, self.control = changes, control
        lengths = clean.lengths.to(first.device)
        n_rows = max(1, int((lengths - first).max()))
        self.whole = not bool(first.any()) or n_rows == clean.width
        self.first, self.keys = torch.zeros_like(first), clean.positions
        if not self.whole:
            self.first = first
            keys = first[:, None] + torch.arange(n_rows, device=first.device)
            self.keys = torch.where(keys < lengths[:, None], keys, -1)
        self.read_at = read_at
        self.chosen = (read_at - self.first[:, None]).clamp(0, self.keys.shape[1] - 1)

    def run(self) -> Tensor:
        """The last states at the rows that are read [variant, rows, n, d_model], control first."""
        begins = [*self.changes.starts, *([] if self.control is None else [self.control])]
        x: Tensor | None = None
        for layer in range(min(begins)[0], self.view.n_layers):
            x = self._block(layer, x)
        assert x is not None
        return x

    def _block(self, layer: int, x: Tensor | None) -> Tensor | None:
        """The states before a layer -> those behind it, with the variants that join in it."""
        plain, view, is_last = self.plain, self.view, layer == self.view.n_layers - 1
        at = self.read_at if is_last else self.keys
        is_joint = view.parallel or view.attn_only
        x = self._set_state(x, Stream(layer, "pre"), (), self.keys)
        after = None
        if x is not None:
            q, k, v = plain.project(layer, x)
            for which, part in zip(QKV, (q, k, v), strict=True):
                self._put_heads(part, HeadInput(layer, 0, which), self.keys)
            if is_last:
                q, x = take_rows(q, self.chosen), take_rows(x, self.chosen)
            q, k = plain.rotate(q, at), plain.rotate(k, self.keys)
            clean = None if self.whole else self.deltas.keys_and_values(layer)
            z = plain.attend(q, k, v, at, self.keys, clean, self.first)
            self._put_heads(z, Head(layer, 0), at)
            write = plain.attention_write(layer, z)
            self._put(write, Attn(layer), at)
            self._shift(write, AttnBias(layer), at)
            after = x + write
        if not is_joint:
            after = self._set_state(after, Stream(layer, "mid"), (1,), at)
        if after is not None and not view.attn_only:
            before = x if view.parallel else after
            assert before is not None
            post = plain.mlp_post(layer, before)
            self._put_neurons(post, layer, at)
            write = plain.mlp_out(layer, post)
            self._put(write, MLP(layer), at)
            self._shift(write, MLPBias(layer), at)
            after = after + write
        return self._set_state(after, Stream(layer, "post"), (1, 3) if is_joint else (3,), at)

    def _set_state(
        self, x: Tensor | None, site: Stream, places: tuple[int, ...], at: Tensor
    ) -> Tensor | None:
        """The stack at a state, with those variants that begin before it or by it.

        Args:
            x: the stack so far, whose rows stand at [rows, m].
            site: the state; what is put there later than a variant begins is put now.
            places: the stages of the layer that lead to it.
            at: the positions.
        """
        for place in places:
            x = self._joined(x, (site.layer, place), site, at)
        if x is not None:
            self._put(x, site, at)
        return self._joined(x, stage(site), site, at)

    def _joined(self, x: Tensor | None, key: Stage, site: Stream, at: Tensor) -> Tensor | None:
        """The stack with those variants that begin at a stage, behind which a state stands."""
        if self.control != key and key not in self.changes.starts:
            return x
        state = take_rows(self.clean.after(site.layer, site.place)[None], at)
        new = [state] if self.control == key else []
        if key in self.changes.starts:
            new.append(state + self.deltas.starting(self.changes, key, at))
        return torch.cat(new if x is None else [x, *new])

    # Values that are put in behind a variant's first stage, and what the run's intervention holds

    def _later(self, site: Address) -> list[Pin | Put]:
        """What is put at the sites of one stage, in rows of the stack; what is held comes first."""
        key, shift = self.clean.stage(site), self.control is not None
        puts = self.changes.later.get(key, [])
        own = [put.renumbered(put.numbers + shift) for put in puts]
        return [*self.changes.pins.get(key, []), *own]

    def _put(self, target: Tensor, site: Address, at: Tensor) -> None:
        for put in self._later(site):
            if put.site == site:
                put.set(target, at)

    def _put_heads(self, target: Tensor, hook: Head | HeadInput, at: Tensor) -> None:
        """Sets heads' values in [variant, rows, m, head, d_head], the activation of a hook."""
        for put in self._later(hook):
            if isinstance(put.site, Head | HeadInput | HeadNode):
                if hook_name(put.site) == hook_name(hook):
                    put.set(target[:, :, :, put.site.head], at)

    def _put_neurons(self, target: Tensor, layer: int, at: Tensor) -> None:
        for put in self._later(MLP(layer)):
            if isinstance(put.site, Neuron):
                put.set(target[..., put.site.index], at)

    def _shift(self, write: Tensor, bias: Address, at: Tensor) -> None:
        for put in self._later(bias):
            if put.site == bias and isinstance(put, Put):
                put.add(write, at, put.difference)
