"""Edges replaced together: a run in which each receiver hears its own sum of writes.

    input(r) = stream + sum over replaced edges s -> r of (new write of s - its write in this run)

The stream and all writes are those of this run, so senders behind a receiver answer what it hears.
All edges replaced by another run's writes give that run; none give the clean one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from resid_patching.address import (
    MLP,
    QKV,
    Attn,
    AttnBias,
    Head,
    HeadInput,
    Logits,
    MLPBias,
    MLPIn,
    Neuron,
    Receiver,
    Stream,
    hook_name,
    write_stage,
)
from resid_patching.errors import AddressError, UnsupportedModelError
from resid_patching.models import exact, take
from resid_patching.paths.edges import EdgeSet
from resid_patching.paths.patching import Patched
from resid_patching.rerun import (
    Changes,
    Chunk,
    Piece,
    Put,
    Reading,
    Variant,
    chunks,
    hooks_to_keep,
    put_together,
)
from resid_patching.run import Run


@exact()
def patch_together(
    run: Run, senders: Sequence[Variant], edges: EdgeSet, reading: Reading
) -> Patched:
    """Replaces what several edges carry, all at once.

    Args:
        run: the clean run.
        senders: the edits of each of the edges' senders, one edit each.
        edges: the edges.
        reading: what the metric reads.

    Returns:
        One row. Its direct effect is NaN: edges that end at different depths have none.

    Raises:
        AddressError: an edge ends at a state of the stream, which all later receivers hear.
        UnsupportedModelError: our own blocks do not give the model's numbers.
    """
    for edge in edges.edges:
        if isinstance(edge.receiver, Stream):
            raise AddressError(
                f"{edge} ends at a state that all later receivers hear, so it cannot be replaced "
                "together with other edges; name the receivers, such as 10.0.q, mlp.10.in or logits"
            )
    names = hooks_to_keep(run, senders)
    names |= {hook_name(Attn(layer)) for layer in range(run.view.n_layers)}

    def pieces() -> Iterator[Piece]:
        for chunk in chunks(run, names, reading, ("plain", "full"), n_beside=len(senders)):
            patched = Hearing(chunk, senders, edges).patched()
            direct = torch.full_like(patched, torch.nan)
            yield Piece(chunk.rows, [0], 0, chunk.baseline, patched, direct, ("plain",))

    return Patched(*put_together(pieces(), run.view, (1, 1, len(run)), None))


class Hearing:
    """Some prompts with edges replaced.

    Args:
        chunk: the prompts, with our own blocks.
        senders: the edits of each sender.
        edges: the edges.
    """

    def __init__(self, chunk: Chunk, senders: Sequence[Variant], edges: EdgeSet) -> None:
        self.chunk, self.view = chunk, chunk.view
        self.changes = Changes(chunk.clean, senders)
        self.puts: list[Put] = sorted(
            (put.of_one(number) for put in self.changes.all for number in range(len(put.numbers))),
            key=lambda put: write_stage(put.site),  # type: ignore[arg-type]
        )
        number_of = {put.site: number for number, put in enumerate(self.puts)}
        self.hears: dict[Receiver, list[int]] = {}
        """Numbers of the senders of which each receiver hears other writes."""
        for receiver, heard in edges.heard.items():
            self.hears[receiver] = [number_of[sender] for sender in heard]
        shape = (len(self.puts), *chunk.clean.final.shape)
        self.apart = chunk.clean.final.new_zeros(shape)
        """Each sender's new write minus its write in this run [sender, rows, pos, d_model]."""

    def patched(self) -> Tensor:
        """The metric [1, rows].

        Raises:
            UnsupportedModelError: our own blocks do not give the model's numbers.
        """
        chunk, view = self.chunk, self.view
        base = chunk.baseline[None]
        if not bool(self.changes.changed.any()):
            return base
        begin = min(getattr(receiver, "layer", view.n_layers) for receiver in self.hears)
        self._require_own(min(begin, view.n_layers - 1))
        x = chunk.clean.final if begin == view.n_layers else chunk.clean.act_pre(begin)
        for number, put in enumerate(self.puts):
            if write_stage(put.site) < (begin, 0):  # type: ignore[arg-type]
                self._note(number, put.old)
        for layer in range(begin, view.n_layers):
            x = self._block(layer, x)
        (x,) = self._heard([Logits()], x)
        value = chunk.score(take(x, chunk.read_at)[None])
        return torch.where(self.changes.changed.any(0), value, base)

    def _require_own(self, layer: int) -> None:
        chunk = self.chunk
        if chunk.clean.held:
            raise UnsupportedModelError(
                "edges of a run that carries an intervention are replaced one at a time, not "
                "together; leave out joint=True"
            )
        closed = chunk.plain is not None and all(
            chunk.deltas.closed_site(put.site) for put in self.puts
        )
        if not closed or not chunk.repeats(layer, torch.zeros_like(chunk.read_at[:, 0])):
            raise UnsupportedModelError(
                f"edges of {self.view.name} ({self.view.kind}) cannot be replaced together: its "
                "blocks are not of the kind that this package computes itself. Replace the edges "
                "one at a time."
            )

    def _block(self, layer: int, x: Tensor) -> Tensor:
        """The state before a layer [rows, pos, d_model] -> the state behind it."""
        chunk, view, positions = self.chunk, self.view, self.chunk.clean.positions
        assert chunk.plain is not None
        plain = chunk.plain
        q, k, v = plain.project(layer, x)
        for which, part in zip(QKV, (q, k, v), strict=True):
            receivers = [
                receiver
                for head in range(part.shape[2])
                if (receiver := HeadInput(layer, head, which)) in self.hears
            ]
            normed = plain.normed(layer, self._heard(receivers, x)) if receivers else ()
            for receiver, state in zip(receivers, normed, strict=True):
                part[:, :, receiver.head] = plain.inputs(layer, which, [receiver.head], state)[
                    :, :, 0
                ]
        q, k = plain.rotate(q[None], positions), plain.rotate(k[None], positions)
        z = plain.attend(q, k, v[None], positions, positions)[0]
        write = plain.attention_write(layer, z)
        after = x + write
        here = {n: p for n, p in enumerate(self.puts) if getattr(p.site, "layer", -1) == layer}
        for number, put in here.items():
            if isinstance(put.site, Head):
                self._note(number, take(z[:, :, put.head], put.index))
            elif isinstance(put.site, Attn):
                self._note(number, take(write, put.index))
        if not view.attn_only:
            before = x if view.parallel else after
            receiver = MLPIn(layer)
            if receiver in self.hears:
                (before,) = self._heard([receiver], before)
            post = plain.mlp_post(layer, before)
            write = plain.mlp_out(layer, post)
            after = after + write
            for number, put in here.items():
                if isinstance(put.site, Neuron):
                    self._note(number, take(post[..., put.site.index], put.index))
                elif isinstance(put.site, MLP):
                    self._note(number, take(write, put.index))
        for number, put in here.items():
            if isinstance(put.site, AttnBias | MLPBias):
                self._note(number, put.old)
        return after

    def _note(self, number: int, value: Tensor) -> None:
        """Notes how far a sender's new write is from that of its value here [rows, n, ...]."""
        put = dataclasses.replace(self.puts[number], old=value)
        delta, positions = self.apart[number : number + 1], self.chunk.clean.positions
        stage = self.chunk.clean.stage(put.site)
        self.chunk.deltas.through(delta, [put], [], stage, positions)

    def _heard(self, receivers: Sequence[Receiver], x: Tensor) -> Tensor:
        """The stream as each receiver hears it [receiver, rows, pos, d_model]."""
        chosen = x.new_zeros(len(receivers), len(self.puts))
        for row, receiver in enumerate(receivers):
            chosen[row, self.hears.get(receiver, [])] = 1
        heard = chosen.any(0)
        return x + torch.einsum("rs,s...->r...", chosen[:, heard], self.apart[heard])
