"""Path patching over senders and receivers: values carried to the receivers, written, run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from resid_patching.address import Attn, HeadInput, Receiver, Stream, hook_name
from resid_patching.errors import UnsupportedModelError
from resid_patching.models import ModelView, exact
from resid_patching.paths.closed import MLPs, Read, Stack
from resid_patching.paths.hooked import moved_rows, names_to_keep, read_hooked
from resid_patching.paths.receivers import (
    Receivers,
    ReceiverSet,
    read_at_stage,
    site_of,
    starts_at_stage,
)
from resid_patching.prompts import PositionIndex
from resid_patching.rerun import (
    EVERYTHING,
    Chunk,
    Edit,
    Fill,
    NotPlain,
    Piece,
    Reading,
    Route,
    Share,
    Variant,
    Written,
    acts_from,
    chunks,
    hooks_to_keep,
    may_be_plain,
    put_together,
    require_acting,
    stage,
    take_rows,
)
from resid_patching.run import Run

# Rows that senders are carried through the layers in, and that receivers' changes are run in.
CARRIED_ROWS, WRITTEN_ROWS = 2048, 1024


@dataclass(frozen=True, eq=False)
class Patched:
    """What patching the paths did to the metric; NaN where no write reaches a receiver.

    Attributes:
        baseline: the clean run's value [batch].
        patched: with the receivers written and the model run again [sender, receivers, batch].
        direct: with the same change carried to the last state, all later writes frozen.
        routes: the routes that were taken.
    """

    baseline: Tensor
    patched: Tensor
    direct: Tensor
    routes: tuple[Route, ...]


@exact()
def patch_paths(
    run: Run,
    senders: Sequence[Variant],
    ends: Receivers,
    reading: Reading,
    *,
    mlps: MLPs,
    routes: Sequence[Route] = ("plain", "replay", "full"),
    progress: Callable[[int], object] | None = None,
    frozen_norms: bool = False,
    share: Share = EVERYTHING,
) -> Patched:
    """Replaces what senders send to receivers, and nothing else.

    Args:
        run: the clean run.
        senders: the edits of each sender, all at the same positions.
        ends: the receivers.
        reading: what the metric reads.
        mlps: `recompute` lets MLPs between sender and receiver answer, `freeze` does not.
        routes: routes that may be taken, best first; `full` is always allowed.
        progress: called with the number of (sender, receivers) pairs just done.
        frozen_norms: receivers' norms keep the clean run's scale, an approximation.
        share: what of it is worked here.

    Raises:
        HeadMismatchError: a head's hook does not show one vector for each head.
        UnsupportedModelError: the model throws away what is put at a receiver's hook, or frozen
            norms were asked of a model that the closed form does not cover.
    """
    shape = (len(senders), len(ends.sets), len(run))
    sites = (edit.site for sender in senders for edit in sender)
    require_acting(run.view, [*sites, *(end for end in ends.all if isinstance(end, HeadInput))])

    held = names_to_keep(run.view) | hooks_to_keep(
        run, [tuple(_receiver_edits(run.view, ends.all))]
    )
    needed = hooks_to_keep(run, senders)
    if not run.view.attn_only:
        needed |= {hook_name(Attn(layer)) for layer in range(run.view.n_layers)}
    tries_closed = may_be_plain(run.view, routes)
    given = (senders, ends, mlps, frozen_norms, share)

    def pieces() -> Iterator[Piece]:
        names = needed if tries_closed else needed | held
        for chunk in chunks(run, names, reading, routes, share):
            try:
                if is_closed(chunk, senders, ends, whole=frozen_norms):
                    yield from _Closed(chunk, *given).pieces()
                    continue
            except NotPlain:  # at its first stack: MLPs are not the model's own on these prompts
                pass
            if frozen_norms:
                raise UnsupportedModelError(
                    f"{run.view.name} ({run.view.kind}) is not covered by the closed form, so its "
                    "norms cannot be frozen at a receiver; use the exact path"
                )
            if tries_closed:
                chunk = chunk.again(run, names | held)
            yield from _Hooked(chunk, *given).pieces()
            del chunk  # before the next clean pass, so that one is held at a time

    return Patched(*put_together(share.gather(pieces()), run.view, shape, progress))


def is_closed(
    chunk: Chunk, senders: Sequence[Variant], ends: Receivers, *, whole: bool = False
) -> bool:
    """Whether the closed form covers every sender, and gives the clean run behind the receivers.

    Args:
        chunk: the prompts.
        senders: the edits of each sender.
        ends: the receivers.
        whole: whether our blocks must give the whole clean run.
    """
    if chunk.plain is None or not all(map(chunk.deltas.closed, senders)):
        return False
    if acts_from(chunk.clean.held, min(stage(e.site) for sender in senders for e in sender)):
        return False  # the run's intervention acts on the way
    last = Stream(chunk.view.n_layers - 1, "post")
    layers = [site.layer for end in ends.all if (site := site_of(chunk.view, end)) != last]
    if whole:
        return chunk.repeats(0, torch.zeros_like(chunk.read_at[:, 0]))
    if not layers:
        return True
    index = senders[0][0].positions.index[chunk.rows].to(chunk.view.device)
    first = torch.where(index < 0, chunk.clean.width, index).amin(1)
    return chunk.repeats(min(layers), first)


def _receiver_edits(view: ModelView, receivers: Sequence[Receiver]) -> Iterator[Edit]:
    """Edits that stand for the receivers, to ask which activations they need."""
    nowhere = PositionIndex(torch.full((1, 1), -1, device=view.device))
    for receiver in receivers:
        yield Edit(site_of(view, receiver), nowhere, lambda rows, index: index)


class _Work:
    """One chunk of prompts: stacks of senders, each for every alternative."""

    def __init__(
        self,
        chunk: Chunk,
        senders: Sequence[Variant],
        ends: Receivers,
        mlps: MLPs,
        frozen: bool,
        share: Share,
    ) -> None:
        self.chunk, self.view, self.share = chunk, chunk.view, share
        self.senders, self.ends, self.frozen = senders, ends, frozen
        self.mlps: MLPs = mlps
        self.index = senders[0][0].positions.index[chunk.rows].to(self.view.device)

    def _is_last(self, receivers: ReceiverSet) -> bool:
        """Whether the receivers are the last state alone."""
        return [site_of(self.view, receiver) for receiver in receivers] == [self._last]

    @property
    def _last(self) -> Stream:
        return Stream(self.view.n_layers - 1, "post")

    def stacks(self) -> Iterator[tuple[list[int], list[int]]]:
        """Numbers of senders that are carried together, and the columns wanted of them.

        Senders go in order of their first write.
        """
        order = sorted(range(len(self.senders)), key=lambda n: starts_at_stage(self.senders[n]))
        n_columns = len(self.ends.sets)
        for place, part in enumerate(even_parts(len(order), self._stack_size())):
            numbers = order[part]
            columns = [
                column
                for column in range(n_columns)
                if self.share.wants(self.chunk.rows, place * n_columns + column, numbers, column)
            ]
            if columns:
                yield numbers, columns

    def piece(
        self,
        numbers: Sequence[int],
        column: int,
        patched: Tensor,
        direct: Tensor,
        *routes: Route,
    ) -> Piece:
        """Values of some senders; NaN for the last of them, of which nothing is given."""
        missing = patched.new_full((len(numbers) - len(patched), patched.shape[1]), torch.nan)
        patched, direct = torch.cat([patched, missing]), torch.cat([direct, missing])
        base = self.chunk.baseline
        return Piece(self.chunk.rows, numbers, column, base, patched, direct, routes)

    def _stack_size(self) -> int:
        raise NotImplementedError

    def _reached(self, moved: Tensor) -> Tensor:
        """Which (sender, prompt) has a difference that causality leads to what is read."""
        if self.chunk.whole:  # a hook of the caller may look ahead
            return moved.any(2)
        last = self.chunk.read_at.amax(1)
        return (moved & (self.index <= last[:, None])).any(2)


class _Closed(_Work):
    """By the closed form and our own blocks."""

    def __init__(self, chunk: Chunk, *rest: Any) -> None:
        super().__init__(chunk, *rest)
        self.aligned = all(map(self._is_last, self.ends.sets))
        """Whether the positions are those that the metric reads, slot by slot."""
        if self.aligned:
            self.index = self._read_only(self.index)

    def _read_only(self, where: Tensor) -> Tensor:
        """The positions that the metric reads, where they are the senders': no others matter."""
        read_at = self.chunk.read_at
        is_sent = (read_at[:, :, None] == where[:, None]).any(2)
        return torch.where(is_sent, read_at, -1)

    def pieces(self) -> Iterator[Piece]:
        """What the senders' messages do, stack by stack and column by column."""
        for numbers, columns in self.stacks():
            senders = [self.senders[number] for number in numbers]
            stack = Stack(self.chunk, self.index, senders, self.mlps, self.frozen)
            reads = stack.read(self.ends.all)
            reached = self._reached(stack.moved)
            for column in columns:
                receivers = self.ends.sets[column]
                n = max(reads[receiver].n for receiver in receivers)
                found = {receiver: reads[receiver] for receiver in receivers}
                patched, direct = self._patched(found, reached[:n], stack.moved[:n])
                yield self.piece(numbers, column, patched, direct, "plain")

    def _stack_size(self) -> int:
        view, size = self.view, self.view.compute_dtype.itemsize
        d_mlp = 0 if view.attn_only else view.n_neurons(0)
        rows = self.index.numel()
        d_head = view.W_O(0).shape[1]
        held = sum(d_head if isinstance(r, HeadInput) else view.d_model for r in self.ends.all)
        per_sender = rows * size * (4 * view.d_model + 3 * d_mlp + held)
        return max(1, min(CARRIED_ROWS // rows, self.chunk.max_bytes // (2 * per_sender)))

    def _patched(
        self, reads: dict[Receiver, Read], reached: Tensor, moved: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The metric [senders, rows] with the receivers written: run again, and later frozen."""
        base = self.chunk.baseline.expand(len(reached), -1)
        if not bool(reached.any()):
            return base, base
        if self._is_last(tuple(reads)):
            (read,) = reads.values()
            value = torch.where(reached, self._at_last(read), base)
            return value, value
        written = self._written(reads, moved)
        patched, direct = base.clone(), base.clone()
        for part in even_parts(len(reached), self._n_together(written)):
            total, frozen = self.chunk.write(written.part(part))
            patched[part] = torch.where(reached[part], self.chunk.score(total), base[part])
            direct[part] = torch.where(reached[part], self.chunk.score(frozen), base[part])
        return patched, direct

    def _at_last(self, read: Read) -> Tensor:
        """The metric of the clean last state plus the differences."""
        assert read.changes is not None
        chunk = self.chunk
        change = read.changes
        if not self.aligned:
            change = _at_positions(change, self.index, chunk.read_at)
        base = chunk.clean_rows
        scale = self.view.final_norm.scale(base.to(self.view.compute_dtype))
        return chunk.score(base + change, scale if self.frozen else None)

    def _written(self, reads: dict[Receiver, Read], moved: Tensor) -> Written:
        """The receivers' values for all senders; clean ones for senders that do not reach one."""
        values, changes, n = {}, {}, len(moved)
        for receiver, read in reads.items():
            site = site_of(self.view, receiver)
            missing = n - read.n
            clean = read.clean.expand(missing, *read.clean.shape)
            values[site] = torch.cat([read.values, clean]) if missing else read.values
            if read.changes is not None:
                none = torch.zeros_like(clean)
                changes[site] = torch.cat([read.changes, none]) if missing else read.changes
        return Written(self.index, values, changes, moved)

    def _n_together(self, written: Written) -> int:
        """Senders whose changes are run together behind the receivers."""
        chunk, view = self.chunk, self.view
        lengths = chunk.clean.lengths.to(written.index.device)
        n_rows = max(1, int((lengths - written.first_moved(lengths)).max()))
        per_sender = len(chunk.clean) * n_rows
        n_bytes = per_sender * view.d_model * view.compute_dtype.itemsize * 16
        return max(1, min(WRITTEN_ROWS // per_sender, chunk.max_bytes // (2 * n_bytes)))


class _Hooked(_Work):
    """By forward passes with hooks."""

    def pieces(self) -> Iterator[Piece]:
        """What the senders' messages do, stack by stack and column by column."""
        for numbers, columns in self.stacks():
            senders = [self.senders[number] for number in numbers]
            values = read_hooked(self.chunk, self.index, senders, self.mlps, self.ends.all)
            reached = self._reached(moved_rows(self.chunk, self.index, senders))
            for column in columns:
                receivers = self.ends.sets[column]
                n = sum(any(self._reaches(s, receiver) for receiver in receivers) for s in senders)
                variants = [self._variant(receivers, values, number) for number in range(n)]
                yield from self._of_reached(numbers[:n], column, variants, reached[:n])
                if n < len(numbers):
                    none = self.chunk.baseline[None][:0]
                    yield self.piece(numbers[n:], column, none, none, "full")

    def _reaches(self, sender: Variant, receiver: Receiver) -> bool:
        return starts_at_stage(sender) < read_at_stage(self.view, receiver)

    def _of_reached(
        self, numbers: list[int], column: int, variants: list[Variant], reached: Tensor
    ) -> Iterator[Piece]:
        base = self.chunk.baseline
        for part, patched, direct, route in self.chunk.evaluate(variants):
            patched = torch.where(reached[part], patched, base)
            direct = torch.where(reached[part], direct, base)
            yield self.piece([numbers[i] for i in part], column, patched, direct, route, "full")

    def _variant(
        self, receivers: ReceiverSet, values: dict[Receiver, Tensor], number: int
    ) -> Variant:
        where = PositionIndex(_in_batch(self.index, self.chunk.rows))
        edits = []
        for receiver in receivers:
            site = site_of(self.view, receiver)
            edits.append(Edit(site, where, _constant(values[receiver][number])))
        return tuple(edits)

    def _stack_size(self) -> int:
        view, clean = self.view, self.chunk.clean
        cells = len(clean) * clean.width
        per_sender = cells * view.compute_dtype.itemsize * (view.W_U.shape[1] + 16 * view.d_model)
        return max(1, min(WRITTEN_ROWS // cells, self.chunk.max_bytes // (2 * per_sender)))


def even_parts(n: int, limit: int) -> Iterator[slice]:
    """N things in as few parts of at most `limit` as there can be, none much smaller."""
    n_parts = -(-n // limit)
    for number in range(n_parts):
        yield slice(n * number // n_parts, n * (number + 1) // n_parts)


def _constant(values: Tensor) -> Fill:
    return lambda rows, index: values


def _in_batch(index: Tensor, rows: slice) -> Tensor:
    """Positions of a chunk as positions of the batch, none for prompts outside it."""
    full = index.new_full((rows.stop, index.shape[1]), -1)
    full[rows] = index
    return full


def _at_positions(values: Tensor, index: Tensor, wanted: Tensor) -> Tensor:
    """Values at positions [rows, n] -> at positions [rows, m]; zero where there is none."""
    same = (wanted[:, :, None] == index[:, None]) & (index >= 0)[:, None]
    slot = same.to(torch.int8).argmax(2)
    taken = take_rows(values, slot)
    return taken * same.any(2)[None, :, :, None]
