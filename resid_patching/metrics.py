"""Metrics: one number for each prompt from the logits, and which logits it reads.

    logit_diff(answer, foil)   logit[answer] - logit[foil]                   logits
    logit(token)               logit[token]                                  logits
    prob(token)                softmax(logits)[token]                        probability
    loss()                     mean of -log p(next token) over the prompt    nats
    kl()                       KL(clean run || changed run)                  nats
    top1_change()              1 where the top prediction changed            changed
    custom(function)           any function of the logits            its unit

A metric states the rows and columns that it reads, so that the rest is never unembedded. Logits
are the model's own, after any output softcap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from resid_patching.errors import PromptError
from resid_patching.per_prompt import PerPrompt, named_function, takes_prompts
from resid_patching.prompts import PositionIndex, Positions, Tokens, tokens_for
from resid_patching.rerun import Reading
from resid_patching.run import Run


@dataclass(frozen=True)
class LogitDiff:
    """logit[answer] - logit[foil] at a position of each prompt."""

    answer: Tokens
    foil: Tokens
    position: Positions = -1
    unit = "logits"

    def __str__(self) -> str:
        return f"logit difference {_shown(self.answer)} - {_shown(self.foil)}{_at(self.position)}"

    def bind(self, run: Run) -> Reading:
        """What is read of a run's logits."""
        view, prompts = run.view, run.prompts
        ids = [
            tokens_for(view, prompts, self.answer, "answer"),
            tokens_for(view, prompts, self.foil, "foil"),
        ]

        def evaluate(logits: Tensor, rows: slice, clean: Tensor | None) -> Tensor:
            return logits[:, :, 0, 0] - logits[:, :, 0, 1]

        where = run.locate(_single(self.position))
        return Reading(where, torch.tensor(ids, device=view.device).T, evaluate)


@dataclass(frozen=True)
class Logit:
    """logit[token] at a position of each prompt."""

    token: Tokens
    position: Positions = -1
    unit = "logits"

    def __str__(self) -> str:
        return f"logit of {_shown(self.token)}{_at(self.position)}"

    def bind(self, run: Run) -> Reading:
        """What is read of a run's logits."""
        ids = tokens_for(run.view, run.prompts, self.token, "token")

        def evaluate(logits: Tensor, rows: slice, clean: Tensor | None) -> Tensor:
            return logits[:, :, 0, 0]

        columns = torch.tensor(ids, device=run.view.device)[:, None]
        return Reading(run.locate(_single(self.position)), columns, evaluate)


@dataclass(frozen=True)
class Prob:
    """The probability of a token at a position of each prompt."""

    token: Tokens
    position: Positions = -1
    unit = "probability"

    def __str__(self) -> str:
        return f"probability of {_shown(self.token)}{_at(self.position)}"

    def bind(self, run: Run) -> Reading:
        """What is read of a run's logits."""
        ids = tokens_for(run.view, run.prompts, self.token, "token")
        chosen = torch.tensor(ids, device=run.view.device)

        def evaluate(logits: Tensor, rows: slice, clean: Tensor | None) -> Tensor:
            index = chosen[rows][None, :, None].expand(len(logits), -1, 1)
            return logits[:, :, 0].softmax(-1).gather(-1, index)[..., 0]

        return Reading(run.locate(_single(self.position)), None, evaluate)


@dataclass(frozen=True)
class Loss:
    """Mean cross-entropy of each next token of a prompt, in nats; padding is left out."""

    unit = "nats"

    def __str__(self) -> str:
        return "loss per token"

    def bind(self, run: Run) -> Reading:
        """What is read of a run's logits.

        Raises:
            PromptError: a prompt of one token has no next token.
        """
        lengths = run.prompts.lengths
        if short := [row for row, length in enumerate(lengths) if length < 2]:
            raise PromptError(f"prompt {short[0]} has one token, and so no next token to score")
        everything = run.locate(None).index
        index = everything[:, :-1].clone()
        index[everything[:, 1:] < 0] = -1
        tokens = run.prompts.tokens[:, 1 : everything.shape[1]]

        def evaluate(logits: Tensor, rows: slice, clean: Tensor | None) -> Tensor:
            width = logits.shape[2]
            real = (index[rows] >= 0).to(logits.device)
            target = tokens[rows].to(logits.device)[None, :, :width, None]
            chosen = logits.gather(-1, target.expand(len(logits), -1, -1, 1))[..., 0]
            nats = torch.where(real, logits.logsumexp(-1) - chosen, 0)
            return nats.sum(-1) / real.sum(-1)

        return Reading(PositionIndex(index), None, evaluate)

    def weights(self, run: Run) -> Tensor:
        """Scored tokens of each prompt [batch]."""
        return torch.tensor(run.prompts.lengths, device=run.view.device) - 1


@dataclass(frozen=True)
class KL:
    """KL(clean run || changed run) at a position, or the mean over all where it is None."""

    position: Positions = -1
    unit = "nats"

    def __str__(self) -> str:
        return f"KL from the clean run{_at(self.position)}"

    def bind(self, run: Run) -> Reading:
        """What is read of a run's logits."""
        where = run.locate(self.position)

        def evaluate(logits: Tensor, rows: slice, clean: Tensor | None) -> Tensor:
            assert clean is not None
            valid = where.valid[rows].to(logits.device)
            p, q = clean.log_softmax(-1), logits.log_softmax(-1)
            nats = torch.where(valid, (p.exp() * (p - q)).sum(-1), 0)
            return nats.sum(-1) / valid.sum(-1)

        return Reading(where, None, evaluate, needs_clean=True)


@dataclass(frozen=True)
class Top1Change:
    """1 where the most probable token at a position differs from the clean run, else 0."""

    position: Positions = -1
    unit = "changed"

    def __str__(self) -> str:
        return f"change of the top prediction{_at(self.position)}"

    def bind(self, run: Run) -> Reading:
        """What is read of a run's logits."""

        def evaluate(logits: Tensor, rows: slice, clean: Tensor | None) -> Tensor:
            assert clean is not None
            return (logits[:, :, 0].argmax(-1) != clean[:, 0].argmax(-1)).to(logits.dtype)

        return Reading(run.locate(_single(self.position)), None, evaluate, needs_clean=True)


@dataclass(frozen=True)
class Custom:
    """A function of the caller's that gives each prompt one number; see `custom`."""

    function: Callable[..., Tensor]
    position: Positions = None
    name: str = ""
    unit: str = ""

    def __post_init__(self) -> None:
        takes_prompts(self.function)

    def __str__(self) -> str:
        return self.name or named_function(self.function)

    def bind(self, run: Run) -> Reading:
        """What is read of a run's logits."""
        where = run.locate(self.position)
        n_positions = where.valid.sum(1).tolist()
        own = PerPrompt(self.function, str(self), run, n_positions)
        return Reading(where, None, own.evaluate)


Metric: TypeAlias = LogitDiff | Logit | Prob | Loss | KL | Top1Change | Custom


def logit_diff(answer: Tokens, foil: Tokens, *, position: Positions = -1) -> LogitDiff:
    """logit[answer] - logit[foil].

    Args:
        answer: a token as text or id, or one for each prompt.
        foil: likewise.
        position: where it is read, in every prompt or one for each (-1: the last real token).
    """
    return LogitDiff(answer, foil, position)


def logit(token: Tokens, *, position: Positions = -1) -> Logit:
    """The logit of a token. Not comparable between centred and uncentred unembeddings.

    Args:
        token: a token as text or id, or one for each prompt.
        position: where it is read.
    """
    return Logit(token, position)


def prob(token: Tokens, *, position: Positions = -1) -> Prob:
    """The probability of a token.

    Args:
        token: a token as text or id, or one for each prompt.
        position: where it is read.
    """
    return Prob(token, position)


def loss() -> Loss:
    """Mean cross-entropy of the next token over each prompt, in nats."""
    return Loss()


def kl(*, position: Positions = -1) -> KL:
    """KL(clean run || changed run), in nats.

    Args:
        position: where it is read; None for the mean over all positions.
    """
    return KL(position)


def top1_change(*, position: Positions = -1) -> Top1Change:
    """1 where the top prediction differs from the clean run, else 0.

    Args:
        position: where it is read.
    """
    return Top1Change(position)


def custom(
    function: Callable[..., Tensor],
    *,
    position: Positions = None,
    name: str = "",
    unit: str = "",
) -> Custom:
    """A function of your own: logits [n, pos, d_vocab] in, one number a prompt [n] out.

    Each call has prompts of equal length without padding: `logits[:, -1]` is after each prompt's
    last token. A second argument without a default is given the numbers of these prompts in the
    run, a LongTensor [n] on the CPU, to look labels up with:

        rp.custom(lambda logits, prompts: logits[range(len(logits)), -1, labels[prompts]])

    A function of one argument sees all prompts of the run in each call, row i is prompt i. (Where
    prompts have several lengths there is a call for each length, in which rows of prompts of other
    lengths are filled with copies and what is given for them is not read.) Where all of them take
    more than a quarter of the run's `max_bytes`, it sees some of them at a time. A function that
    gives each prompt its number whatever its row then goes on to work; one that holds something for
    each prompt is refused. The numbers never depend on how prompts are grouped.

    Args:
        function: of logits, or of logits and prompts. It must give a prompt the same number
            whichever others stand beside it, and leave the logits as they are.
        position: narrows the logits to one position of each prompt, [n, 1, d_vocab], which is
            faster and takes less memory: one for all prompts (-1 is the last token), or one for
            each. None for all positions.
        name: what it is called in results; without one, the function's name.
        unit: what its numbers are measured in.

    Raises:
        TypeError: no function, or one of other arguments.
        MetricError: when it is measured: it gives no tensor [n], or numbers that depend on other
            prompts, or it holds something for each prompt and more are needed at once than fit.
    """
    return Custom(function, position, name, unit)


def as_metric(metric: Any) -> Metric:
    """A metric, or a callable of logits as one.

    Raises:
        TypeError: neither.
    """
    if isinstance(metric, LogitDiff | Logit | Prob | Loss | KL | Top1Change | Custom):
        return metric
    factories = (logit_diff, logit, prob, loss, kl, top1_change, custom)
    if isinstance(metric, type) or not callable(metric) or metric in factories:
        raise TypeError(
            "metric is rp.logit_diff(answer, foil), rp.logit(token), rp.prob(token), rp.loss(), "
            f"rp.kl(), rp.top1_change(), or a function of logits; got {metric!r}"
        )
    return Custom(metric)  # type: ignore[arg-type]


def _single(position: Positions) -> Positions:
    if position is None:
        raise TypeError("this metric reads one position a prompt; give position=-1 or another")
    return position


def _shown(tokens: Tokens) -> str:
    if isinstance(tokens, str | int):
        return repr(tokens)
    return "(one a prompt)"


def _at(position: Positions) -> str:
    if position is None:
        return ", mean over positions"
    if isinstance(position, int):
        return "" if position == -1 else f" at position {position}"
    return " at one position a prompt"
