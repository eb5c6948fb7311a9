"""Prompts, metrics and kinds of ablation as flags and files give them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import resid_patching as rp
from resid_patching.cli.frame import UsageError

METRICS = "logit-diff|logit|prob|loss|kl|top1-change"
ANSWERED = ("logit-diff", "logit", "prob")  # those that score a token


def refuse(arguments: Namespace, why: str, *flags: str) -> None:
    """Refuses flags that were given: the flag's name and `why` make the message."""
    for flag in flags:
        if (value := getattr(arguments, flag, None)) is not None and value is not False:
            raise UsageError(f"--{flag.replace('_', '-')} {why}")


# Prompts


def read_lines(path: str) -> list[str]:
    """The non-empty lines of a UTF-8 file."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from None
    lines = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    if not lines:
        raise UsageError(f"{path} holds no text")
    return lines


def read_prompts(
    arguments: Namespace,
) -> tuple[list[str], list[str] | None, list[str] | None]:
    """The prompts that the flags give, with an answer and a foil for each where given."""
    prompts, file = list(arguments.prompt or []), arguments.prompts
    answers, foils = getattr(arguments, "answer", None), getattr(arguments, "foil", None)
    if file is not None:
        rows = [line.split("\t") for line in read_lines(file)]
        columns = {len(row) for row in rows}
        if len(columns) > 1 or max(columns) > 3 or (max(columns) > 1 and prompts):
            like = "a prompt, or prompt<TAB>answer, or prompt<TAB>answer<TAB>foil"
            raise UsageError(f"{file}: every line is {like}, all alike")
        given, *scored = map(list, zip(*rows, strict=True))
        prompts += given
        if scored:
            refuse(arguments, f"was given, but {file} holds the answers", "answer", "foil")
            answers, foils = (*scored, None)[:2]
    if not prompts:
        raise UsageError('no prompt was given; use --prompt "..." or --prompts FILE')
    return prompts, spread("answer", answers, prompts), spread("foil", foils, prompts)


def read_bare_prompts(arguments: Namespace) -> list[str]:
    """The prompts of a command that reads no answers."""
    prompts, answers, _ = read_prompts(arguments)
    if answers is not None:
        raise UsageError(
            f"{arguments.prompts}: {arguments.command} reads no answers; give one prompt a line"
        )
    return prompts


def spread(name: str, given: list[str] | None, prompts: Sequence[str]) -> list[str] | None:
    """One token for each prompt, from a flag given once or once for each."""
    if given is None or len(given) == len(prompts):
        return given
    if len(given) == 1:
        return given * len(prompts)
    raise UsageError(
        f"--{name} was given {len(given)} times for {len(prompts)} prompts; give it once, or "
        "once for each prompt"
    )


# What is measured


def metric_name(asked: str | None, answers: Any, foils: Any) -> str:
    """The metric that flags ask for; unset, the logit difference of answer and foil."""
    if asked is None and answers and foils:
        return "logit-diff"
    if asked is None:
        raise UsageError(f"no metric was given; give --answer and --foil, or --metric {METRICS}")
    needs = {"answer": asked in ANSWERED, "foil": asked == "logit-diff"}
    for flag, given in (("answer", answers), ("foil", foils)):
        if needs[flag] and not given:
            raise UsageError(f'--metric {asked} needs --{flag}, such as --{flag} " Mary"')
        if given and not needs[flag]:
            raise UsageError(f"--metric {asked} reads no --{flag}; leave it out")
    return asked


def new_metric(
    name: str, answers: Sequence[str] | None, foils: Sequence[str] | None, *, on_text: bool = False
) -> rp.Metric:
    """The metric of a name in `METRICS`; of a text, at all positions where it can be."""
    if name == "kl":
        return rp.kl(position=None if on_text else -1)
    n_tokens = {"logit-diff": 2, "logit": 1, "prob": 1}.get(name, 0)
    # One token where all prompts have the same, so that messages can name it.
    tokens = [one[0] if one and len(set(one)) == 1 else one for one in (answers, foils)]
    return getattr(rp, name.replace("-", "_"))(*tokens[:n_tokens])


# What is replaced, and with what


def with_swept(view: rp.ModelView, named: Sequence[Any], sweep: str | None) -> list[Any]:
    """The parts that were named, then those of --sweep that were not."""
    from resid_patching.stream import writes_of

    listed = {"heads": rp.heads, "layers": writes_of, "streams": rp.streams}
    swept: list[Any] = listed[sweep](view) if sweep else []
    return [*named, *(site for site in swept if site not in named)]


def new_kind(other: rp.Run | None, over: str | None, **pairing: Any) -> Any:
    """What targets are replaced with: zero, the mean of a run over axes, or a run's values."""
    if other is None:
        return rp.Zero()
    if over is not None:
        return rp.Mean(other, over=tuple(over.split(",")))  # type: ignore[arg-type]
    return rp.Resample(other, **pairing)
