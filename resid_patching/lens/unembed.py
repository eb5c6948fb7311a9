"""The final norm and unembedding applied to any state, in row blocks that fit a small buffer.

    logits(x) = softcap(N(x) W_U + b_U)        the statistics of N from x itself

The weights are read from the model and never copied whole: where they are in low precision, the
products are made in float32 a block of the vocabulary at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from resid_patching.models import ModelView, Norm

CELLS = 2**24
"""Logits held at a time, in numbers; a block of rows is as large as this allows."""

_VOCABULARY_BLOCK = 8192


@dataclass(frozen=True, eq=False)
class Unembedding:
    """A model's readout, with nothing in it that needs a gradient.

    Attributes:
        norm: the final norm, in our precision.
        W_U: the unembedding, in the model's own dtype.
        b_U: its bias, in our precision.
        softcap: the output softcap, or None.
    """

    norm: Norm
    W_U: Float[Tensor, "d_model d_vocab"]
    b_U: Float[Tensor, " d_vocab"]
    softcap: float | None

    @classmethod
    def of(cls, view: ModelView) -> Unembedding:
        """The readout of a model as it is now."""
        b_U = view.b_U.detach().to(view.compute_dtype)
        return cls(view.final_norm, view.W_U.detach(), b_U, view.softcap)

    @property
    def dtype(self) -> torch.dtype:
        """The precision that everything is computed in."""
        return self.b_U.dtype

    @property
    def device(self) -> torch.device:
        """Where everything is computed."""
        return self.W_U.device

    @property
    def d_vocab(self) -> int:
        """Width of the logits."""
        return self.W_U.shape[1]

    @property
    def block_rows(self) -> int:
        """Rows whose logits fit the buffer."""
        return max(1, CELLS // self.d_vocab)

    def buffer(self, rows: int) -> Float[Tensor, "rows d_vocab"]:
        """Room for the logits of so many rows."""
        return torch.empty(rows, self.d_vocab, dtype=self.dtype, device=self.device)

    def cast(self, states: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """States where and in the precision that they are read in."""
        return states.to(self.device, self.dtype)

    def logits(
        self,
        states: Float[Tensor, "rows d_model"],
        *,
        out: Float[Tensor, "rows d_vocab"] | None = None,
    ) -> Float[Tensor, "rows d_vocab"]:
        """The logits of states; differentiable with respect to them where `out` is not given."""
        logits = self.project(self.norm(self.cast(states)), out=out)
        if self.softcap is None:
            return logits
        if out is None:
            return self.softcap * torch.tanh(logits / self.softcap)
        return logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def project(
        self,
        normed: Float[Tensor, "rows d_model"],
        *,
        out: Float[Tensor, "rows d_vocab"] | None = None,
    ) -> Float[Tensor, "rows d_vocab"]:
        """Normed states times W_U, plus b_U."""
        if self.W_U.dtype == self.dtype:
            return torch.addmm(self.b_U, normed, self.W_U, out=out)
        if out is None:
            parts = [torch.addmm(self.b_U[b], normed, w) for b, w in self._blocks()]
            return torch.cat(parts, -1)
        for block, weight in self._blocks():
            out[:, block] = torch.addmm(self.b_U[block], normed, weight)
        return out

    def pull_back(self, on_logits: Float[Tensor, "rows d_vocab"]) -> Float[Tensor, "rows d_model"]:
        """A gradient on logits times W_U transposed."""
        if self.W_U.dtype == self.dtype:
            return on_logits @ self.W_U.T
        summed = on_logits.new_zeros(len(on_logits), self.W_U.shape[0])
        for block, weight in self._blocks():
            summed += on_logits[:, block] @ weight.T
        return summed

    def pull_back_exactly(
        self, on_logits: Float[Tensor, "rows d_vocab"]
    ) -> Float[Tensor, "rows d_model"]:
        """`pull_back`, in our precision whatever the products of the others are made in."""
        return self.pull_back(on_logits)

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """The unembedding in our precision, a block of the vocabulary at a time."""
        for start in range(0, self.d_vocab, _VOCABULARY_BLOCK):
            block = slice(start, min(start + _VOCABULARY_BLOCK, self.d_vocab))
            yield block, self.W_U[:, block].to(self.dtype)


@dataclass(frozen=True, eq=False)
class LowUnembedding(Unembedding):
    """The readout with its two large products in bfloat16; everything around them stays float32.

    Rounding is relative to the size of a logit. All logits of a token may be shifted by one
    number without changing what is predicted (where there is no softcap), so W_U is centred over
    the vocabulary first, which takes most of their size away.

    Attributes:
        low: W_U less its mean over the vocabulary, in bfloat16 [d_model, d_vocab].
        centre: that mean [d_model].
    """

    low: Float[Tensor, "d_model d_vocab"]
    centre: Float[Tensor, " d_model"]

    @classmethod
    def of(cls, view: ModelView) -> LowUnembedding:
        """The readout of a model as it is now, with a copy of W_U in bfloat16."""
        exact = Unembedding.of(view)
        centre = exact.W_U.mean(1, dtype=exact.dtype)
        if exact.softcap is not None:
            centre = torch.zeros_like(centre)
        low = (exact.W_U - centre[:, None].to(exact.W_U.dtype)).to(torch.bfloat16)
        return cls(exact.norm, exact.W_U, exact.b_U, exact.softcap, low, centre)

    def project(
        self,
        normed: Float[Tensor, "rows d_model"],
        *,
        out: Float[Tensor, "rows d_vocab"] | None = None,
    ) -> Float[Tensor, "rows d_vocab"]:
        """Normed states times the centred W_U, plus b_U: logits but for a shift of each row."""
        product = normed.to(torch.bfloat16) @ self.low
        return torch.add(product, self.b_U, out=out)

    def pull_back(self, on_logits: Float[Tensor, "rows d_vocab"]) -> Float[Tensor, "rows d_model"]:
        """A gradient on logits times the centred W_U transposed."""
        return (on_logits.to(torch.bfloat16) @ self.low.T).to(self.dtype)

    def pull_back_exactly(
        self, on_logits: Float[Tensor, "rows d_vocab"]
    ) -> Float[Tensor, "rows d_model"]:
        """The same in our precision."""
        total = on_logits.sum(-1, keepdim=True)
        return super().pull_back(on_logits) - total * self.centre
