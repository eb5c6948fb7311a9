"""The metrics that commands measure with, by the names of their flags."""

from __future__ import annotations

from typing import Any

from resid_patching.cli.frame import UsageError

METRICS = ("logit-diff", "logit", "prob", "loss", "kl", "top1-change")
METRIC_HELP = "what is measured (unset: logit-diff with --answer and --foil)"
ANSWERED = ("logit-diff", "logit", "prob")  # those that score a token


def metric_name(asked: str | None, answers: list[str] | None, foils: list[str] | None) -> str:
    """The name of the metric that flags ask for.

    Args:
        asked: --metric, or None for the logit difference of answer and foil.
        answers: --answer.
        foils: --foil.

    Raises:
        UsageError: it lacks the tokens it needs, or was given others.
    """
    if asked is None:
        if not (answers and foils):
            raise UsageError(
                "no metric was given; give --answer and --foil for their logit difference, or "
                f"--metric {'|'.join(METRICS)}"
            )
        asked = "logit-diff"
    needs_answer, needs_foil = asked in ANSWERED, asked == "logit-diff"
    for flag, given, needed in (("answer", answers, needs_answer), ("foil", foils, needs_foil)):
        if needed and not given:
            raise UsageError(f'--metric {asked} needs --{flag}, such as --{flag} " Mary"')
        if given and not needed:
            raise UsageError(f"--metric {asked} reads no --{flag}; leave it out")
    return asked


def new_metric(name: str, answers: Any, foils: Any, *, on_text: bool) -> Any:
    """The metric of a name.

    Args:
        name: one of `METRICS`.
        answers: the answers, where it reads some.
        foils: likewise.
        on_text: whether it is taken at all positions, where it can be.
    """
    from resid_patching import metrics

    match name:
        case "logit-diff":
            return metrics.logit_diff(answers, foils)
        case "logit":
            return metrics.logit(answers)
        case "prob":
            return metrics.prob(answers)
        case "loss":
            return metrics.loss()
        case "kl":
            return metrics.kl(position=None if on_text else -1)
        case _:
            return metrics.top1_change()


def shared(tokens: list[str] | None) -> list[str] | str | None:
    """One token where all prompts have the same, so that messages can name it."""
    return tokens[0] if tokens and len(set(tokens)) == 1 else tokens
