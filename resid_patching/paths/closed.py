"""The difference D that a sender puts on the stream, and what receivers then read: closed form.

    D starts at 0; with `w` the sender's new write minus its old one, at the sender's positions:

    freeze      D at a receiver = the sum of all w made before it reads
    recompute   layer by layer: D += w of the attention side,
                then D += MLP(LN2(r_mid + D)) - MLP(LN2(r_mid)), the sender's neurons held
                (parallel blocks: MLP(LN2(r_pre + D)), without the w of the same layer)

    q of a head reads LN1(r_pre + D) W_Q + b_Q;  mlp.l.in reads LN2(r_mid + D);
    the logits read unembed(N(r_last + D));  all norms live.

Heads are frozen, so nothing leaves the sender's positions, and one row of a prompt costs one row.

Source: Wang et al. 2022 (arXiv 2211.00593), section 3.1 and appendix B.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from resid_patching.address import (
    MLP,
    Attn,
    Head,
    HeadInput,
    Logits,
    MLPBias,
    MLPIn,
    Neuron,
    Receiver,
    Stream,
    write_stage,
)
from resid_patching.models import take
from resid_patching.paths.receivers import read_at_stage, starts_at_stage
from resid_patching.rerun import Chunk, Edit, NotPlain, Variant

MLPs = Literal["freeze", "recompute"]
Place = Literal["pre", "mid", "post"]


@dataclass(frozen=True, eq=False)
class Read:
    """What one receiver reads.

    Attributes:
        n: how many senders of the stack reach it; these come first.
        values: its value for each of them [n, rows, positions, ...].
        clean: its value in the clean run [rows, positions, ...].
        changes: values - clean, for stream states and MLPs.
    """

    n: int
    values: Tensor
    clean: Tensor
    changes: Tensor | None


class Stack:
    """Senders that are carried through the layers together.

    Args:
        chunk: the prompts, with our own blocks.
        index: the senders' positions [rows, positions], -1 where a prompt has none.
        senders: the edits of each, in order of their first write.
        mlps: what MLPs behind a sender do.
        frozen: whether receivers' norms keep the clean run's scale (an approximation).
    """

    def __init__(
        self, chunk: Chunk, index: Tensor, senders: Sequence[Variant], mlps: MLPs, frozen: bool
    ) -> None:
        assert chunk.plain is not None
        self.chunk, self.view, self.plain = chunk, chunk.view, chunk.plain
        self.index, self.senders, self.mlps, self.frozen = index, senders, mlps, frozen
        self.valid = (index >= 0).to(chunk.clean.final)[..., None]
        self.starts = [starts_at_stage(sender) for sender in senders]
        self.edits: dict[tuple[int, int], list[tuple[int, Edit]]] = defaultdict(list)
        for number, sender in enumerate(senders):
            for edit in sender:
                self.edits[write_stage(edit.site)].append((number, edit))  # type: ignore[arg-type]
        shape = (len(senders), *index.shape)
        self.D = chunk.clean.final.new_zeros(*shape, self.view.d_model)
        self.moved = torch.zeros(shape, dtype=torch.bool, device=self.D.device)
        """Where a sender's value differs from the clean one; elsewhere D is exactly zero."""

    def read(self, receivers: Iterable[Receiver]) -> dict[Receiver, Read]:
        """Carries the senders through the layers; gives what each receiver reads on the way."""
        wanted: dict[tuple[int | float, int], list[Receiver]] = defaultdict(list)
        for receiver in receivers:
            wanted[read_at_stage(self.view, receiver)].append(receiver)
        found: dict[Receiver, Read] = {}
        self._add(-1, 0)
        last = max(wanted)
        for layer in range(self.view.n_layers):
            found |= self._read(wanted.pop((layer, 0), []), layer, "pre")
            before = self._at_mlp(layer) if self.view.parallel else None
            self._add(layer, 1)
            found |= self._read(wanted.pop((layer, 2), []), layer, "mid")
            if not wanted:
                return found
            if not self.view.attn_only:
                self._pass_mlp(layer, self._at_mlp(layer) if before is None else before)
            found |= self._read(wanted.pop((layer, 4), []), layer, "post")
        found |= self._read(wanted.pop(last, []), self.view.n_layers - 1, "post")
        return found

    # Writes

    def _n_before(self, layer: int | float, place: int) -> int:
        """How many senders have begun to write before a stage."""
        return sum(start < (layer, place) for start in self.starts)

    def _add(self, layer: int, place: int) -> None:
        """Adds the senders' own writes of the attention side of a layer, or the embeddings'."""
        edits = self.edits.get((layer, place), [])
        heads = [item for item in edits if isinstance(item[1].site, Head)]
        if heads:
            z = self._rows(self.chunk.clean.act(Head(layer, 0)))
            numbers = [edit.site.head for _, edit in heads]  # type: ignore[union-attr]
            old = torch.einsum("bnhd->hbnd", z)[numbers]
            weight = self.view.W_O(layer).detach()[numbers]
            self._add_parts(heads, old, lambda moved: torch.einsum("kbnd,kdm->kbnm", moved, weight))
        for number, edit in edits:
            if not isinstance(edit.site, Head):
                self._add_whole(number, edit)

    def _add_parts(
        self,
        items: list[tuple[int, Edit]],
        old: Tensor,
        write: Callable[[Tensor], Tensor],
    ) -> None:
        """Adds what parts of one layer, of `old` values [k, rows, n, ...], write more or less."""
        moved = torch.stack([self._new(edit) for _, edit in items]).to(old) - old
        moved = moved * (self.valid if moved.ndim == 4 else self.valid[..., 0])
        numbers = torch.tensor([number for number, _ in items], device=self.D.device)
        differs = (moved != 0).any(-1) if moved.ndim == 4 else moved != 0
        self.moved[numbers] |= differs
        self.D.index_add_(0, numbers, write(moved).to(self.D))

    def _add_whole(self, number: int, edit: Edit) -> None:
        change = self._change(edit)
        self.moved[number] |= (change != 0).any(-1)
        self.D[number] += change

    def _change(self, edit: Edit) -> Tensor:
        """New - old write [rows, n, d_model] of a sender whose value is its write."""
        change = self._new(edit) - self.chunk.deltas.old(edit, self.index)
        return change.to(self.D) * self.valid

    def _new(self, edit: Edit) -> Tensor:
        return edit.fill(self.chunk.rows, self.index).to(self.D.device)

    # MLPs

    def _at_mlp(self, layer: int) -> tuple[int, Tensor]:
        """Senders whose difference an MLP reads, and that difference."""
        n = self._n_before(layer, 0 if self.view.parallel else 2)
        D = self.D[:n]
        return n, D.clone() if self.view.parallel else D

    def _pass_mlp(self, layer: int, before: tuple[int, Tensor]) -> None:
        """What an MLP adds to the differences: its answer to them, and senders inside it."""
        n, D = before
        edits = self.edits.get((layer, 3), [])
        live = n if self.mlps == "recompute" else 0
        neurons = [item for item in edits if isinstance(item[1].site, Neuron)]
        self._add_neurons(layer, [item for item in neurons if item[0] >= live])
        wholes = {number: edit for number, edit in edits if isinstance(edit.site, MLP)}
        if live:
            held = [item for item in neurons if item[0] < live]
            change = self._answer(layer, D, held)
            for number in wholes.keys() & range(live):
                change[number] = 0
            self.D[:live] += change * self.moved[:live, ..., None]
        for number, edit in edits:
            if isinstance(edit.site, MLP | MLPBias):
                self._add_whole(number, edit)

    def _answer(self, layer: int, D: Tensor, held: list[tuple[int, Edit]]) -> Tensor:
        """MLP(r + D) - MLP(r), some neurons held at their new values [senders, rows, n, d]."""
        # The clean rows go through the same product, so that no difference gives none.
        post = self.plain.mlp_post(layer, self._stacked(layer, "mid", D))
        for number, edit in held:
            neuron = edit.site.index  # type: ignore[union-attr]
            old = self._rows(self.chunk.clean.act(edit.site))[..., neuron]
            moved = (self._new(edit) - old).to(post) * self.valid[..., 0]
            self.moved[number] |= moved != 0
            post[number + 1, ..., neuron] = post[0, ..., neuron] + moved
        out = self.plain.mlp_out(layer, post)
        self._require_own(layer, out[0])
        return out[1:] - out[:1]

    def _require_own(self, layer: int, write: Tensor) -> None:
        """Raises NotPlain where our MLP's clean write is not the model's own."""
        found = self._state(layer, "mid") + write
        if self.view.parallel:
            found = found + self._rows(self.chunk.clean.act(Attn(layer)))
        there = self.index >= 0
        if not self.chunk.clean.agree(found[there], self._state(layer, "post")[there]):
            raise NotPlain(f"the MLP of layer {layer} differs")

    def _add_neurons(self, layer: int, items: list[tuple[int, Edit]]) -> None:
        if not items:
            return
        numbers = [edit.site.index for _, edit in items]  # type: ignore[union-attr]
        post = self._rows(self.chunk.clean.act(Neuron(layer, 0)))
        old = torch.einsum("bnm->mbn", post[..., numbers])
        weight = self.view.W_out(layer).detach()[numbers]
        self._add_parts(items, old, lambda moved: torch.einsum("kbn,kd->kbnd", moved, weight))

    # Reads

    def _rows(self, values: Tensor) -> Tensor:
        return take(values, self.index)

    def _state(self, layer: int, place: Place) -> Tensor:
        """The clean state that something in a layer reads, at the senders' positions."""
        joined = self.view.parallel or self.view.attn_only
        place = "pre" if place == "mid" and joined else place
        return self._rows(self.chunk.clean.after(layer, place))

    def _stacked(self, layer: int, place: Place, D: Tensor) -> Tensor:
        """The clean state, then one with each difference [1 + senders, rows, n, d_model]."""
        state = self._state(layer, place)[None]
        return torch.cat([state, state + D])

    def _read(self, receivers: list[Receiver], layer: int, place: Place) -> dict[Receiver, Read]:
        if not receivers:
            return {}
        stages: dict[Place, tuple[int, int]] = {"pre": (layer, 0), "mid": (layer, 2)}
        n = self._n_before(*stages.get(place, (layer, 4)))
        found: dict[Receiver, Read] = {}
        inputs = [receiver for receiver in receivers if isinstance(receiver, HeadInput)]
        if inputs:
            found |= self._read_inputs(inputs, layer, n)
        for receiver in receivers:
            if isinstance(receiver, MLPIn):
                found[receiver] = self._read_mlp(receiver, n)
            elif isinstance(receiver, Stream | Logits):
                state, D = self._state(layer, place), self.D[:n].clone()
                found[receiver] = Read(n, state + D, state, D)
        return found

    def _read_inputs(self, receivers: list[HeadInput], layer: int, n: int) -> dict[Receiver, Read]:
        stacked = self._stacked(layer, "pre", self.D[:n])
        normed = self.plain.normed(layer, stacked, stacked[:1] if self.frozen else None)
        found: dict[Receiver, Read] = {}
        for which in ("q", "k", "v"):
            chosen = [receiver for receiver in receivers if receiver.which == which]
            if not chosen:
                continue
            values = self.plain.inputs(layer, which, [receiver.head for receiver in chosen], normed)
            # Where no sender's value differs, exactly the clean one.
            values = torch.where(self._moved(n)[..., None], values, values[:1])
            for place, receiver in enumerate(chosen):
                found[receiver] = Read(n, values[1:, ..., place, :], values[0, ..., place, :], None)
        return found

    def _read_mlp(self, receiver: MLPIn, n: int) -> Read:
        stacked = self._stacked(receiver.layer, "mid", self.D[:n])
        base = stacked[:1] if self.frozen else None
        write = self.plain.mlp_write(receiver.layer, stacked, base)
        changes = (write[1:] - write[:1]) * self._moved(n)[1:]
        return Read(n, write[:1] + changes, write[0], changes)

    def _moved(self, n: int) -> Tensor:
        """Where senders differ [1 + n, rows, positions, 1], the clean run first."""
        clean = torch.zeros_like(self.moved[:1])
        return torch.cat([clean, self.moved[:n]])[..., None]
