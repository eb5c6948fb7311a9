"""The edits of a stack of variants, with the values that they put where.

A variant starts at its first stage: there it begins to differ from the clean run. What it edits
in that stage is one change of the stream (see `deltas`); what it edits later is put in on the way
(see `walk`).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from resid_patching.address import Address, Embed, Head, HeadInput, HeadNode, PosEmbed
from resid_patching.rerun.clean import Clean
from resid_patching.rerun.edits import Variant

Stage = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Put:
    """New values for one site in some variants, at the same positions of every prompt.

    Attributes:
        site: what is replaced.
        numbers: which variants of the stack [k].
        index: positions [rows, n], -1 where a prompt has none.
        values: the new values [k, rows, n, ...]; of an embedding, new - old.
        old: the clean values, for all variants [rows, n, ...]; of an embedding, zero.
    """

    site: Address
    numbers: Tensor
    index: Tensor
    values: Tensor
    old: Tensor

    @cached_property
    def moved(self) -> Tensor:
        """Where a new value differs from the clean one [k, rows, n]."""
        differs = self.values != self.old
        differs = differs.flatten(3).any(3) if differs.ndim > 3 else differs
        return differs & (self.index >= 0)

    @property
    def difference(self) -> Tensor:
        """New - clean [k, rows, n, ...]; exactly zero where nothing moved."""
        return self.values - self.old

    @property
    def head(self) -> int:
        """The head of a site that has one."""
        assert isinstance(self.site, Head | HeadInput | HeadNode)
        return self.site.head

    def of(self, chosen: Tensor) -> Put:
        """The same in some of its variants: a mask [k]."""
        if bool(chosen.all()):
            return self
        values = self.values[chosen.to(self.values.device)]
        return dataclasses.replace(self, numbers=self.numbers[chosen], values=values)

    def of_one(self, place: int) -> Put:
        """The same in one of its variants, which becomes the first of a stack."""
        values = self.values[place : place + 1]
        return dataclasses.replace(self, numbers=torch.zeros(1, dtype=torch.long), values=values)

    def renumbered(self, numbers: Tensor) -> Put:
        """The same with other numbers for its variants [k]."""
        return dataclasses.replace(self, numbers=numbers)

    def with_values(self, values: Tensor) -> Put:
        """The same with other values [k, rows, n, ...]."""
        return dataclasses.replace(self, values=values)

    def cells(self, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where its positions stand among others [rows, m]: rows, places in m, places in n."""
        return _cells(self.index, at)

    def set(self, target: Tensor, at: Tensor) -> None:
        """Sets its values in [variant, rows, m, ...], whose rows stand at [rows, m], in place."""
        row, place, column = self.cells(at)
        numbers = self.numbers.to(target.device)[:, None]
        target[numbers, row, place] = self.values[:, row, column].to(target.dtype)

    def add(self, target: Tensor, at: Tensor, change: Tensor) -> None:
        """Adds a change [k, rows, n, d] to [variant, rows, m, d], in place."""
        row, place, column = self.cells(at)
        numbers = self.numbers.to(target.device)[:, None]
        target[numbers, row, place] += change[:, row, column].to(target.dtype)


@dataclass(frozen=True, eq=False)
class Pin:
    """A site that the run's own intervention holds at some positions, in every variant.

    Attributes:
        site: what is held.
        index: positions [rows, n], -1 where a prompt has none.
        value: what it is held at [rows, n, ...].
    """

    site: Address
    index: Tensor
    value: Tensor

    def set(self, target: Tensor, at: Tensor) -> None:
        """Sets its value in [variant, rows, m, ...], whose rows stand at [rows, m], in place."""
        row, place, column = _cells(self.index, at)
        target[:, row, place] = self.value[row, column].to(target.dtype)

    def clear(self, change: Tensor, at: Tensor) -> None:
        """Sets a change [variant, rows, m, ...] to zero where the site is held, in place."""
        row, place, _ = _cells(self.index, at)
        change[:, row, place] = 0


class Changes:
    """What a stack of variants changes.

    Args:
        clean: the clean run.
        stack: the edits of each variant.
    """

    def __init__(self, clean: Clean, stack: Sequence[Variant]) -> None:
        self.clean, self.n = clean, len(stack)
        never = (clean.view.n_layers, 0)
        self.starts = [min((clean.stage(e.site) for e in edits), default=never) for edits in stack]
        self.puts: dict[Stage, list[Put]] = defaultdict(list)
        grouped: dict[tuple[Address, int], list[tuple[int, int]]] = defaultdict(list)
        for number, edits in enumerate(stack):
            for place, edit in enumerate(edits):
                grouped[edit.site, id(edit.positions)].append((number, place))
        for (site, _), items in grouped.items():
            edits = [stack[number][place] for number, place in items]
            index = edits[0].positions.index[clean.rows].to(clean.view.device)
            values = torch.stack([clean.ours(edit.fill(clean.rows, index)) for edit in edits])
            numbers = torch.tensor([number for number, _ in items])
            put = Put(site, numbers, index, values, clean.old(site, index))
            self.puts[clean.stage(site)].append(put)
        self.pins: dict[Stage, list[Pin]] = defaultdict(list)
        for edit in clean.held:
            if not isinstance(edit.site, Embed | PosEmbed):  # nothing behind them changes these
                index = edit.positions.index[clean.rows].to(clean.view.device)
                pin = Pin(edit.site, index, clean.old(edit.site, index))
                self.pins[clean.stage(edit.site)].append(pin)

    @cached_property
    def first_moved(self) -> Tensor:
        """The first position of each prompt that differs [variant, rows]; none: the width."""
        clean = self.clean
        first = torch.full((self.n, len(clean)), clean.width, device=clean.view.device)
        for put in self.all:
            where = torch.where(put.moved, put.index, clean.width).amin(2)
            first[put.numbers] = torch.minimum(first[put.numbers], where)
        return first

    @property
    def changed(self) -> Tensor:
        """Which prompts have any new value that differs from the clean one [variant, rows]."""
        return self.first_moved < self.clean.width

    def moved_at(self, index: Tensor) -> Tensor:
        """Where any new value differs, of edits at these positions [variant, rows, n]."""
        found = torch.zeros(self.n, *index.shape, dtype=torch.bool, device=index.device)
        for put in self.all:
            found[put.numbers] |= put.moved
        return found

    @property
    def all(self) -> Iterable[Put]:
        """Every put."""
        return (put for puts in self.puts.values() for put in puts)

    def starting(self, key: Stage) -> tuple[list[Put], range]:
        """The variants that start at a stage, one after the other, and their puts there.

        The puts' variants are numbered from the first of these.
        """
        numbers = [number for number, start in enumerate(self.starts) if start == key]
        found = range(numbers[0], numbers[-1] + 1)
        puts = []
        for put in self.puts[key]:
            mine = torch.tensor([number in found for number in put.numbers.tolist()])
            if bool(mine.any()):
                puts.append(put.of(mine).renumbered(put.numbers[mine] - found.start))
        return puts, found

    @cached_property
    def later(self) -> dict[Stage, list[Put]]:
        """The puts of each stage in the variants that have started before it."""
        found: dict[Stage, list[Put]] = {}
        for key, puts in self.puts.items():
            for put in puts:
                mine = [key > start for start in map(self.starts.__getitem__, put.numbers.tolist())]
                if any(mine):
                    found.setdefault(key, []).append(put.of(torch.tensor(mine)))
        return found


def _cells(index: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where positions [rows, n] stand among others [rows, m]: rows, places in m, places in n."""
    same = (at[:, :, None] == index[:, None]) & (index >= 0)[:, None]
    row, place, column = same.nonzero(as_tuple=True)
    return row, place, column
