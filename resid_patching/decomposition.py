"""Decomposition of the stream into what each part of the model wrote.

    resid_post[last] = embed + pos_embed + sum of all writes        (exact, to rounding)

The writes are at three grains:

    component   embed, pos_embed, each attention layer, each MLP
    head        each head and each layer's output bias instead of the attention layer
    neuron      each neuron and each layer's output bias instead of the MLP

Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", on the residual
stream as the sum of all layers' outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from resid_patching.address import (
    MLP,
    Attn,
    AttnBias,
    Embed,
    Head,
    MLPBias,
    Neuron,
    PosEmbed,
    Sender,
    Stream,
    hook_name,
)
from resid_patching.errors import GapError, StreamMismatchError
from resid_patching.models import TOLERANCE, ModelView, exact, require, require_finite_at
from resid_patching.prompts import Positions
from resid_patching.run import RowReader, Run

By = Literal["component", "head", "neuron"]


def writers_of(view: ModelView, by: By) -> list[Sender]:
    """The writers of a model at a grain, in the order they write."""
    found: list[Sender] = [Embed()]
    if view.has_pos_embed:
        found.append(PosEmbed())
    for layer in range(view.n_layers):
        if by == "head":
            found += [Head(layer, head) for head in range(view.n_heads)]
            found.append(AttnBias(layer))
        else:
            found.append(Attn(layer))
        if view.attn_only:
            continue
        if by == "neuron":
            found += [Neuron(layer, index) for index in range(view.n_neurons(layer))]
            found.append(MLPBias(layer))
        else:
            found.append(MLP(layer))
    return found


@dataclass(frozen=True, eq=False)
class Parts:
    """The writes to the stream at one grain, read when asked for.

    Attributes:
        run: the run they are read from.
        by: the grain.
        writers: the parts, in the order they write.
    """

    run: Run
    by: By
    writers: tuple[Sender, ...]

    def __repr__(self) -> str:
        return f"Parts({len(self.writers)} by {self.by}, {self.run!r})"

    def vectors(self, positions: Positions = -1) -> Float[Tensor, "part batch n d_model"]:
        """The writes themselves, after checking that they sum to the stream.

        Args:
            positions: one for all rows, one for each row, or None for all.

        Returns:
            [part, batch, n, d_model] in float32 or float64; NaN where a row has no position.

        Raises:
            GapError: the parts do not sum to the last stream state.
            NotFiniteError: that state is NaN or infinite.
            PositionError: a row has no such position.
        """
        view = self.run.view
        everything = torch.eye(view.d_model, dtype=view.compute_dtype, device=view.device)
        values, states = self.sweep(
            everything, torch.zeros(len(self.run), dtype=torch.long), positions, vectors=True
        )
        _require_sum(view, values, states)
        return values

    def sweep(
        self,
        directions: Float[Tensor, "unique d_model"],
        which: Int[Tensor, " batch"],
        positions: Positions,
        *,
        vectors: bool = False,
        logits: RowReader | None = None,
        raw_logits: RowReader | None = None,
    ) -> tuple[Tensor, Float[Tensor, "batch n d_model"]]:
        """Projects every part onto each row's direction, in one pass and as activations appear.

        Args:
            directions: the different directions.
            which: the direction of each row of the batch.
            positions: one for all rows, one for each row, or None for all.
            vectors: keep whole writes instead (`directions` is then the identity).
            logits: called with the model's logits at these positions, see `Run.sweep`.
            raw_logits: the same before any output softcap.

        Returns:
            Values [part, batch, n] (or [part, batch, n, d_model]) and the last stream state at
            the same positions; NaN where a row has no position.
        """
        with exact():  # weights require gradients; results hold no graph
            projector = _Projector(self, directions, which, positions, vectors)
            self.run.sweep(
                projector.readers(),
                logits=logits,
                raw_logits=raw_logits,
                at=projector.positions,
            )
            return projector.finish()


def decompose(run: Run, *, by: By) -> Parts:
    """Splits the stream of a run into what each part of the model wrote.

    Args:
        run: a run, from `capture`.
        by: `component`, `head` or `neuron`. Where an ablated run replaces a whole layer, its heads
            or neurons write nothing, and what stands in the layer's place is in its bias's row.

    Raises:
        HeadMismatchError, NeuronMismatchError: this model's heads or neurons do not sum to their
            layer's write, as with a norm after the sublayer.
        StreamMismatchError: the run sets the stream itself.
        ValueError: `by` is none of the three.
    """
    if by not in get_args(By):
        raise ValueError(f"by is component, head or neuron; got {by!r}")
    require(run.view, "stream")
    require_sum(run)
    if by == "head":
        require(run.view, "heads")
    if by == "neuron":
        require(run.view, "neurons")
    return Parts(run, by, tuple(writers_of(run.view, by)))


def require_sum(run: Run) -> None:
    """Raises StreamMismatchError where a run sets the stream, which is then no sum of writes."""
    if run.intervention is None:
        return
    if states := [str(site) for site in run.intervention.sites if isinstance(site, Stream)]:
        raise StreamMismatchError(
            f"this run sets {states[0]}, so its stream is no sum of what the model's parts wrote. "
            "Lenses, logits and ablation read it; for a sum, replace the parts instead."
        )


class _Projector:
    """Collects the parts' projections of one sweep."""

    def __init__(
        self,
        parts: Parts,
        directions: Tensor,
        which: Tensor,
        positions: Positions,
        vectors: bool,
    ) -> None:
        self.view, self.intervention = parts.run.view, parts.run.intervention
        self.writers = parts.writers
        self.place = {writer: number for number, writer in enumerate(parts.writers)}
        self.device, self.dtype = self.view.device, self.view.compute_dtype
        self.directions = directions.to(self.device, self.dtype)
        self.which = which.to(self.device)
        self.own = self.directions[self.which]
        self.positions = parts.run.locate(positions)
        self.vectors = vectors
        shape = self.positions.index.shape
        new = {"dtype": self.dtype, "device": self.device}
        tail = (self.view.d_model,) if vectors else ()
        self.values = torch.full((len(parts.writers), *shape, *tail), torch.nan, **new)
        self.states = torch.full((*shape, self.view.d_model), torch.nan, **new)

    def readers(self) -> dict[str, RowReader]:
        """One reader for each hook that holds parts."""
        view = self.view
        last = hook_name(Stream(view.n_layers - 1, "post"))
        found: dict[str, RowReader] = {}
        if view.has_pos_embed:  # first, because what the embedding wrote is found by subtraction
            found[hook_name(PosEmbed())] = self._read_pos_embed
        found[hook_name(Stream(0, "pre"))] = self._read_embed
        found[last] = self._read_state
        for layer in range(view.n_layers):
            found |= dict(self._layer_readers(layer))
        return found

    def _layer_readers(self, layer: int) -> Iterator[tuple[str, RowReader]]:
        if Head(layer, 0) in self.place:
            yield hook_name(Head(layer, 0)), self._split(layer, Head, self.view.W_O)
            self._write_bias(AttnBias(layer), self.view.b_O(layer))
            yield from self._replaced(Attn(layer), Head(layer, 0), AttnBias(layer))
        else:
            yield hook_name(Attn(layer)), self._whole(Attn(layer))
        if Neuron(layer, 0) in self.place:
            yield hook_name(Neuron(layer, 0)), self._split(layer, Neuron, self.view.W_out)
            self._write_bias(MLPBias(layer), self.view.b_out(layer))
            yield from self._replaced(MLP(layer), Neuron(layer, 0), MLPBias(layer))
        elif MLP(layer) in self.place:
            yield hook_name(MLP(layer)), self._whole(MLP(layer))

    def _take(self, activation: Tensor, rows: slice) -> Tensor:
        taken = self.positions.take(activation, rows)
        return taken.to(self.device, self.dtype)

    def _project(self, written: Tensor, rows: slice) -> Tensor:
        """[rows, n, d_model] -> [rows, n], or the whole writes."""
        if self.vectors:
            return written
        return torch.einsum("bnm,bm->bn", written, self.own[rows])

    def _read_state(self, activation: Tensor, rows: slice) -> None:
        self.states[rows] = self._take(activation, rows)

    def _read_embed(self, activation: Tensor, rows: slice) -> None:
        """The stream's start, less the position embedding where one was added."""
        start = self._project(self._take(activation, rows), rows)
        place = self.place[Embed()]
        if PosEmbed() in self.place:
            start = start - self.values[self.place[PosEmbed()], rows]
        self.values[place, rows] = start

    def _read_pos_embed(self, activation: Tensor, rows: slice) -> None:
        written = self._project(self._take(activation, rows), rows)
        self.values[self.place[PosEmbed()], rows] = written

    def _whole(self, writer: Sender) -> RowReader:
        return functools.partial(self._read_whole, self.place[writer])

    def _read_whole(self, place: int, activation: Tensor, rows: slice) -> None:
        self.values[place, rows] = self._project(self._take(activation, rows), rows)

    def _split(
        self,
        layer: int,
        part: type[Head] | type[Neuron],
        weight: Callable[[int], Tensor],
    ) -> RowReader:
        return functools.partial(self._read_split, layer, part, weight)

    def _read_split(
        self,
        layer: int,
        part: type[Head] | type[Neuron],
        weight: Callable[[int], Tensor],
        activation: Tensor,
        rows: slice,
    ) -> None:
        """Heads or neurons: the weight is folded onto the directions, never onto activations."""
        W = weight(layer).to(self.device, self.dtype)
        taken = self._take(activation, rows)
        if self.vectors:
            pattern = "bnhd,hdm->hbnm" if part is Head else "bnh,hm->hbnm"
            found = torch.einsum(pattern, taken, W)
        else:
            folded = (W @ self.directions.T).movedim(-1, 0)[self.which[rows]]
            pattern = "bnhd,bhd->hbn" if part is Head else "bnh,bh->hbn"
            found = torch.einsum(pattern, taken, folded)
        first = self.place[part(layer, 0)]
        self.values[first : first + len(found), rows] = found

    def _write_bias(self, writer: Sender, bias: Tensor) -> None:
        bias = bias.to(self.device, self.dtype)
        if self.vectors:
            self.values[self.place[writer]] = bias
        else:
            self.values[self.place[writer]] = (self.directions @ bias)[self.which][:, None]

    def _replaced(
        self, whole: Attn | MLP, first: Head | Neuron, bias: AttnBias | MLPBias
    ) -> Iterator[tuple[str, RowReader]]:
        """A reader of a layer whose whole write the run replaces somewhere."""
        if self.intervention is None:
            return
        held = self.intervention.holds(whole, self.positions).to(self.device)
        if bool(held.any()):
            parts = slice(self.place[first], self.place[bias])
            yield (
                hook_name(whole),
                functools.partial(self._read_replaced, parts, self.place[bias], held),
            )

    def _read_replaced(
        self, parts: slice, bias: int, held: Tensor, activation: Tensor, rows: slice
    ) -> None:
        """There the parts write nothing, and what was put in their place is the bias's row."""
        written = self._project(self._take(activation, rows), rows)
        held = held[rows, :, None] if self.vectors else held[rows]
        self.values[parts, rows] = self.values[parts, rows].masked_fill(held, 0)
        self.values[bias, rows] = torch.where(held, written, self.values[bias, rows])

    def finish(self) -> tuple[Tensor, Tensor]:
        """The values and states, NaN where a row has no position.

        Raises:
            NotFiniteError: the last state is not finite at a position that is there.
        """
        what = "the model's own last state"
        require_finite_at(self.states, self.positions.valid, self.view.dtype, what)
        absent = ~self.positions.valid.to(self.values.device)
        self.values[:, absent] = torch.nan
        self.states[absent] = torch.nan
        return self.values, self.states


def _require_sum(view: ModelView, values: Tensor, states: Tensor) -> None:
    real = states.isfinite()  # where a prompt has the position
    gap = (values.sum(0) - states)[real].abs().amax()
    scale = torch.maximum(values[:, real].abs().amax(), states[real].abs().amax())
    if not gap <= TOLERANCE[view.dtype] * scale:
        raise GapError(
            f"the parts of {view.name} differ from its last stream state by {float(gap):.1e} "
            f"where the largest entry is {float(scale):.1e}; something else writes to the stream"
        )
