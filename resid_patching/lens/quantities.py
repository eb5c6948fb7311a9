"""What is read off a block of logits, with one pass of the unembedding for all of it.

With z the logits of a lens at one token, q = softmax(z), and p the model's own distribution:

    entropy         -sum q log q                        nats
    kl              sum p (log p - log q)               nats, KL(final || lens)
    cross_entropy   -log q[next token]                  nats
    prob            q[token]                            probability
    rank            how many logits are above z[token]  0 is the top
    top             the largest logits, with their ids and probabilities
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

SCALARS = ("entropy", "kl", "cross_entropy", "prob", "rank")
_TOP_BLOCK = 64


@dataclass(frozen=True, eq=False)
class Final:
    """The model's own distribution at a block of tokens.

    Attributes:
        logits: its logits, in our precision [rows, d_vocab].
        p: its probabilities [rows, d_vocab].
        p_log_p: minus its entropy [rows].
    """

    logits: Float[Tensor, "rows d_vocab"]
    p: Float[Tensor, "rows d_vocab"]
    p_log_p: Float[Tensor, " rows"]

    @classmethod
    def of(cls, logits: Float[Tensor, "rows d_vocab"]) -> Final:
        """The distribution of logits in our precision."""
        shifted = logits - logits.amax(-1, keepdim=True)
        p = shifted.exp()
        total = p.sum(-1)
        p_log_p = dot(p, shifted) / total - total.log()
        return cls(logits, p.div_(total[:, None]), p_log_p)


@dataclass(frozen=True)
class Wanted:
    """Which quantities are read.

    Attributes:
        scalars: some of SCALARS.
        top: how many of the largest logits; 0 for none.
    """

    scalars: frozenset[str]
    top: int = 0


def read(
    logits: Float[Tensor, "rows d_vocab"],
    wanted: Wanted,
    *,
    final: Final | None,
    tokens: Int[Tensor, " rows"] | None,
    following: Int[Tensor, " rows"] | None,
    scratch: Float[Tensor, "rows d_vocab"],
) -> dict[str, Tensor]:
    """Every quantity that is wanted of a block of logits, which are used up.

    Args:
        logits: a lens's logits at a block of tokens; overwritten.
        wanted: the quantities.
        final: the model's own distribution there, for `kl`.
        tokens: the token of `prob` and `rank` at each row.
        following: the next token at each row; a negative one where there is none.
        scratch: room of the same shape.

    Returns:
        [rows] for each scalar; `top_logits`, `top_ids` and `top_probs` [rows, k].
    """
    found: dict[str, Tensor] = {}
    maximum = None
    if wanted.top:
        found["top_logits"], found["top_ids"] = largest(logits, wanted.top)
        maximum = found["top_logits"][:, :1]
    chosen = None if tokens is None else logits.gather(1, tokens[:, None])
    if "rank" in wanted.scalars:
        assert chosen is not None
        found["rank"] = (logits > chosen).sum(-1).to(logits.dtype)
    after = None if following is None else logits.gather(1, following.clamp_min(0)[:, None])[:, 0]
    maximum = logits.amax(-1, keepdim=True) if maximum is None else maximum

    shifted = logits.sub_(maximum)
    if "kl" in wanted.scalars:
        assert final is not None
        found["kl"] = final.p_log_p - dot(final.p, shifted)
    needs_both = "entropy" in wanted.scalars
    weights = torch.exp(shifted, out=scratch) if needs_both else shifted.exp_()
    total = weights.sum(-1)
    log_total = total.log()
    if needs_both:
        found["entropy"] = (log_total - dot(weights, shifted) / total).clamp_min(0)
    if "kl" in wanted.scalars:
        found["kl"] = (found["kl"] + log_total).clamp_min(0)  # rounding alone puts it below 0
    log_z = log_total + maximum[:, 0]
    if "prob" in wanted.scalars:
        assert chosen is not None
        found["prob"] = (chosen[:, 0] - log_z).exp()
    if "cross_entropy" in wanted.scalars:
        assert after is not None and following is not None
        found["cross_entropy"] = (log_z - after).masked_fill(following < 0, torch.nan)
    if wanted.top:
        found["top_probs"] = (found["top_logits"] - log_z[:, None]).exp()
    return found


def largest(
    logits: Float[Tensor, "rows d_vocab"], k: int
) -> tuple[Float[Tensor, "rows k"], Int[Tensor, "rows k"]]:
    """The k largest logits and their ids, largest first.

    The k largest lie in the k blocks with the largest maxima, so that only those are sorted.
    """
    rows, d_vocab = logits.shape
    n_blocks = d_vocab // _TOP_BLOCK
    if n_blocks <= 2 * k:
        return logits.topk(k, -1)
    split = n_blocks * _TOP_BLOCK
    blocked = logits[:, :split].reshape(rows, n_blocks, _TOP_BLOCK)
    blocks = blocked.amax(-1).topk(k, -1, sorted=False).indices
    inside = torch.arange(_TOP_BLOCK, device=logits.device)
    ids = (blocks[:, :, None] * _TOP_BLOCK + inside).flatten(1)
    rest = torch.arange(split, d_vocab, device=logits.device).expand(rows, -1)
    ids = torch.cat([ids, rest], -1)
    values, places = logits.gather(1, ids).topk(k, -1)
    return values, ids.gather(1, places)


def dot(
    left: Float[Tensor, "rows d_vocab"], right: Float[Tensor, "rows d_vocab"]
) -> Float[Tensor, " rows"]:
    """The dot product of each row with the other's."""
    return torch.linalg.vecdot(left, right)


def jensen_shannon(
    left: Float[Tensor, "rows d_vocab"], right: Float[Tensor, "rows d_vocab"]
) -> Float[Tensor, " rows"]:
    """JS = KL(p || m) / 2 + KL(q || m) / 2 with m = (p + q) / 2, of two blocks of logits; nats.

    0 <= JS <= ln 2, which rounding alone could leave.
    """
    log_p, log_q = left.log_softmax(-1), right.log_softmax(-1)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    halves = dot(log_p.exp(), log_p - log_m) + dot(log_q.exp(), log_q - log_m)
    bound = torch.tensor(math.log(2), dtype=halves.dtype, device="cpu")
    if float(bound) > math.log(2):  # float32 rounds it up
        bound = torch.nextafter(bound, torch.zeros_like(bound))
    return (halves / 2).clamp(0, float(bound))


def total_variation(
    left: Float[Tensor, "rows d_vocab"], right: Float[Tensor, "rows d_vocab"]
) -> Float[Tensor, " rows"]:
    """TV = sum |p - q| / 2, of two blocks of logits; a probability."""
    return ((left.softmax(-1) - right.softmax(-1)).abs().sum(-1) / 2).clamp(0, 1)
