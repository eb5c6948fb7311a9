"""Changed rows on their way through our own blocks, with values written on the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from resid_patching.address import MLP, HeadInput, Stream
from resid_patching.models import ModelView
from resid_patching.rerun.clean import Clean
from resid_patching.rerun.deltas import Deltas
from resid_patching.rerun.plain import InputWriter, PlainBlocks
from resid_patching.rerun.written import Site, Written

Place = Literal["pre", "mid", "post"]
_PLACES: tuple[Place, ...] = get_args(Place)


class Walk:
    """Stacks of states from some stage to the end of the model.

    Args:
        view: the model.
        plain: its blocks.
        clean: the clean run, whose keys and values the changed rows see.
        deltas: where these keys and values are kept.
        first: first changed position of each prompt [rows].
        read_at: positions at which the last state is wanted [rows, n]; -1 where there is none.
        written: values written behind the start, or None.
    """

    def __init__(
        self,
        view: ModelView,
        plain: PlainBlocks,
        clean: Clean,
        deltas: Deltas,
        first: Tensor,
        read_at: Tensor,
        written: Written | None = None,
    ) -> None:
        self.view, self.plain, self.clean, self.deltas = view, plain, clean, deltas
        self.written = written
        lengths = clean.lengths.to(first.device)
        n_rows = max(1, int((lengths - first).max()))
        self.whole = not bool(first.any()) or n_rows == clean.width
        if self.whole:
            self.first = torch.zeros_like(first)
            self.keys = clean.positions.to(first.device)
        else:
            self.first = first
            keys = first[:, None] + torch.arange(n_rows, device=first.device)
            self.keys = torch.where(keys < lengths[:, None], keys, -1)
        self.read_at = read_at
        self.chosen = (read_at - self.first[:, None]).clamp(0, self.keys.shape[1] - 1)

    def run(self, arrivals: Mapping[tuple[int, Place], Tensor]) -> Tensor:
        """States at some stages -> last states at the rows that are read.

        Variants that start behind different stages join the stack where they start.

        Args:
            arrivals: (layer, place) -> states [variant, rows, keys, d_model], one for each of
                `keys`: the state of the layer behind all that was changed there.

        Returns:
            [variant, rows, n, d_model], variants in the order of their stages.
        """
        states: Tensor | None = None
        for number in range(min(layer for layer, _ in arrivals), self.view.n_layers):
            shortened = self._is_shortened(number)
            new: dict[str, Tensor | None] = {p: arrivals.get((number, p)) for p in _PLACES}
            for place in ("mid", "post"):
                if shortened and (here := new[place]) is not None:
                    new[place] = take_rows(here, self.chosen)
            states = self._block(number, _joined(states, new["pre"]), shortened, new["mid"])
            states = _joined(states, new["post"])
            assert states is not None
            self._set(states, Stream(number, "post"))
            if number == self.view.n_layers - 1 and not shortened:
                states = take_rows(states, self.chosen)
        assert states is not None
        return states

    def _is_shortened(self, layer: int) -> bool:
        """Whether only the rows that are read are needed behind a layer's keys and values."""
        writes_here = self.written is not None and self.written.acts_in(layer)
        return layer == self.view.n_layers - 1 and not writes_here

    def _block(
        self, layer: int, states: Tensor | None, shortened: bool, mid: Tensor | None
    ) -> Tensor | None:
        """States before a block, and those that join in its middle -> states behind it."""
        after = None
        if states is not None:
            plain = self.plain
            self._set(states, Stream(layer, "pre"))
            if shortened:
                z, states = self._attend_read(layer, states), take_rows(states, self.chosen)
            else:
                z = self._attend(layer, states)
            is_written = self.written is not None and self.written.acts_in(layer)
            if mid is None and not is_written:
                return plain.add_writes(layer, states, z)
            after = states + plain.attention_write(layer, z)
        after = _joined(after, mid)
        if after is None:
            return None
        self._set(after, Stream(layer, "mid"))
        if self.view.attn_only:
            return after
        before = states if self.view.parallel else after
        assert before is not None
        return after + self._mlp_write(layer, before)

    def _attend(self, layer: int, states: Tensor) -> Tensor:
        """Z of all changed rows; they see the clean keys and values before them."""
        plain, keys = self.plain, self.keys.clamp_min(0)
        q, k, v = plain.project(layer, states, keys, self._written_inputs(layer))
        if self.whole:
            return plain.attend_causal(q, k, v)
        clean = self.deltas.keys_and_values(layer)
        if self.keys.shape[1] * 4 > self.clean.width:
            return plain.attend_behind(q, k, v, self.keys, clean)
        # A row that is not there may look at position 0; what it gets is never read.
        return plain.attend_rows(q, k, v, keys, self.keys, clean, self.first)

    def _attend_read(self, layer: int, states: Tensor) -> Tensor:
        """Z of the rows that are read alone."""
        plain, keys, queries = self.plain, self.keys.clamp_min(0), self.read_at.clamp_min(0)
        clean = None if self.whole else self.deltas.keys_and_values(layer)
        if plain.rotary is None and 2 * queries.shape[1] <= keys.shape[1]:
            normed = plain.normed(layer, states)
            own = take_rows(normed, self.chosen)
            return plain.attend_unprojected(
                layer, own, normed, queries, self.keys, clean, self.first
            )
        q, k, v = plain.project(layer, states, keys)
        q = take_rows(q, self.chosen)
        return plain.attend_rows(q, k, v, queries, self.keys, clean, self.first)

    def _written_inputs(self, layer: int) -> InputWriter | None:
        written = self.written
        if written is None or not written.acts_in(layer):
            return None
        sites = [s for s in written.values if isinstance(s, HeadInput) and s.layer == layer]

        def write(which: str, part: Tensor) -> None:
            for site in sites:
                if site.which == which:
                    self._put(part[:, :, :, site.head], site)

        return write

    def _mlp_write(self, layer: int, states: Tensor) -> Tensor:
        write = self.plain.mlp_write(layer, states)
        self._set(write, MLP(layer))
        return write

    def _set(self, tensor: Tensor, site: Site) -> None:
        if self.written is not None and site in self.written.values:
            self._put(tensor, site)

    def _put(self, tensor: Tensor, site: Site) -> None:
        """Writes a site's values into [variant, rows, keys, ...], in place."""
        assert self.written is not None
        row, column = self.written.valid.nonzero(as_tuple=True)
        place = self.written.index[row, column] - self.first[row]
        inside = place >= 0  # what is written before the first changed row is the clean value
        row, column, place = row[inside], column[inside], place[inside]
        tensor[:, row, place] = self.written.values[site][:, row, column].to(tensor.dtype)


def _joined(states: Tensor | None, others: Tensor | None) -> Tensor | None:
    if states is None or others is None:
        return states if others is None else others
    return torch.cat([states, others])


def take_rows(states: Tensor, index: Tensor) -> Tensor:
    """[variant, rows, pos, *] at [rows, n] -> [variant, rows, n, *]; -1 is read as 0."""
    index = index.to(states.device).clamp_min(0)
    row = torch.arange(index.shape[0], device=index.device)[:, None]
    return states[:, row, index]
