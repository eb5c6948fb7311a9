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
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from resid_patching.address import (
    MLP,
    Attn,
    AttnBias,
    Embed,
    Head,
    HeadInput,
    Input,
    Logits,
    MLPBias,
    MLPIn,
    Neuron,
    PosEmbed,
    Receiver,
    Stream,
)
from resid_patching.models import take
from resid_patching.paths.receivers import read_at_stage, site_of, starts_at_stage
from resid_patching.rerun import Changes, Chunk, NotPlain, Put, Variant

MLPs = Literal["freeze", "recompute"]
Place = Literal["pre", "mid", "post"]


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
        self.index, self.mlps, self.frozen = index, mlps, frozen
        self.starts = [starts_at_stage(sender) for sender in senders]
        changes = Changes(chunk.clean, senders)
        self.puts = list(changes.all)
        shape = (len(senders), *index.shape)
        self.D = chunk.clean.final.new_zeros(*shape, self.view.d_model)
        self.moved = changes.moved_at(index)
        """Where a sender's value differs from the clean one; elsewhere D is exactly zero."""

    def read(self, receivers: Iterable[Receiver]) -> Iterator[dict[Receiver, Tensor]]:
        """What receivers read, stage by stage on the way, from each sender that reaches them.

        Yields:
            Values [n, rows, positions, ...]: a head's input, an MLP's write, or a state. The n
            senders that reach a receiver are the first. Exactly the clean value where a sender's
            does not differ.
        """
        wanted: dict[tuple[int | float, int], list[Receiver]] = defaultdict(list)
        for receiver in receivers:
            wanted[read_at_stage(self.view, receiver)].append(receiver)
        start = [put for put in self.puts if isinstance(put.site, Embed | PosEmbed | Input)]
        self.chunk.deltas.through(self.D, start, [], (0, 0), self.index)
        last = max(wanted)
        for layer in range(self.view.n_layers):
            yield self._read(wanted.pop((layer, 0), []), layer, "pre")
            before = self._at_mlp(layer) if self.view.parallel else None
            self._write(layer, Head, Attn, AttnBias)
            yield self._read(wanted.pop((layer, 2), []), layer, "mid")
            if not wanted:
                return
            if not self.view.attn_only:
                self._pass_mlp(layer, self._at_mlp(layer) if before is None else before)
            yield self._read(wanted.pop((layer, 4), []), layer, "post")
        yield self._read(wanted.pop(last, []), self.view.n_layers - 1, "post")

    def _n_before(self, layer: int | float, place: int) -> int:
        """How many senders have begun to write before a stage."""
        return sum(start < (layer, place) for start in self.starts)

    def _write(self, layer: int, *types: type) -> None:
        """Adds what the senders of some types write more or less in a layer."""
        puts = [p for p in self.puts if isinstance(p.site, types) and _layer(p) == layer]
        self.chunk.deltas.write(self.D, puts, layer, self.index)

    # MLPs

    def _at_mlp(self, layer: int) -> tuple[int, Tensor]:
        """Senders whose difference an MLP reads, and that difference."""
        n = self._n_before(layer, 0 if self.view.parallel else 2)
        D = self.D[:n]
        return n, D.clone() if self.view.parallel else D

    def _pass_mlp(self, layer: int, before: tuple[int, Tensor]) -> None:
        """What an MLP adds to the differences: its answer to them, and senders inside it."""
        n, D = before
        live = n if self.mlps == "recompute" else 0
        inside = [put for put in self.puts if isinstance(put.site, Neuron) and _layer(put) == layer]
        held = []
        for put in inside:
            answers = put.numbers < live
            if bool(answers.any()):
                held.append(put.of(answers))
            if not bool(answers.all()):
                self.chunk.deltas.write(self.D, [put.of(~answers)], layer, self.index)
        if live:
            change = self._answer(layer, D, held) * self.moved[:live, ..., None]
            for put in self.puts:
                if put.site == MLP(layer):
                    change[put.numbers[put.numbers < live]] = 0
            self.D[:live] += change
        self._write(layer, MLP, MLPBias)

    def _answer(self, layer: int, D: Tensor, held: list[Put]) -> Tensor:
        """MLP(r + D) - MLP(r), some neurons held at their new values [senders, rows, n, d]."""
        # The clean rows go through the same product, so that no difference gives none.
        post = self.plain.mlp_post(layer, self._stacked(layer, "mid", D))
        for put in held:
            neuron = put.site.index  # type: ignore[union-attr]
            moved = put.difference.to(post) * (put.index >= 0)
            post[put.numbers + 1, ..., neuron] = post[0, ..., neuron] + moved
        out = self.plain.mlp_out(layer, post)
        self._require_own(layer, out[0])
        return out[1:] - out[:1]

    def _require_own(self, layer: int, write: Tensor) -> None:
        """Raises NotPlain where our MLP's clean write is not the model's own."""
        found = self._state(layer, "mid") + write
        if self.view.parallel:
            found = found + take(self.chunk.clean.act(Attn(layer)), self.index)
        there = self.index >= 0
        if not self.chunk.clean.agree(found[there], self._state(layer, "post")[there]):
            raise NotPlain(f"the MLP of layer {layer} differs")

    # Reads

    def _state(self, layer: int, place: Place) -> Tensor:
        """The clean state that something in a layer reads, at the senders' positions."""
        joined = self.view.parallel or self.view.attn_only
        place = "pre" if place == "mid" and joined else place
        return take(self.chunk.clean.after(layer, place), self.index)

    def _stacked(self, layer: int, place: Place, D: Tensor) -> Tensor:
        """The clean state, then one with each difference [1 + senders, rows, n, d_model]."""
        state = self._state(layer, place)[None]
        return torch.cat([state, state + D])

    def _read(self, receivers: list[Receiver], layer: int, place: Place) -> dict[Receiver, Tensor]:
        if not receivers:
            return {}
        stages: dict[Place, tuple[int, int]] = {"pre": (layer, 0), "mid": (layer, 2)}
        n = self._n_before(*stages.get(place, (layer, 4)))
        D, moved = self.D[:n], self.moved[:n, ..., None]
        found: dict[Receiver, Tensor] = {}
        inputs = [receiver for receiver in receivers if isinstance(receiver, HeadInput)]
        if inputs:
            found |= self._read_inputs(inputs, layer, D)
        for receiver in receivers:
            if isinstance(receiver, MLPIn):
                stacked = self._stacked(layer, "mid", D)
                base = stacked[:1] if self.frozen else None
                write = self.plain.mlp_write(layer, stacked, base)
                found[receiver] = self._old(receiver) + (write[1:] - write[:1])
            elif isinstance(receiver, Stream | Logits):
                found[receiver] = self._old(receiver) + D
        return {r: torch.where(moved, value, self._old(r)) for r, value in found.items()}

    def _old(self, receiver: Receiver) -> Tensor:
        """A receiver's own clean value [rows, positions, ...]."""
        return self.chunk.clean.old(site_of(self.view, receiver), self.index)

    def _read_inputs(
        self, receivers: list[HeadInput], layer: int, D: Tensor
    ) -> dict[Receiver, Tensor]:
        stacked = self._stacked(layer, "pre", D)
        normed = self.plain.normed(layer, stacked, stacked[:1] if self.frozen else None)
        found: dict[Receiver, Tensor] = {}
        for which in ("q", "k", "v"):
            chosen = [receiver for receiver in receivers if receiver.which == which]
            if chosen:
                heads = [receiver.head for receiver in chosen]
                values = self.plain.inputs(layer, which, heads, normed[1:])
                found |= {r: values[..., place, :] for place, r in enumerate(chosen)}
        return found


def _layer(put: Put) -> int:
    return getattr(put.site, "layer", 0)
