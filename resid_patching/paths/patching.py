"""Path patching over senders and receivers: values carried to the receivers, written, run again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from resid_patching.address import Attn, HeadInput, Receiver, Stream, hook_name
from resid_patching.errors import UnsupportedModelError
from resid_patching.models import ModelView, exact
from resid_patching.paths.closed import MLPs, Stack
from resid_patching.paths.hooked import names_to_keep, read_hooked
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
    Changes,
    Chunk,
    Edit,
    Fill,
    NotPlain,
    Piece,
    Put,
    Reading,
    Route,
    Share,
    Variant,
    acts_from,
    chunks,
    hooks_to_keep,
    may_be_plain,
    put_together,
    require_acting,
    stage,
)
from resid_patching.run import Run

# Rows in which senders are carried to the receivers, by the closed form and by whole passes.
CARRIED_ROWS, HOOKED_ROWS = 2048, 1024


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
    wanted: Collection[tuple[int, int]] | None = None,
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
        wanted: the pairs (number of a sender, number of an alternative) that are asked for; None
            for all. The others are NaN.

    Raises:
        HeadMismatchError: a head's hook does not show one vector for each head.
        UnsupportedModelError: the model throws away what is put at a receiver's hook, or frozen
            norms were asked of a model that the closed form does not cover.
    """
    shape = (len(senders), len(ends.sets), len(run))
    sites = (edit.site for sender in senders for edit in sender)
    require_acting(run.view, [*sites, *(end for end in ends.all if isinstance(end, HeadInput))])

    needed = hooks_to_keep(run, [*senders, tuple(_receiver_edits(run.view, ends.all))])
    needed |= {hook_name(Attn(layer)) for layer in range(run.view.n_layers)}
    held = names_to_keep(run.view)
    tries_closed = may_be_plain(run.view, routes)
    given = (senders, ends, mlps, frozen_norms, share, wanted)

    def pieces() -> Iterator[Piece]:
        names = needed if tries_closed else needed | held
        for chunk in chunks(run, names, reading, routes, share):
            try:
                if is_closed(chunk, senders, ends, whole=frozen_norms):
                    yield from _Work(chunk, *given, closed=True).pieces()
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
            yield from _Work(chunk, *given, closed=False).pieces()
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
    if any(acts_from(chunk.clean.held, stage(e.site)) for sender in senders for e in sender):
        return False  # the run's intervention acts on the way
    last = Stream(chunk.view.n_layers - 1, "post")
    layers = [site.layer for end in ends.all if (site := site_of(chunk.view, end)) != last]
    if whole:
        return chunk.repeats(0, torch.zeros_like(chunk.read_at[:, 0]))
    if not layers:
        return True
    index = _positions(chunk, senders)
    first = torch.where(index < 0, chunk.clean.width, index).amin(1)
    return chunk.repeats(min(layers), first)


def _receiver_edits(view: ModelView, receivers: Sequence[Receiver]) -> Iterator[Edit]:
    """Edits that stand for the receivers, to ask which activations they need."""
    nowhere = PositionIndex(torch.full((1, 1), -1, device=view.device))
    for receiver in receivers:
        yield Edit(site_of(view, receiver), nowhere, lambda rows, index: index)


class _Work:
    """One chunk of prompts: stacks of senders, each for every alternative.

    What the receivers read is found by the closed form, or by forward passes with hooks. It is
    then put where they read it, and the model is run again behind.
    """

    def __init__(
        self,
        chunk: Chunk,
        senders: Sequence[Variant],
        ends: Receivers,
        mlps: MLPs,
        frozen: bool,
        share: Share,
        wanted: Collection[tuple[int, int]] | None,
        *,
        closed: bool,
    ) -> None:
        self.chunk, self.view, self.share, self.closed = chunk, chunk.view, share, closed
        self.senders, self.ends, self.frozen, self.wanted = senders, ends, frozen, wanted
        self.mlps: MLPs = mlps
        self.index = _positions(chunk, senders)
        if closed and all(map(self._is_last, ends.sets)):  # no positions matter but those read
            read_at = chunk.read_at
            is_sent = (read_at[:, :, None] == self.index[:, None]).any(2)
            self.index = torch.where(is_sent, read_at, -1)
            where = PositionIndex(_in_batch(self.index, chunk.rows))
            self.senders = [tuple(Edit(e.site, where, e.fill) for e in s) for s in senders]

    def _is_last(self, receivers: ReceiverSet) -> bool:
        """Whether the receivers are the last state alone."""
        last = Stream(self.view.n_layers - 1, "post")
        return [site_of(self.view, receiver) for receiver in receivers] == [last]

    def pieces(self) -> Iterator[Piece]:
        """What the senders' messages do, stack by stack.

        In each stack, the alternatives that can be read at one stage are worked together.
        """
        order = sorted(range(len(self.senders)), key=lambda n: starts_at_stage(self.senders[n]))
        by_stage: dict[tuple[int | float, int], list[int]] = {}
        for column, receivers in enumerate(self.ends.sets):
            last = max(read_at_stage(self.view, receiver) for receiver in receivers)
            by_stage.setdefault(last, []).append(column)
        groups = [by_stage[key] for key in sorted(by_stage)]
        for place, part in enumerate(even_parts(len(order), self._stack_size())):
            numbers = order[part]
            here = [
                columns
                for number, columns in enumerate(groups, place * len(groups))
                if self._wants(number, numbers, columns)
            ]
            if here:
                yield from self._stack(numbers, here)

    def _wants(self, number: int, numbers: list[int], columns: list[int]) -> bool:
        """Whether any cell of a stack and some alternatives is worked here."""
        for column in columns:
            asked = [n for n in numbers if self.wanted is None or (n, column) in self.wanted]
            if asked and self.share.wants(self.chunk.rows, number, asked, column):
                return True
        return False

    def _stack(self, numbers: list[int], groups: list[list[int]]) -> Iterator[Piece]:
        """What some senders' messages do, group by group of alternatives."""
        senders = [self.senders[number] for number in numbers]
        columns = [column for group in groups for column in group]
        ends = Receivers(tuple(self.ends.sets[column] for column in columns)).all
        if self.closed:
            stack = Stack(self.chunk, self.index, senders, self.mlps, self.frozen)
            moved, found = stack.moved, stack.read(ends)
        else:
            found = iter([read_hooked(self.chunk, self.index, senders, self.mlps, ends)])
            moved = Changes(self.chunk.clean, senders).moved_at(self.index)
        index = torch.where(moved.any(0), self.index, -1)
        reads: dict[Receiver, Tensor] = {}
        left = list(groups)
        for more in found:
            reads |= more
            while left and all(r in reads for column in left[0] for r in self.ends.sets[column]):
                yield from self._group(numbers, left.pop(0), reads, index)
                needed = {r for group in left for c in group for r in self.ends.sets[c]}
                reads = {receiver: reads[receiver] for receiver in reads if receiver in needed}

    def _group(
        self,
        numbers: list[int],
        columns: list[int],
        reads: dict[Receiver, Tensor],
        index: Tensor,
    ) -> Iterator[Piece]:
        """What the messages do that some alternatives read, all run again together."""
        where = PositionIndex(_in_batch(index, self.chunk.rows))
        starts = [starts_at_stage(self.senders[number]) for number in numbers]
        way: Route = "plain" if self.closed else "full"
        cells: list[tuple[int, int]] = []
        variants: list[Variant] = []
        for column in columns:
            receivers = self.ends.sets[column]
            asked = [
                place
                for place, number in enumerate(numbers)
                if self.wanted is None or (number, column) in self.wanted
            ]
            before = {r: read_at_stage(self.view, r) for r in receivers}
            reaching = [p for p in asked if any(starts[p] < at for at in before.values())]
            if missing := [numbers[place] for place in asked if place not in set(reaching)]:
                none = self.chunk.baseline[None].expand(len(missing), -1) * torch.nan
                yield self._piece(missing, column, none, none, way)
            if not reaching:
                continue
            if self.closed and self._is_last(receivers):
                value = self._at_last(reads[receivers[0]][reaching], index)
                yield self._piece([numbers[p] for p in reaching], column, value, value, way)
                continue
            for place in reaching:
                cells.append((numbers[place], column))
                variants.append(
                    tuple(
                        Edit(site_of(self.view, receiver), where, _constant(reads[receiver][place]))
                        for receiver in receivers
                        if starts[place] < before[receiver]
                    )
                )
        for part, patched, direct, route in self.chunk.evaluate(variants):
            for column in sorted({cells[number][1] for number in part}):
                chosen = [k for k, number in enumerate(part) if cells[number][1] == column]
                senders = [cells[part[k]][0] for k in chosen]
                yield self._piece(senders, column, patched[chosen], direct[chosen], route, way)

    def _at_last(self, states: Tensor, index: Tensor) -> Tensor:
        """The metric [senders, rows] of last states [senders, rows, positions, d_model]."""
        chunk = self.chunk
        final = chunk.clean_rows.expand(len(states), *chunk.clean_rows.shape).clone()
        numbers = torch.arange(len(states))
        last = Stream(self.view.n_layers - 1, "post")
        put = Put(last, numbers, index, states, chunk.clean.old(last, index))
        put.set(final, chunk.read_at)
        scale = self.view.final_norm.scale(chunk.clean_rows.to(self.view.compute_dtype))
        value = chunk.score(final, scale if self.frozen else None)
        differs = (final != chunk.clean_rows).flatten(2).any(2)
        return torch.where(differs, value, chunk.baseline)

    def _piece(
        self,
        numbers: Sequence[int],
        column: int,
        patched: Tensor,
        direct: Tensor,
        *routes: Route,
    ) -> Piece:
        chunk = self.chunk
        return Piece(chunk.rows, numbers, column, chunk.baseline, patched, direct, routes)

    def _stack_size(self) -> int:
        """Senders that are carried together, by rows and by the run's bound on memory."""
        view, chunk, size = self.view, self.chunk, self.view.compute_dtype.itemsize
        if not self.closed:
            cells = len(chunk.clean) * chunk.clean.width
            per_sender = cells * size * (view.W_U.shape[1] + 16 * view.d_model)
            return max(1, min(HOOKED_ROWS // cells, chunk.max_bytes // (2 * per_sender)))
        d_mlp = 0 if view.attn_only else view.n_neurons(0)
        rows, d_head = self.index.numel(), view.W_O(0).shape[1]
        held: dict[tuple[int | float, int], int] = defaultdict(int)  # what is read at one stage
        for r in self.ends.all:
            held[read_at_stage(view, r)] += d_head if isinstance(r, HeadInput) else view.d_model
        together = any(len(receivers) > 1 for receivers in self.ends.sets)
        values = sum(held.values()) if together else max(held.values())
        per_sender = rows * size * (4 * view.d_model + 3 * d_mlp + values)
        return max(1, min(CARRIED_ROWS // rows, chunk.max_bytes // (2 * per_sender)))


def even_parts(n: int, limit: int) -> Iterator[slice]:
    """N things in as few parts of at most `limit` as there can be, none much smaller."""
    n_parts = -(-n // limit)
    for number in range(n_parts):
        yield slice(n * number // n_parts, n * (number + 1) // n_parts)


def _positions(chunk: Chunk, senders: Sequence[Variant]) -> Tensor:
    """Where any sender is replaced [rows, positions], -1 where a prompt has no position."""
    places = {edit.positions for sender in senders for edit in sender}
    found = torch.stack([place.index[chunk.rows] for place in places]).amax(0)
    return found.to(chunk.view.device)


def _constant(values: Tensor) -> Fill:
    return lambda rows, index: values


def _in_batch(index: Tensor, rows: slice) -> Tensor:
    """Positions of a chunk as positions of the batch, none for prompts outside it."""
    full = index.new_full((rows.stop, index.shape[1]), -1)
    full[rows] = index
    return full
