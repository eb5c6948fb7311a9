"""From last states to the metric: only the rows and columns that it reads are unembedded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Int
from torch import Tensor

from resid_patching.models import ModelView, take
from resid_patching.prompts import PositionIndex
from resid_patching.rerun.clean import take_rows

Evaluate = Callable[[Tensor, slice, Tensor | None], Tensor]


@dataclass(frozen=True, eq=False)
class Reading:
    """What a metric reads of the logits, and what it makes of them.

    Attributes:
        positions: rows of the logits [batch, n], -1 where a prompt has none.
        columns: token ids [batch, k], or None for the whole vocabulary.
        evaluate: (logits [variant, rows, n, k], which rows, clean logits [rows, n, k] or None) ->
            values [variant, rows].
        needs_clean: whether `evaluate` is handed the clean run's logits.
        tokens: ids that are scored among a whole vocabulary [batch, k], to tell sweeps apart.
    """

    positions: PositionIndex
    columns: Int[Tensor, "batch k"] | None
    evaluate: Evaluate
    needs_clean: bool = False
    tokens: Int[Tensor, "batch k"] | None = None


class Scores:
    """The metric of some prompts.

    Args:
        view: the model.
        reading: what the metric reads.
        rows: which prompts of the batch.
        clean_rows: clean last states at the rows that are read [rows, n, d_model].
        max_bytes: bound on the logits that exist at a time.
    """

    def __init__(
        self, view: ModelView, reading: Reading, rows: slice, clean_rows: Tensor, max_bytes: int
    ) -> None:
        self.view, self.reading, self.rows = view, reading, rows
        self.clean_rows, self.max_bytes = clean_rows, max_bytes
        self._everything = slice(0, rows.stop - rows.start)
        self._clean_logits: Tensor | None = None

    def of_states(self, states: Tensor, scale: Tensor | None = None) -> Tensor:
        """Last states [variant, rows, n, d_model] -> the metric [variant, rows].

        Args:
            states: the states.
            scale: a divisor for the final norm [rows, n] instead of the states' own.
        """
        found = []
        for piece in self._pieces(states.shape):
            variants, prompts = piece
            divisor = None if scale is None else scale[prompts]
            logits = self._logits(states[variants, prompts], prompts, divisor)
            clean = self._clean_part(prompts) if self.reading.needs_clean else None
            found.append((piece, self.reading.evaluate(logits, self._absolute(prompts), clean)))
        return _assembled(found, states.shape[:2])

    def of_logits(self, logits: Tensor, clean: Tensor, read_at: Tensor) -> Tensor:
        """The model's own logits [variant, rows, pos, d_vocab] -> the metric [variant, rows].

        Args:
            logits: the logits.
            clean: the model's own in the clean run [rows, pos, d_vocab].
            read_at: positions that are read [rows, n].
        """
        taken = take_rows(logits, read_at).to(self.view.compute_dtype)
        columns = self._columns(self._everything)
        if columns is not None:
            index = columns[None, :, None].expand(*taken.shape[:3], -1)
            taken = taken.gather(-1, index)
        if not self.reading.needs_clean:
            return self.reading.evaluate(taken, self.rows, None)
        beside = take(clean, read_at).to(self.view.compute_dtype)
        return self.reading.evaluate(taken, self.rows, beside)

    def error_of_readout(self, own: Tensor) -> float:
        """How far our clean logits are from the model's own, relative to their size.

        Args:
            own: the model's own logits at the positions that are read [rows, n, d_vocab].
        """
        valid = self.reading.positions.valid[self.rows].to(own.device)
        apart, size = own.new_zeros(()), own.new_tensor(1e-30)
        for _, prompts in self._pieces(torch.Size((1, *self.clean_rows.shape))):
            theirs = own[prompts].to(self.view.compute_dtype)
            columns = self._columns(prompts)
            if columns is not None:
                index = columns[:, None].expand(-1, theirs.shape[1], -1)
                theirs = theirs.gather(-1, index)
            ours = self._logits(self.clean_rows[None, prompts], prompts)[0]
            real = valid[prompts]
            apart = torch.maximum(apart, (ours - theirs)[real].abs().amax())
            size = torch.maximum(size, own[prompts][real].abs().amax())
        return float(apart / size)

    def _pieces(self, shape: torch.Size) -> Iterator[tuple[slice, slice]]:
        """Parts of (variants, rows) whose logits fit in memory."""
        n_variants, n_prompts, n, _ = shape
        columns = self.reading.columns
        width = self.view.W_U.shape[1] if columns is None else columns.shape[1]
        cells = max(1, self.max_bytes // (8 * n * width * self.view.compute_dtype.itemsize))
        prompts = min(n_prompts, cells)
        variants = max(1, cells // n_prompts)
        for v in range(0, n_variants, variants):
            for p in range(0, n_prompts, prompts):
                yield slice(v, v + variants), slice(p, min(p + prompts, n_prompts))

    def _absolute(self, prompts: slice) -> slice:
        return slice(self.rows.start + prompts.start, self.rows.start + prompts.stop)

    def _columns(self, prompts: slice) -> Tensor | None:
        columns = self.reading.columns
        return None if columns is None else columns[self._absolute(prompts)].to(self.view.device)

    def _logits(self, states: Tensor, prompts: slice, scale: Tensor | None = None) -> Tensor:
        view = self.view
        columns = self._columns(prompts)
        if columns is None:
            logits = view.readout(states, scale)
        else:
            chosen, bias = self._unembedding
            normed = view.final_norm(states.to(view.compute_dtype), scale)
            logits = torch.einsum("vbnm,bkm->vbnk", normed, chosen[prompts])
            logits = logits + bias[prompts][None, :, None]
        return logits if view.softcap is None else view.softcap * torch.tanh(logits / view.softcap)

    @cached_property
    def _unembedding(self) -> tuple[Tensor, Tensor]:
        """The columns that the metric reads [rows, k, d_model], and their biases [rows, k]."""
        columns = self._columns(self._everything)
        assert columns is not None
        chosen = self.view.unembed_columns(columns.flatten()).unflatten(0, columns.shape)
        return chosen, self.view.unembed_bias(columns.flatten()).unflatten(0, columns.shape)

    def _clean_part(self, prompts: slice) -> Tensor:
        if self._clean_logits is None:
            cells = self.clean_rows.shape[0] * self.clean_rows.shape[1] * self.view.W_U.shape[1]
            if cells * self.view.compute_dtype.itemsize > self.max_bytes // 4:
                return self._logits(self.clean_rows[None, prompts], prompts)[0]
            self._clean_logits = self._logits(self.clean_rows[None], self._everything)[0]
        return self._clean_logits[prompts]


def _assembled(found: list[tuple[tuple[slice, slice], Tensor]], shape: torch.Size) -> Tensor:
    first = found[0][1]
    whole = first.new_empty(shape)
    for (variants, prompts), values in found:
        whole[variants, prompts] = values
    return whole
