"""The flags of `path-patch`: who sends, who reads, which prompts; read before a model is loaded."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import resid_patching as rp
from resid_patching.cli.flags import answer_flags
from resid_patching.cli.frame import UsageError
from resid_patching.cli.inputs import METRICS, metric_name, refuse, spread
from resid_patching.cli.progress import ROWS

NAMED = ("IO", "S1", "S1+1", "S2")
FLAGS = {
    "senders SENDER*": "what writes: 9.9 (a head), attn.9, mlp.9, embed, ...",
    "--sweep heads|layers": "add senders: heads: every head; layers: every attention layer and MLP",
    "--joint": "all senders together (unset: one at a time)",
    "path": {
        "--to RECEIVER...": "what receives: logits, 10.0.q (or k, v), mlp.10.in, resid_pre.10 (or "
        "mid, post); several are alternatives side by side",
        "--to-sweep q|k|v|mlp": "add every receiver of this kind",
        "--together": "all receivers are written together (unset: one at a time, side by side)",
        "--mlps freeze|recompute !": "freeze: MLPs between sender and receiver keep their values; "
        "recompute: they answer the change",
        "--using zero|mean|resample !": "what the sender's value is replaced with; zero: 0; "
        "mean: its mean over the source prompts; resample: its value in the source prompt of the "
        "same row",
        "--over batch|batch,pos": "axes of --using mean: batch: one mean for each position; "
        "batch,pos: one for all",
        "--positions P": "the sender's position, from 0, or from the end if negative, or END; with "
        f"--indirect-object also {', '.join(NAMED)} (unset: all)",
    },
    "prompts": {
        "--base TEXT...": "the prompt that is run and changed",
        "--source TEXT...": "the prompt that other values come from: one for each --base, or with "
        "--using mean as many as the mean is taken over",
        "--pairs FILE": "tab-separated UTF-8 whose first line names base, source and, if any, "
        "answer and foil; or a .jsonl file with these keys",
        "--indirect-object N": 'draw N pairs like "When Mary and John went to the store, John gave '
        'a drink to"',
        "--seed N": "the seed that draws these pairs",
        "--corrupt names|swap": "with --indirect-object; names: three other names in the source; "
        "swap: the subject of the second clause swapped in the source",
    },
    f"--metric {METRICS}": "what is measured (unset: logit-diff with --answer and --foil)",
    **answer_flags(),
    "--linearised": "also the value with receivers' norms frozen, an approximation",
    "--top N = 15": "rows shown",
    **ROWS,
}


@dataclass(frozen=True)
class Inputs:
    """What the flags give, read and checked before the model is loaded."""

    senders: list[Any]  # those that are named
    receivers: list[Any]
    pairs: rp.PromptPairs | None  # None where they are drawn for the model
    metric: str


def read_inputs(arguments: Namespace) -> Inputs:
    """Reads and checks the flags."""
    if not arguments.senders and arguments.sweep is None:
        raise UsageError("no sender was given; give one, such as 9.9 or mlp.0, or --sweep heads")
    if not arguments.to and arguments.to_sweep is None:
        raise UsageError("no receiver was given; give one, such as --to logits, or --to-sweep q")
    if arguments.rows is not None:
        refuse(arguments, "is computed anew each time and not kept by --rows", "linearised")
    if arguments.using == "mean" and arguments.over is None:
        raise UsageError("--using mean needs its axes; give --over batch or --over batch,pos")
    if arguments.using != "mean":
        refuse(arguments, f"goes with --using mean; leave it out for {arguments.using}", "over")
    if arguments.positions in NAMED and not arguments.indirect_object:
        raise UsageError(f"--positions: {arguments.positions!r} goes with --indirect-object")
    _require_one_set(arguments)

    from resid_patching.paths import receiver_set, require_senders

    senders = list(dict.fromkeys(map(rp.parse, arguments.senders)))
    if senders:
        require_senders(senders)
    receivers = list(dict.fromkeys(receiver_set(arguments.to))) if arguments.to else []
    pairs = None if arguments.indirect_object else _given_pairs(arguments)
    return Inputs(senders, receivers, pairs, _metric_of(arguments, pairs))


def _require_one_set(arguments: Namespace) -> None:
    """Refuses prompts from two places or from none, and flags that another place has."""
    flags = ("base", "pairs", "indirect_object")
    given = [f"--{flag.replace('_', '-')}" for flag in flags if getattr(arguments, flag)]
    if len(given) != 1:
        found = f"got {' and '.join(given)}" if given else "none was given"
        raise UsageError(
            f'prompts come from --base "..." with --source "...", from --pairs FILE, or from '
            f"--indirect-object N; {found}"
        )
    if not arguments.base:
        refuse(arguments, f"goes with --base; {given[0]} has its own sources", "source")
    if not arguments.indirect_object:
        refuse(arguments, "goes with --indirect-object; leave it out", "seed", "corrupt")
    elif arguments.seed is None:
        raise UsageError("--indirect-object draws prompts and needs --seed N, such as --seed 0")
    elif arguments.corrupt is None:
        raise UsageError("--indirect-object draws prompts and needs --corrupt names or swap")


def _given_pairs(arguments: Namespace) -> rp.PromptPairs:
    """The prompts of flags or of a file, with an answer and a foil for each where given."""
    pairs = _typed_pairs(arguments) if arguments.base else rp.read_pairs(arguments.pairs)
    if pairs.answers is not None:
        why = f"was given, but {arguments.pairs} holds the answers"
        refuse(arguments, why, "answer", "foil")
        return pairs
    answers = spread("answer", arguments.answer, pairs.base)
    return dataclasses.replace(
        pairs, answers=answers, foils=spread("foil", arguments.foil, pairs.base)
    )


def _typed_pairs(arguments: Namespace) -> rp.PromptPairs:
    base, source = arguments.base, arguments.source or []
    n, using = len(base), arguments.using
    what = "pair" if using == "resample" else "prompt"
    how = f"{n} given {what}{'s' * (n > 1)}"
    how += f", {len(source)} for the mean" if using == "mean" else ""
    if using == "zero":
        refuse(arguments, "is not read by --using zero; leave it out, or give resample", "source")
    if using == "mean" and not source:
        raise UsageError("--using mean needs the prompts it is taken over; give each as --source")
    if using == "resample" and n != len(source):
        raise UsageError(
            f"--base was given {n} times and --source {len(source)} times; give one source for "
            "each base"
        )
    return rp.PromptPairs(base, source if using == "resample" else base, how=how)


def _metric_of(arguments: Namespace, pairs: rp.PromptPairs | None) -> str:
    """The metric's name; answers that come with the prompts may go unread."""
    asked = arguments.metric
    if pairs is None:
        refuse(arguments, "is not read: --indirect-object has its own answers", "answer", "foil")
    elif arguments.answer or arguments.foil or pairs.answers is None:
        return metric_name(asked, arguments.answer, arguments.foil)
    elif asked in (None, "logit-diff"):
        return metric_name(asked, pairs.answers, pairs.foils)
    return asked or "logit-diff"
