"""The flags of `path-patch`: who sends, who reads, which prompts; read before a model is loaded."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resid_patching.cli.flags import add_flags
from resid_patching.cli.frame import UsageError
from resid_patching.cli.inputs import add_answer_flags, spread
from resid_patching.cli.scores import ANSWERED, METRIC_HELP, METRICS, metric_name

if TYPE_CHECKING:
    from resid_patching.prompt_sets import PromptPairs

_NAMED = ("IO", "S1", "S1+1", "S2", "END")
_SWEEPS = {"heads": "every head", "layers": "every attention layer and MLP"}
_MLPS = {
    "freeze": "MLPs between sender and receiver keep their values",
    "recompute": "they answer the change",
}
_USING = {
    "zero": "0",
    "mean": "its mean over the source prompts",
    "resample": "its value in the source prompt of the same row",
}
_CORRUPT = {
    "names": "three other names in the source",
    "swap": "the subject of the second clause swapped in the source",
}


def _choices(texts: dict[str, str]) -> str:
    return "; ".join(f"{name}: {text}" for name, text in texts.items())


def add_path_patch_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say who sends and reads, which prompts, and what is measured."""
    add_flags(
        parser,
        {
            "senders SENDER*": "who writes: 9.9 (a head), attn.9, mlp.9, embed, ...",
            "--sweep heads|layers": f"also, as senders, {_choices(_SWEEPS)}",
            "--joint": "all senders together (unset: one at a time)",
        },
    )
    add_flags(
        parser.add_argument_group("path"),
        {
            "--to RECEIVER...": "who reads: logits, 10.0.q (or k, v), mlp.10.in, resid_pre.10 "
            "(or mid, post); several are alternatives side by side",
            "--to-sweep q|k|v|mlp": "also every receiver of this kind",
            "--together": "all receivers are written together (unset: one at a time, side by side)",
            "--mlps freeze|recompute !": _choices(_MLPS),
            "--using zero|mean|resample !": f"what the sender's value is replaced with; "
            f"{_choices(_USING)}",
            "--over batch|batch,pos": "axes of --using mean: batch: one mean for each position; "
            "batch,pos: one for all",
            "--positions P": "the sender's position, from 0, or from the end if negative, or END; "
            f"with --indirect-object also {', '.join(_NAMED[:-1])} (unset: all)",
        },
        positions=str,
    )
    add_flags(
        parser.add_argument_group("prompts"),
        {
            "--base TEXT...": "the prompt that is run and changed",
            "--source TEXT...": "the prompt that other values come from: one for each --base, or "
            "with --using mean as many as the mean is taken over",
            "--pairs FILE": "tab-separated UTF-8 whose first line names base, source and, if any, "
            "answer and foil; or a .jsonl file with these keys",
            "--indirect-object N": 'N pairs like "When Mary and John went to the store, John gave '
            'a drink to"',
            "--seed N": "seed of --indirect-object",
            "--corrupt names|swap": f"with --indirect-object; {_choices(_CORRUPT)}",
        },
        seed=int,
    )
    add_flags(parser, {f"--metric {'|'.join(METRICS)}": METRIC_HELP})
    add_answer_flags(parser)
    text = "also the value with receivers' norms frozen, an approximation"
    add_flags(parser, {"--linearised": text, "--top N = 15": "rows shown"})


@dataclass(frozen=True)
class Inputs:
    """What the flags give, read and checked before the model is loaded.

    Attributes:
        senders: the senders that are named.
        receivers: the receivers that are named.
        pairs: the prompts, or None where they are drawn for the model.
        sources: the source prompts where a mean is taken over other than those of the pairs.
        metric: the metric's name.
    """

    senders: list[Any]
    receivers: list[Any]
    pairs: PromptPairs | None
    sources: list[str] | None
    metric: str


def read_inputs(arguments: argparse.Namespace) -> Inputs:
    """Reads and checks the flags.

    Raises:
        UsageError: a flag is missing, wrong, or does not go with another.
        AddressError: a sender or receiver is no address.
        PromptError: a file of pairs is not as expected.
    """
    if not arguments.senders and arguments.sweep is None:
        raise UsageError(
            "no sender was given; name one, such as 9.9 or mlp.0, or --sweep heads|layers"
        )
    if not arguments.to and arguments.to_sweep is None:
        raise UsageError(
            "no receiver was given; name one, such as --to logits or --to 10.0.q, or "
            "--to-sweep q|k|v|mlp"
        )
    _require_axes(arguments)
    _require_position(arguments)
    senders, receivers = _named_senders(arguments), _named_receivers(arguments)
    _require_pair_flags(arguments)
    pairs = None if arguments.indirect_object else _given_pairs(arguments)
    metric = _metric_of(arguments, pairs)
    sources = arguments.source if arguments.using == "mean" else None
    return Inputs(senders, receivers, pairs, sources, metric)


def _require_axes(arguments: argparse.Namespace) -> None:
    if arguments.using == "mean" and arguments.over is None:
        raise UsageError("--using mean needs its axes; give --over batch or --over batch,pos")
    if arguments.using != "mean" and arguments.over is not None:
        raise UsageError(f"--over goes with --using mean; leave it out for {arguments.using}")


def _require_position(arguments: argparse.Namespace) -> None:
    asked = arguments.positions
    if asked is None or asked == "END" or re.fullmatch(r"-?\d+", asked):
        return
    if asked in _NAMED and arguments.indirect_object:
        return
    hint = "goes with --indirect-object" if asked in _NAMED else "is none"
    raise UsageError(
        f"--positions is a whole number, END or, with --indirect-object, "
        f"{', '.join(_NAMED[:-1])}; {asked!r} {hint}"
    )


def _named_senders(arguments: argparse.Namespace) -> list[Any]:
    from resid_patching.address import SENDERS, parse

    named = list(dict.fromkeys(map(parse, arguments.senders)))
    for sender in named:
        if not isinstance(sender, SENDERS):
            raise UsageError(
                f"{sender} writes nothing to the stream, so no path starts there; senders are "
                "heads such as 9.9, attn.9, mlp.9, mlp.9.2214, embed, pos_embed and the biases"
            )
    return named


def _named_receivers(arguments: argparse.Namespace) -> list[Any]:
    from resid_patching.address import RECEIVERS, parse

    named = list(dict.fromkeys(map(parse, arguments.to or [])))
    for receiver in named:
        if not isinstance(receiver, RECEIVERS):
            raise UsageError(
                f"{receiver} reads nothing of the stream, so no path ends there; receivers are "
                "logits, 10.0.q (or k, v), mlp.10.in and resid_pre.10 (or mid, post)"
            )
    return named


def _require_pair_flags(arguments: argparse.Namespace) -> None:
    flags = {
        "--base": arguments.base,
        "--pairs": arguments.pairs,
        "--indirect-object": arguments.indirect_object,
    }
    given = [flag for flag, value in flags.items() if value]
    if len(given) != 1:
        found = f"got {' and '.join(given)}" if given else "none was given"
        raise UsageError(
            f'prompts come from --base "..." with --source "...", from --pairs FILE, or from '
            f"--indirect-object N; {found}"
        )
    if arguments.source and not arguments.base:
        raise UsageError(f"--source goes with --base; {given[0]} has its own sources")
    drawing = {"--seed": arguments.seed, "--corrupt": arguments.corrupt}
    for flag, value in drawing.items():
        if arguments.indirect_object and value is None:
            choices = "N, such as --seed 0" if flag == "--seed" else "names or swap"
            raise UsageError(f"--indirect-object draws prompts and needs {flag} {choices}")
        if not arguments.indirect_object and value is not None:
            raise UsageError(f"{flag} goes with --indirect-object; leave it out")


def _given_pairs(arguments: argparse.Namespace) -> PromptPairs:
    """The prompts of flags or of a file, with an answer and a foil for each where given."""
    if arguments.base:
        _require_sources(arguments)

    from resid_patching.prompt_sets import PromptPairs, read_pairs

    if arguments.base:
        base = arguments.base
        source = arguments.source if arguments.using == "resample" else base
        return PromptPairs(
            base,
            source,
            spread("answer", arguments.answer, base),
            spread("foil", arguments.foil, base),
            how=_given_text(arguments),
        )
    try:
        pairs = read_pairs(arguments.pairs)
    except OSError as error:
        raise UsageError(f"{arguments.pairs} cannot be read: {error.strerror}") from None
    if not (arguments.answer or arguments.foil):
        return pairs
    if pairs.answers is not None:
        raise UsageError(f"{arguments.pairs} holds the answers; leave out --answer and --foil")
    answers = spread("answer", arguments.answer, list(pairs.base))
    foils = spread("foil", arguments.foil, list(pairs.base))
    return PromptPairs(pairs.base, pairs.source, answers, foils, how=pairs.how)


def _given_text(arguments: argparse.Namespace) -> str:
    n_base, n_source = len(arguments.base), len(arguments.source or [])
    what = "pair" if arguments.using == "resample" else "prompt"
    text = f"{n_base} given {what}{'s' * (n_base > 1)}"
    return f"{text}, {n_source} for the mean" if arguments.using == "mean" else text


def _require_sources(arguments: argparse.Namespace) -> None:
    n_base, n_source = len(arguments.base), len(arguments.source or [])
    if arguments.using == "zero":
        if n_source:
            raise UsageError("--using zero reads no --source; leave it out, or give resample")
    elif arguments.using == "mean" and not n_source:
        raise UsageError("--using mean needs the prompts it is taken over; give --source for each")
    elif arguments.using == "resample" and n_base != n_source:
        raise UsageError(
            f"--base was given {n_base} times and --source {n_source} times; give one source for "
            "each base"
        )
    if arguments.foil and not arguments.answer:
        raise UsageError('--foil needs --answer, such as --answer " Mary"')


def _metric_of(arguments: argparse.Namespace, pairs: PromptPairs | None) -> str:
    """The metric's name; answers that come with the prompts may go unread."""
    if pairs is None:
        if arguments.answer or arguments.foil:
            raise UsageError("--indirect-object has its own answers; leave out --answer and --foil")
        return arguments.metric or "logit-diff"
    if arguments.answer or arguments.foil or pairs.answers is None:
        return metric_name(arguments.metric, arguments.answer, arguments.foil)
    answers, foils = list(pairs.answers), None if pairs.foils is None else list(pairs.foils)
    if arguments.metric not in (None, "logit-diff"):
        foils = None
        answers = answers if arguments.metric in ANSWERED else None
    return metric_name(arguments.metric, answers, foils)
