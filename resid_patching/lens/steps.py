"""KL(final || lens) of a block of states and its gradient, fused, without any tensor for autograd.

With z the logits of a moved state u, q = softmax(z), p the model's own distribution:

    KL = sum p log p - p . z + log sum exp z
    dKL/dz = q - p,    dKL/du = N'(u)' W_U (q - p)

The unembedding is frozen, so this is all there is. Without a softcap p enters linearly,
p . z = N(u) . (W_U p) + p . b_U, so that the teacher is one vector W_U p for each token instead
of a distribution, and a block of rows needs one buffer of the vocabulary's width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from resid_patching.lens.unembed import Unembedding
from resid_patching.models import exact


@dataclass(frozen=True, eq=False)
class Teacher:
    """The model's own distribution at some tokens.

    Attributes:
        p_log_p: minus its entropy [token].
        mean_row: W_U p [token, d_model].
        mean_bias: p . b_U [token].
        logits: the model's logits, kept only under a softcap [token, d_vocab].
    """

    p_log_p: Float[Tensor, " token"]
    mean_row: Float[Tensor, "token d_model"]
    mean_bias: Float[Tensor, " token"]
    logits: Float[Tensor, "token d_vocab"] | None

    @classmethod
    @exact()
    def of(cls, unembedding: Unembedding, logits: Float[Tensor, "token d_vocab"]) -> Teacher:
        """The teacher of the model's logits."""
        parts = []
        for block in logits.split(unembedding.block_rows):
            shifted = unembedding.cast(block)
            shifted = shifted - shifted.amax(-1, keepdim=True)
            p = shifted.softmax(-1)
            p_log_p = torch.linalg.vecdot(p, shifted) - shifted.logsumexp(-1)
            parts.append((p_log_p, unembedding.pull_back_exactly(p), p @ unembedding.b_U))
        kept = None if unembedding.softcap is None else unembedding.cast(logits)
        p_log_p, mean_row, mean_bias = (torch.cat(part) for part in zip(*parts, strict=True))
        return cls(p_log_p, mean_row, mean_bias, kept)

    def take(self, where: Int[Tensor, " n"] | slice) -> Teacher:
        """The teacher at some of its tokens."""
        logits = None if self.logits is None else self.logits[where]
        return Teacher(self.p_log_p[where], self.mean_row[where], self.mean_bias[where], logits)

    def __len__(self) -> int:
        return len(self.p_log_p)


@exact()
def kl_and_gradient(
    unembedding: Unembedding,
    states: Float[Tensor, "token d_model"],
    teacher: Teacher,
    buffer: Float[Tensor, "rows d_vocab"] | None = None,
) -> tuple[Float[Tensor, " token"], Float[Tensor, "token d_model"]]:
    """KL(final || lens) at each token, and its gradient with respect to the moved state.

    Args:
        unembedding: the model's readout.
        states: moved states, behind a lens's translator.
        teacher: the model's own distribution at the same tokens.
        buffer: room for logits; its rows are how many tokens are taken at a time.
    """
    buffer = unembedding.buffer(unembedding.block_rows) if buffer is None else buffer
    kls, gradients = [], []
    for start in range(0, len(states), len(buffer)):
        block = slice(start, start + len(buffer))
        x = unembedding.cast(states[block])
        kl, on_normed = _block(unembedding, unembedding.norm(x), teacher.take(block), buffer)
        kls.append(kl)
        gradients.append(_through_norm(unembedding, x, on_normed))
    return torch.cat(kls), torch.cat(gradients)


@exact()
def kl_only(
    unembedding: Unembedding,
    states: Float[Tensor, "token d_model"],
    teacher: Teacher,
    buffer: Float[Tensor, "rows d_vocab"] | None = None,
) -> Float[Tensor, " token"]:
    """KL(final || lens) at each token."""
    buffer = unembedding.buffer(unembedding.block_rows) if buffer is None else buffer
    kls = []
    for start in range(0, len(states), len(buffer)):
        block = slice(start, start + len(buffer))
        normed = unembedding.norm(unembedding.cast(states[block]))
        kl, _, _ = _kl(unembedding, normed, teacher.take(block), buffer)
        kls.append(kl)
    return torch.cat(kls)


def _block(
    unembedding: Unembedding, normed: Tensor, teacher: Teacher, buffer: Tensor
) -> tuple[Tensor, Tensor]:
    kl, weights, total = _kl(unembedding, normed, teacher, buffer)
    if unembedding.softcap is None:
        return kl, unembedding.pull_back(weights) / total - teacher.mean_row
    assert teacher.logits is not None
    # Under a cap y = c tanh(z / c), dy/dz = 1 - (y / c)^2, so p no longer enters linearly.
    capped = unembedding.project(normed).div_(unembedding.softcap).tanh_()
    on_logits = (weights / total - teacher.logits.softmax(-1)) * (1 - capped.pow(2))
    return kl, unembedding.pull_back(on_logits)


def _kl(
    unembedding: Unembedding, normed: Tensor, teacher: Teacher, buffer: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """KL, exp(z - max z) in the buffer, and its sum over the vocabulary."""
    z = unembedding.project(normed, out=buffer[: len(normed)])
    if unembedding.softcap is None:
        expected = torch.linalg.vecdot(normed, teacher.mean_row) + teacher.mean_bias
    else:
        assert teacher.logits is not None
        z.div_(unembedding.softcap).tanh_().mul_(unembedding.softcap)
        expected = torch.linalg.vecdot(teacher.logits.softmax(-1), z)
    maximum = z.amax(-1, keepdim=True)
    weights = z.sub_(maximum).exp_()
    total = weights.sum(-1, keepdim=True)
    log_z = total.log()[:, 0] + maximum[:, 0]
    return teacher.p_log_p - expected + log_z, weights, total


def _through_norm(unembedding: Unembedding, x: Tensor, on_normed: Tensor) -> Tensor:
    """A gradient on N(x) as one on x."""
    norm = unembedding.norm
    gradient = on_normed * norm.gain
    if norm.kind is None:
        return gradient
    sigma = norm.scale(x)[:, None]
    centred = x - x.mean(-1, keepdim=True) if norm.kind == "LN" else x
    unit = centred / sigma
    along = (gradient * unit).mean(-1, keepdim=True)
    if norm.kind == "LN":
        gradient = gradient - gradient.mean(-1, keepdim=True)
    return (gradient - unit * along) / sigma
