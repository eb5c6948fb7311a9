"""Metrics: one number for each prompt from the logits, and which logits it reads.

    logit_diff(answer, foil)   logit[answer] - logit[foil]                   logits
    logit(token)               logit[token]                                  logits
    prob(token)                softmax(logits)[token]                        probability
    loss()                     mean of -log p(next token) over the prompt    nats
    kl()                       KL(clean run || changed run)                  nats
    top1_change()              1 where the top prediction changed            changed
    custom(function)           any function of the logits                    its unit

An answer may be a set of tokens, `any_of(" Mary", " Marie")`: probabilities add up; of several
logits the caller says whether their mean or their log-sum-exp is meant.

A metric states the rows and columns that it reads, so that the rest is never unembedded. Logits
are the model's own, after any output softcap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from resid_patching.errors import PromptError, TokenError
from resid_patching.per_prompt import PerPrompt, named_function, takes_prompts
from resid_patching.prompts import (
    PositionIndex,
    Positions,
    Token,
    Tokens,
    tokens_for,
    warn_missing_space,
)
from resid_patching.rerun import Reading
from resid_patching.run import Run
from resid_patching.tokens import single_token


@dataclass(frozen=True, repr=False)
class Metric:
    """One number for each prompt from the logits; made by the functions of this module.

    Attributes:
        name: what it is, in words.
        unit: what its numbers are measured in.
        bind: run -> what is read of the run's logits, and what is made of them.
        weights: run -> how many tokens each prompt's number is a mean over [batch], by which
            prompts are averaged; None where each prompt counts alike.
    """

    name: str
    unit: str
    bind: Callable[[Run], Reading]
    weights: Callable[[Run], Tensor] | None = None

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Metric({self.name}, in {self.unit or 'no unit'})"


@dataclass(frozen=True)
class AnyOf:
    """A set of tokens, any of which counts; see `any_of`."""

    tokens: tuple[Token, ...]
    logits: Literal["mean", "logsumexp"] | None = None

    def __post_init__(self) -> None:
        if not self.tokens or not all(isinstance(token, str | int) for token in self.tokens):
            raise TypeError(f"any_of takes tokens as texts or ids; got {self.tokens!r}")
        if self.logits not in (None, "mean", "logsumexp"):
            raise ValueError(f"logits is 'mean' or 'logsumexp'; got {self.logits!r}")

    def __str__(self) -> str:
        few = [repr(token) for token in self.tokens[:3]]
        more = len(self.tokens) - len(few)
        return f"any of {', '.join(few)}{f' and {more} more' if more else ''}"


Answers: TypeAlias = Tokens | AnyOf | Sequence[Token | AnyOf]
"""A token or a set of them, or one for each prompt."""


def any_of(*tokens: Token, logits: Literal["mean", "logsumexp"] | None = None) -> AnyOf:
    """A set of tokens as the answer or foil of a metric: `rp.prob(rp.any_of(" Mary", " Marie"))`.

    Args:
        tokens: as texts or ids, each of them one token.
        logits: what `logit` and `logit_diff` make of the set's logits: their "mean", or their
            "logsumexp", of which a difference is the log of a ratio of probabilities. There is no
            default. `prob` adds the probabilities up and does not need it.

    Raises:
        TypeError: no tokens.
        ValueError: `logits` is something else.
    """
    return AnyOf(tokens, logits)


@dataclass(frozen=True, eq=False)
class _Sets:
    """The tokens that count in each prompt.

    Attributes:
        ids: [batch, k].
        counts: which of them are meant; the rest fills up the rows [batch, k].
        logsumexp: in which prompts logits are put together so; in the others by their mean [batch].
    """

    ids: Int[Tensor, "batch k"]
    counts: Bool[Tensor, "batch k"]
    logsumexp: Bool[Tensor, " batch"]

    def together(self, logits: Float[Tensor, "variant rows k"], rows: slice) -> Tensor:
        """The sets' logits as one for each prompt [variant, rows]."""
        counts = self.counts[rows]
        mean = torch.where(counts, logits, 0).sum(-1) / counts.sum(-1)
        if not bool(self.logsumexp[rows].any()):
            return mean
        log = logits.masked_fill(~counts, -torch.inf).logsumexp(-1)
        return torch.where(self.logsumexp[rows], log, mean)


def _sets(run: Run, answers: Answers, what: str) -> _Sets:
    """The ids of an answer or foil in each prompt.

    Raises:
        TokenError: a text that is not one token, a token that is twice in a set, or not one
            answer for each prompt.
    """
    sets = _listed_sets(answers)
    if not sets:
        sets = list(tokens_for(run.view, run.prompts, answers, what))  # type: ignore[arg-type]
        rows = [[token] for token in sets]
    else:
        sets = sets * len(run) if isinstance(answers, AnyOf) else sets
        if len(sets) != len(run):
            raise TokenError(f"{len(sets)} {what}s were given for {len(run)} prompts")
        found: dict[Token | AnyOf, list[int]] = {}
        for one, prompt in zip(sets, run.prompts.texts, strict=True):
            if one not in found:
                found[one] = _ids(run, one, what, prompt)
        rows = [found[one] for one in sets]
    size = max(map(len, rows))
    device = run.view.device
    return _Sets(
        torch.tensor([row + row[:1] * (size - len(row)) for row in rows], device=device),
        torch.tensor([[n < len(row) for n in range(size)] for row in rows], device=device),
        torch.tensor([getattr(one, "logits", None) == "logsumexp" for one in sets], device=device),
    )


def _ids(run: Run, one: Token | AnyOf, what: str, prompt: str | None) -> list[int]:
    """The ids of one prompt's answer."""
    tokens = one.tokens if isinstance(one, AnyOf) else (one,)
    found = [single_token(run.view, token, what) for token in tokens]
    for token in tokens:
        warn_missing_space(run.view, token, prompt, what)
    if twice := [token for token, id in zip(tokens, found, strict=True) if found.count(id) > 1]:
        raise TokenError(f"{what}: {twice[0]!r} and {twice[1]!r} of a set are the same token")
    return found


def _listed_sets(answers: Answers) -> list[Any]:
    """An answer for all prompts, or one for each, where any is a set; else nothing."""
    if isinstance(answers, AnyOf):
        return [answers]
    several = isinstance(answers, Sequence) and not isinstance(answers, str)
    given: Any = answers if several else []
    return list(given) if any(isinstance(one, AnyOf) for one in given) else []


def _require_combined(answers: Answers) -> None:
    """Raises ValueError where a set has several logits, and nobody said which number is meant."""
    for one in _listed_sets(answers):
        if isinstance(one, AnyOf) and one.logits is None:
            raise ValueError(
                f"{one}: a set has several logits. Say what is meant, "
                "rp.any_of(..., logits='mean') or rp.any_of(..., logits='logsumexp'), or measure "
                "rp.prob, which adds the probabilities up"
            )


def logit_diff(answer: Answers, foil: Answers, *, position: Positions = -1) -> Metric:
    """logit[answer] - logit[foil].

    Args:
        answer: a token as text or id, a set `any_of(..., logits=...)`, or one for each prompt.
        foil: likewise.
        position: where it is read, in every prompt or one for each (-1: the last real token).

    Raises:
        TypeError: no position.
        ValueError: a set that does not say how its logits are put together.
    """
    _require_combined(answer)
    _require_combined(foil)
    position = _single(position)

    def bind(run: Run) -> Reading:
        left, right = _sets(run, answer, "answer"), _sets(run, foil, "foil")
        n = left.ids.shape[1]

        def evaluate(logits: Tensor, rows: slice, clean: Tensor | None) -> Tensor:
            one = logits[:, :, 0]
            return left.together(one[..., :n], rows) - right.together(one[..., n:], rows)

        return Reading(run.locate(position), torch.cat([left.ids, right.ids], 1), evaluate)

    name = f"logit difference {_answer_text(answer)} - {_answer_text(foil)}{_at_position(position)}"
    return Metric(name, "logits", bind)


def logit(token: Answers, *, position: Positions = -1) -> Metric:
    """The logit of a token. Not comparable between centred and uncentred unembeddings.

    Args:
        token: a token as text or id, a set `any_of(..., logits=...)`, or one for each prompt.
        position: where it is read.

    Raises:
        TypeError: no position.
        ValueError: a set that does not say how its logits are put together.
    """
    _require_combined(token)
    position = _single(position)

    def bind(run: Run) -> Reading:
        sets = _sets(run, token, "token")

        def evaluate(logits: Tensor, rows: slice, clean: Tensor | None) -> Tensor:
            return sets.together(logits[:, :, 0], rows)

        return Reading(run.locate(position), sets.ids, evaluate)

    return Metric(f"logit of {_answer_text(token)}{_at_position(position)}", "logits", bind)


def prob(token: Answers, *, position: Positions = -1) -> Metric:
    """The probability of a token, or that the next token is any of a set.

    Args:
        token: a token as text or id, a set `any_of(...)`, or one for each prompt.
        position: where it is read.

    Raises:
        TypeError: no position.
    """
    position = _single(position)

    def bind(run: Run) -> Reading:
        sets = _sets(run, token, "token")

        def evaluate(logits: Tensor, rows: slice, clean: Tensor | None) -> Tensor:
            index = sets.ids[rows].expand(len(logits), -1, -1)
            each = logits[:, :, 0].softmax(-1).gather(-1, index)
            return torch.where(sets.counts[rows], each, 0).sum(-1)

        return Reading(run.locate(position), None, evaluate, tokens=sets.ids)

    return Metric(
        f"probability of {_answer_text(token)}{_at_position(position)}", "probability", bind
    )


def loss() -> Metric:
    """Mean cross-entropy of each next token of a prompt, in nats; padding is left out.

    Raises:
        PromptError: when it is measured: a prompt of one token has no next token.
    """

    def bind(run: Run) -> Reading:
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

    def weights(run: Run) -> Tensor:
        return torch.tensor(run.prompts.lengths, device=run.view.device) - 1

    return Metric("loss per token", "nats", bind, weights)


def kl(*, position: Positions = -1) -> Metric:
    """KL(clean run || changed run), in nats.

    Args:
        position: where it is read; None for the mean over all positions.
    """

    def bind(run: Run) -> Reading:
        where = run.locate(position)

        def evaluate(logits: Tensor, rows: slice, clean: Tensor | None) -> Tensor:
            assert clean is not None
            valid = where.valid[rows].to(logits.device)
            p, q = clean.log_softmax(-1), logits.log_softmax(-1)
            nats = torch.where(valid, (p.exp() * (p - q)).sum(-1), 0)
            return nats.sum(-1) / valid.sum(-1)

        return Reading(where, None, evaluate, needs_clean=True)

    return Metric(f"KL from the clean run{_at_position(position)}", "nats", bind)


def top1_change(*, position: Positions = -1) -> Metric:
    """1 where the most probable token differs from the clean run, else 0.

    Args:
        position: where it is read.

    Raises:
        TypeError: no position.
    """
    position = _single(position)

    def bind(run: Run) -> Reading:
        def evaluate(logits: Tensor, rows: slice, clean: Tensor | None) -> Tensor:
            assert clean is not None
            return (logits[:, :, 0].argmax(-1) != clean[:, 0].argmax(-1)).to(logits.dtype)

        return Reading(run.locate(position), None, evaluate, needs_clean=True)

    return Metric(f"change of the top prediction{_at_position(position)}", "changed", bind)


def custom(
    function: Callable[..., Tensor],
    *,
    position: Positions = None,
    name: str = "",
    unit: str = "",
) -> Metric:
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
    takes_prompts(function)
    shown = name or named_function(function)

    def bind(run: Run) -> Reading:
        where = run.locate(position)
        n_positions = where.valid.sum(1).tolist()
        return Reading(where, None, PerPrompt(function, shown, run, n_positions).evaluate)

    return Metric(shown, unit, bind)


def as_metric(metric: Metric | Callable[..., Tensor]) -> Metric:
    """A metric, or a callable of logits as one.

    Raises:
        TypeError: neither.
    """
    if isinstance(metric, Metric):
        return metric
    factories = (logit_diff, logit, prob, loss, kl, top1_change, custom, any_of)
    if isinstance(metric, type) or not callable(metric) or metric in factories:
        raise TypeError(
            "metric is rp.logit_diff(answer, foil), rp.logit(token), rp.prob(token), rp.loss(), "
            f"rp.kl(), rp.top1_change(), or a function of logits; got {metric!r}"
        )
    return custom(metric)


def _single(position: Positions) -> Positions:
    if position is None:
        raise TypeError("this metric reads one position a prompt; give position=-1 or another")
    return position


def _answer_text(answers: Answers) -> str:
    if isinstance(answers, AnyOf):
        combined = "" if answers.logits is None else f" ({answers.logits})"
        return f"{answers}{combined}"
    return repr(answers) if isinstance(answers, str | int) else "(one a prompt)"


def _at_position(position: Positions) -> str:
    if position is None:
        return ", mean over positions"
    if isinstance(position, int):
        return "" if position == -1 else f" at position {position}"
    return " at one position a prompt"
