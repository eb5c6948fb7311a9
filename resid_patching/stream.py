"""The running total: how the stream grows from its start to its last state, write by write.

    last state = start + sum of all writes        start = embed + pos_embed
    share      = norm(write) / norm(stream after the write)
    cosine     = cos(start, stream after the write)
    survival   = cos(start, last state)

Every number is per prompt and position. Norms grow with depth, so shares and cosines stand beside
them. Two interventions ask what the addition does; each is named in the report, like any other:

    WriteScale(a)   every write is multiplied by a before it is added
    Overwrite()     every write replaces the state instead of being added to it

Survival falls to about 0 under `Overwrite`, because nothing carries the start on: the cosine that
is left is what the last sublayer happens to write in the start's direction.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from resid_patching.address import MLP, Attn, Stream, hook_name
from resid_patching.decomposition import require_sum
from resid_patching.errors import AblationError
from resid_patching.models import ModelView, exact, float64_home, require, require_finite_at
from resid_patching.prompts import PositionIndex, Positions
from resid_patching.result import (
    Axis,
    Result,
    insert_before_value,
    place_of,
    position_axis,
    provenance,
    standard_error_over_positions,
)
from resid_patching.run import RowReader, Run

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class WriteScale:
    """Every attention and MLP output is multiplied by a factor before it is added.

    Attributes:
        factor: 1 changes nothing, 0 leaves the start alone.
    """

    factor: float | int

    def __post_init__(self) -> None:
        number = isinstance(self.factor, int | float) and not isinstance(self.factor, bool)
        if not number or not math.isfinite(self.factor):
            raise AblationError(f"WriteScale: factor is a finite number, got {self.factor!r}")

    def __str__(self) -> str:
        return f"write scale {self.factor:g} (every write is multiplied by it)"


@dataclass(frozen=True)
class Overwrite:
    """Every attention and MLP output replaces the state instead of being added to it.

    The written value w becomes w - state, so that state + (w - state) = w. In parallel blocks,
    where both sublayers read the same state, attention + MLP together replace it.
    """

    def __str__(self) -> str:
        return "overwrite (every write replaces the state)"


Intervention: TypeAlias = WriteScale | Overwrite


@dataclass(frozen=True, eq=False, repr=False)
class StreamReport(Result):
    """The running total: values [write, batch, pos] are the write shares.

    NaN where a prompt has no such position, and where a norm is zero. In parallel and
    attention-only blocks the stream after a write is the state after the block.

    Attributes:
        how: the intervention in words, or None for the clean run.
        write_norm: norm of what the sublayer wrote [write, batch, pos].
        stream_norm: norm of the state after the write [write, batch, pos].
        cosine: cosine of that state with the start [write, batch, pos].
        start_norm: norm of the start [batch, pos].
        survival: cosine of the last state with the start [batch, pos].
        gap: largest entry of |start + all writes - last state| [batch, pos]; under `Overwrite`
            of |last write - last state|.
        scale: largest entry of the start, the writes and the last state [batch, pos].
        token_texts: the tokens at these positions, row by row.
    """

    kind: ClassVar[str] = "stream_report"

    how: str | None
    write_norm: Float[Tensor, "write batch pos"]
    stream_norm: Float[Tensor, "write batch pos"]
    cosine: Float[Tensor, "write batch pos"]
    start_norm: Float[Tensor, "batch pos"]
    survival: Float[Tensor, "batch pos"]
    gap: Float[Tensor, "batch pos"]
    scale: Float[Tensor, "batch pos"]
    token_texts: tuple[tuple[str, ...], ...]

    @property
    def share(self) -> Float[Tensor, "write batch pos"]:
        """The values: norm of the write / norm of the stream after it."""
        return self.values

    @property
    def writes(self) -> tuple[str, ...]:
        """The rows' addresses, as text."""
        return tuple(map(str, self.axis("write").labels))

    @property
    def exactness(self) -> float:
        """The largest gap over all prompts and positions, in the stream's own unit."""
        return float(self.gap[self._real].max())

    @property
    def relative_exactness(self) -> float:
        """The largest gap relative to the largest entry that was summed at its position."""
        return float((self.gap / self.scale.clamp_min(1e-30))[self._real].max())

    @property
    def _real(self) -> Bool[Tensor, "batch pos"]:
        """The positions that a prompt has; a NaN at any of them is no missing number."""
        n = torch.tensor([len(texts) for texts in self.token_texts], device=self.gap.device)
        return torch.arange(self.gap.shape[1], device=self.gap.device) < n[:, None]

    ordered: ClassVar[bool] = True

    def to_frame(self) -> pandas.DataFrame:
        """Long form: write, layer, prompt, position, token, write_norm, stream_norm, cosine, value.

        The value is the share; one row a cell that exists.
        """
        frame = super().to_frame()
        columns = {"write_norm": self.write_norm, "stream_norm": self.stream_norm}
        insert_before_value(frame, {**columns, "cosine": self.cosine})
        width = self.start_norm.shape[1]
        padded = [[*texts, *[None] * (width - len(texts))] for texts in self.token_texts]
        place = list(frame.columns).index("position") + 1
        frame.insert(place, "token", sum(padded, []) * len(self.writes))
        return frame

    def table(self) -> pandas.DataFrame:
        """Means over all real positions of all prompts, one row a write, in order.

        Returns:
            A data frame: write, layer, n (positions that are averaged), mean_write_norm,
            mean_stream_norm, mean_share, mean_cosine. With several prompts, each mean is followed
            by its standard error over prompts: se_write_norm and so on.
        """
        import pandas

        frame = pandas.DataFrame({"write": self.writes})
        frame["layer"] = pandas.array([place_of(write)[0] for write in self.writes], dtype="Int64")
        frame["n"] = int((~self.start_norm.isnan()).sum())
        columns = {
            "write_norm": self.write_norm,
            "stream_norm": self.stream_norm,
            "share": self.share,
            "cosine": self.cosine,
        }
        for name, values in columns.items():
            frame[f"mean_{name}"] = values.detach().cpu().double().nanmean((1, 2)).numpy()
            if self.has_error:
                frame[f"se_{name}"] = standard_error_over_positions(values).numpy()
        return frame

    def survivals(self) -> pandas.DataFrame:
        """Cosine of the last state with the start: prompt, position, token, survival."""
        import pandas

        labels = self.axis("pos").labels
        rows = [
            (n, labels[p], text, float(self.survival[n, p]))
            for n, texts in enumerate(self.token_texts)
            for p, text in enumerate(texts)
        ]
        return pandas.DataFrame(rows, columns=["prompt", "position", "token", "survival"])

    @property
    def averaged(self) -> str:
        """What the rows of the table are means over."""
        n = int((~self.start_norm.isnan()).sum())
        return f"mean over {n} positions" if n > 1 else "one position"

    @property
    def caption(self) -> str:
        """The intervention, and what the rows are means over."""
        error = "; se: standard error over prompts" if self.has_error else ""
        return f"running total, {self.how or 'clean'}; {self.averaged}{error}"

    def headings(self) -> dict[str, str]:
        """Write, norms, share and cosine, then their standard errors."""
        columns = {
            "write": "write",
            "mean_write_norm": "norm",
            "mean_stream_norm": "stream after",
            "mean_share": "share",
            "mean_cosine": "cosine with start",
        }
        if self.has_error:
            columns |= {"se_write_norm": "se norm", "se_stream_norm": "se stream"}
            columns |= {"se_share": "se share", "se_cosine": "se cosine"}
        return columns

    def facts(self) -> tuple[tuple[str, str], ...]:
        """The intervention, the start's norm, mean survival, and how exact the sum is."""
        overwrites = self.how == str(Overwrite())
        start = float(self.start_norm.cpu().double().nanmean())
        survival = float(self.survival.cpu().double().nanmean())
        gap = f"{self.exactness:.1e}, {self.relative_exactness:.1e} of the largest entry summed"
        return (
            ("intervention", self.how or self.provenance.intervention or "none: the clean run"),
            ("norm of the start", f"{start:.3f}"),
            ("mean survival, cos(start, last state)", f"{survival:+.4f}"),
            (f"largest |{'last write' if overwrites else 'start + all writes'} - last state|", gap),
            *super().facts(),
        )

    def caveats(self) -> tuple[str, ...]:
        """What a share and a cosine are not."""
        return (
            "A large share is not a large effect: norms say how much was written, not what for.",
        )

    def pictures(self) -> tuple[str, ...]:
        """Norms, shares and cosine by depth."""
        return ("stream",)


def stream_report(
    run: Run, how: Intervention | None = None, *, positions: Positions = None
) -> StreamReport:
    """Reports the running total of a run, clean or under an intervention on every write.

    With an intervention the model is run again, hooks of the caller included, and nothing is
    left on it. Exact: the numbers are the model's own states.

    Args:
        run: a run, from `capture`.
        how: `WriteScale(a)`, `Overwrite()`, or None for the clean run.
        positions: positions reported: None for all, one for all prompts, or one for each. The
            intervention itself acts at all positions.

    Returns:
        A `StreamReport` [write, batch, pos].

    Raises:
        StreamMismatchError: the model's sublayer outputs are not what it adds to the stream, or
            the run sets the stream itself.
        NotFiniteError: the stream is NaN or infinite at a position that is reported.
        PositionError: a prompt has no such position.
        AblationError: `how` is no intervention.
    """
    if how is not None and not isinstance(how, WriteScale | Overwrite):
        raise AblationError(
            f"how is rp.WriteScale(a), rp.Overwrite() or None for the clean run; got {how!r}"
        )
    require(run.view, "stream")
    require_sum(run)
    where = run.locate(positions)
    totals = _Totals(run.view, how, where)
    with exact():
        if how is None:
            run.sweep(totals.readers())
        else:
            _run_changed(run, totals)
    totals.finish()
    plan = "running total" if how is None else f"running total, {how}"
    share = totals.write_norm / totals.stream_norm
    share[totals.stream_norm == 0] = torch.nan
    tokens = zip(run.prompts.token_texts, where.index.tolist(), strict=True)
    return StreamReport(
        values=share,
        axes=(
            Axis("write", tuple(map(str, totals.place))),
            Axis("batch", tuple(range(len(run)))),
            position_axis(positions, where.index.shape[1]),
        ),
        unit="share of the stream's norm",
        provenance=provenance(run, plan),
        how=None if how is None else str(how),
        write_norm=totals.write_norm,
        stream_norm=totals.stream_norm,
        cosine=totals.cosine,
        start_norm=totals.start_norm,
        survival=totals.cosine[-1].clone(),
        gap=totals.gap,
        scale=totals.scale,
        token_texts=tuple(tuple(texts[i] for i in index if i >= 0) for texts, index in tokens),
    )


def writes_of(view: ModelView) -> list[Attn | MLP]:
    """The sublayers that write to the stream after its start, in order."""
    sublayers = (Attn,) if view.attn_only else (Attn, MLP)
    return [sublayer(layer) for layer in range(view.n_layers) for sublayer in sublayers]


def _run_changed(run: Run, totals: _Totals) -> None:
    for rows in run.chunks():
        width = max(run.prompts.lengths[rows])
        readers = totals.readers().items()
        bound = {name: functools.partial(reader, rows=rows) for name, reader in readers}
        run.view.forward(run.prompts.tokens[rows, :width], run.hooked(bound, rows))


class _Totals:
    """Collects norms and cosines as the stream passes, and changes the writes where asked.

    A reader of a write gives what is written in its place, which only a changed run attaches.
    """

    def __init__(self, view: ModelView, how: Intervention | None, where: PositionIndex) -> None:
        self.view, self.how, self.where = view, how, where
        self.place = {write: number for number, write in enumerate(writes_of(view))}
        self.joined = view.parallel or view.attn_only
        shape = where.index.shape
        new = {"dtype": view.compute_dtype, "device": view.device}
        self.write_norm = torch.full((len(self.place), *shape), torch.nan, **new)
        self.stream_norm = self.write_norm.clone()
        self.cosine = self.write_norm.clone()
        self.start_norm = torch.full(shape, torch.nan, **new)
        self.gap = self.start_norm.clone()
        self.scale = self.start_norm.clone()
        # A wider sum than the model's own, so that the gap is the model's rounding and not ours.
        self.home = float64_home(view.device)
        # Of the rows that are passing: the state before the write, and sums at the positions.
        self.state = torch.empty(0)
        self.start = torch.empty(0)
        self.total = torch.empty(0)

    def readers(self) -> dict[str, Any]:
        """The readers by hook, in the order in which the hooks fire."""
        found: dict[str, Any] = {}
        for layer in range(self.view.n_layers):
            found[hook_name(Stream(layer, "pre"))] = self._reader_of_pre(layer)
            found[hook_name(Attn(layer))] = self._reader_of_write(Attn(layer))
            if not self.joined:
                found[hook_name(Stream(layer, "mid"))] = self._reader_of_state(Attn(layer))
            if not self.view.attn_only:
                found[hook_name(MLP(layer))] = self._reader_of_write(MLP(layer))
            found[hook_name(Stream(layer, "post"))] = self._reader_of_post(layer)
        return found

    def _reader_of_pre(self, layer: int) -> RowReader:
        def read(activation: Tensor, rows: slice) -> None:
            self.state = activation
            if layer == 0:
                self.start = self._take(activation, rows)
                self.total = self.start.to(self.home, torch.float64)
                self.start_norm[rows] = self.start.norm(dim=-1)
                self.scale[rows] = _largest_entry(self.start)

        return read

    def _reader_of_write(self, write: Attn | MLP) -> Callable[[Tensor, slice], Tensor | None]:
        def read(activation: Tensor, rows: slice) -> Tensor | None:
            changed = self._changed(activation, write)
            replaces = isinstance(self.how, Overwrite)
            shown = activation if replaces else changed
            written = self._take(shown, rows)
            self.write_norm[self.place[write], rows] = written.norm(dim=-1)
            self.scale[rows] = torch.maximum(self.scale[rows], _largest_entry(written))
            emptied = replaces and self._empties(write)
            self.total = written.to(self.home, torch.float64) + (0 if emptied else self.total)
            return None if self.how is None else changed

        return read

    def _changed(self, activation: Tensor, write: Attn | MLP) -> Tensor:
        """What is added to the stream in the place of a sublayer's output [rows, pos, d_model]."""
        match self.how:
            case None:
                return activation
            case WriteScale(factor):
                return activation * factor
            case Overwrite():
                return activation - self.state if self._empties(write) else activation

    def _empties(self, write: Attn | MLP) -> bool:
        """Whether this write takes the state away: of a parallel block's two, only the first."""
        return isinstance(write, Attn) or not self.joined

    def _reader_of_state(self, *writes: Attn | MLP) -> RowReader:
        def read(activation: Tensor, rows: slice) -> None:
            self.state = activation
            after = self._take(activation, rows)
            for write in writes:
                self.stream_norm[self.place[write], rows] = after.norm(dim=-1)
                self.cosine[self.place[write], rows] = _cosine(self.start, after)

        return read

    def _reader_of_post(self, layer: int) -> RowReader:
        writes: list[Attn | MLP] = [Attn(layer)] if self.joined else []
        writes += [] if self.view.attn_only else [MLP(layer)]
        read_state = self._reader_of_state(*writes)

        def read(activation: Tensor, rows: slice) -> None:
            read_state(activation, rows)
            if layer == self.view.n_layers - 1:
                last = self._take(activation, rows)
                self.gap[rows] = _largest_entry(self.total - last.to(self.total)).to(self.gap)
                self.scale[rows] = torch.maximum(self.scale[rows], _largest_entry(last))

        return read

    def _take(self, activation: Tensor, rows: slice) -> Tensor:
        taken = self.where.take(activation, rows)
        return taken.to(self.view.device, self.view.compute_dtype)

    def finish(self) -> None:
        """Puts NaN where a prompt has no position.

        Raises:
            NotFiniteError: the stream is not finite at a position that is there.
        """
        what = "the stream" if self.how is None else f"the stream under {self.how}"
        seen = torch.stack([self.start_norm, self.gap, self.scale, self.stream_norm.amax(0)], -1)
        require_finite_at(seen, self.where.valid, self.view.dtype, what)
        absent = ~self.where.valid.to(self.gap.device)
        for tensor in (self.write_norm, self.stream_norm, self.cosine):
            tensor[:, absent] = torch.nan
        for tensor in (self.start_norm, self.gap, self.scale):
            tensor[absent] = torch.nan


def _largest_entry(vectors: Tensor) -> Tensor:
    return vectors.abs().amax(-1)


def _cosine(left: Tensor, right: Tensor) -> Tensor:
    """Cosine along the last axis; NaN where a vector is zero."""
    unit_left = left / left.norm(dim=-1, keepdim=True)
    unit_right = right / right.norm(dim=-1, keepdim=True)
    return (unit_left * unit_right).sum(-1).clamp(-1, 1)


__all__ = [
    "Intervention",
    "Overwrite",
    "StreamReport",
    "WriteScale",
    "stream_report",
    "writes_of",
]
