"""`resid-patching ablate`: what replacing parts of the model does, as a table, JSON and CSV."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import resid_patching as rp
from resid_patching.cli.flags import PROMPTS, add_command_flags, answers
from resid_patching.cli.frame import Parser, UsageError, load_model
from resid_patching.cli.inputs import (
    METRICS,
    metric_name,
    new_kind,
    new_metric,
    read_lines,
    read_prompts,
    refuse,
    with_swept,
)
from resid_patching.cli.output import body_of, deliver
from resid_patching.cli.progress import ROWS, Progress, join
from resid_patching.cli.text import TextWindows, require_texts
from resid_patching.show.report import section, token_facts

if TYPE_CHECKING:
    from resid_patching.show.report import Facts

_WINDOW = 512
_KINDS = {
    "zero": "the target writes nothing",
    "mean": "the target is replaced by its mean over other prompts",
    "resample": "the target is replaced by its value on other prompts",
}
_LIKE_TEXT = "a UTF-8 file, one prompt a line; with --text: a text, cut into windows like it"
_KIND_FLAGS = {
    "zero": {},
    "mean": {
        "--reference FILE !": f"what the mean is taken over: {_LIKE_TEXT}",
        "--over batch|batch,pos !": "batch: one mean for each position; batch,pos: one for all "
        "positions",
    },
    "resample": {
        "--source FILE !": f"where values come from: {_LIKE_TEXT}",
        "--pairing rowwise|shuffle = rowwise": "rowwise: prompt i takes the values of source i; "
        "shuffle: of a drawn one, never its own",
        "--seed N": "the seed of the shuffle",
    },
}


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The flags of `ablate`, one sub-command a kind."""
    parser = Parser(
        prog=prog,
        description="Replaces parts of the model and measures what that does to a metric. The "
        "kind comes first, because zero, mean and resample answer different questions.",
        epilog=f"Each kind explains itself: {prog} zero --help",
    )
    kinds = parser.add_subparsers(
        title="kinds", dest="kind", metavar="zero|mean|resample", required=True
    )
    for kind, text in _KINDS.items():
        inner = kinds.add_parser(kind, help=text, description=f"{kind}: {text}.")
        add_command_flags(inner, _flags(kind), positions=_position, seed=int)
    return parser


def _flags(kind: str) -> dict[str, Any]:
    return {
        "targets TARGET*": "attn.6, mlp.0, 9.9 (a head), embed, resid_pre.6, 9.9.z, ...",
        "--sweep heads|layers|streams": "also heads: every head; layers: every attention layer and "
        "MLP; streams: every stream state",
        "--joint": "replace all targets together (unset: one at a time)",
        "--positions P|each": "replace at this position alone, from 0, or from the end if "
        "negative; each: at every position in turn (unset: at all together)",
        **_KIND_FLAGS[kind],
        **PROMPTS,
        "--text FILE": "a UTF-8 text of any length, or a .jsonl file, cut into windows",
        "--text-key COLUMN": "what holds the text in a .jsonl file (default: text)",
        "--length N": f"tokens of a window, its first token included (default: {_WINDOW}, or the "
        "context where that is shorter)",
        "--limit N": "windows taken from the text (unset: all)",
        f"--metric {METRICS}": "what is measured (unset: logit-diff with --answer and --foil, loss "
        "with --text)",
        **answers(),
        "--top N = 15": "rows shown",
        **ROWS,
    }


def _position(text: str) -> int | str:
    if text == "each":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a position nor each") from None


def run(arguments: argparse.Namespace) -> None:
    """Ablates the targets and prints what that did."""
    asked = _read(arguments)
    team, file = join(arguments)
    view = load_model(arguments)

    from resid_patching.ablation import Rows

    sites = with_swept(view, [rp.parse(text) for text in arguments.targets], arguments.sweep)
    on_text = asked.prompts is None
    metric = new_metric(asked.metric, asked.answers, asked.foils, on_text=on_text)
    pairing = {n: v for n, v in vars(arguments).items() if n in ("pairing", "seed")}
    windows = _windows(view, arguments, arguments.text) if on_text else None
    groups = (
        _of_prompts(view, asked, arguments) if windows is None else _of_text(windows, arguments)
    )
    parts, token_texts = [], ()
    with Progress(shown=team.is_first) as progress:
        for part, (captured, other) in enumerate(groups):
            token_texts = captured.prompts.token_texts
            n_variants = 1 if arguments.joint else len(sites)
            if arguments.positions == "each":
                n_variants *= captured.prompts.tokens.shape[1]
            progress.expect(len(captured) if windows is None else windows.estimate)
            effect = rp.ablate(
                captured,
                sites,
                new_kind(arguments.kind, other, getattr(arguments, "over", None), **pairing),
                metric=metric,
                positions=arguments.positions,
                joint=arguments.joint,
                progress=progress.ticker(captured, n_variants),
                team=team,
                rows=None if file is None else Rows(file, part),
            )
            parts.append(effect)
    if not team.is_first:
        return
    effect = parts[0] if windows is None or len(parts) == 1 else _joined(parts, windows)
    facts = token_facts(token_texts) if windows is None else _text_facts(windows, effect)
    deliver(
        arguments,
        view,
        effect.provenance,
        f"Ablation ({effect.how})",
        [section(effect, facts=facts, top=arguments.top)],
        body=body_of(effect, **_known(effect, arguments), prompts=asked.prompts),
        frame=effect.to_frame,
        prompts=None if asked.prompts is None else {"prompt": asked.prompts},
    )


def _text_facts(windows: TextWindows, effect: rp.Effect) -> Facts:
    n = windows.n_windows
    start = ", each from a beginning-of-sequence token" if effect.provenance.bos else ""
    cut = f"{windows.n_tokens} tokens in {n} window{'s' * (n > 1)} of up to {windows.length}"
    return (("text", (f"{windows.source}:", f"{cut}{start}")),)


def _known(effect: rp.Effect, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the command knew, for the JSON."""
    asked = ("text", "text_key", "reference", "over", "source", "pairing", "seed")
    known = {name: value for name, value in vars(arguments).items() if name in asked}
    if effect.has_perplexity:
        known["perplexity"] = effect.perplexity.to_dict("records")
    return known


# What was asked


@dataclass(frozen=True)
class _Asked:
    """What the flags give, read and checked before the model is loaded.

    Attributes:
        metric: the metric's name.
        prompts: the prompts, or None for a text.
        answers: an answer for each prompt (for a text: for all windows).
        foils: likewise.
        other: the lines of the reference or source; None for a text or where there is none.
    """

    metric: str
    prompts: list[str] | None
    answers: list[str] | None
    foils: list[str] | None
    other: list[str] | None = None


def _read(arguments: argparse.Namespace) -> _Asked:
    if not arguments.targets and arguments.sweep is None:
        raise UsageError(
            "no target was given; name one, such as attn.6 or 9.9, or --sweep heads|layers|streams"
        )
    if arguments.kind == "resample":
        if arguments.pairing == "shuffle" and arguments.seed is None:
            raise UsageError("--pairing shuffle draws at random and needs a seed, such as --seed 0")
        if arguments.pairing == "rowwise" and arguments.seed is not None:
            raise UsageError("--pairing rowwise draws nothing; leave out --seed, or give shuffle")
    other = getattr(arguments, "reference", None) or getattr(arguments, "source", None)
    if arguments.text is None:
        refuse(arguments, "goes with --text; none was given", "length", "limit", "text_key")
        prompts, answers, foils = read_prompts(arguments)
        metric = metric_name(arguments.metric, answers, foils)
        return _Asked(metric, prompts, answers, foils, read_lines(other) if other else None)
    refuse(arguments, "does not go with --text; give one of them", "prompt", "prompts")
    if arguments.positions == "each":
        raise UsageError(
            "--positions each goes with --prompt or --prompts; for a text give one position, or "
            "none"
        )
    answers, foils = arguments.answer, arguments.foil
    for name, given in (("answer", answers), ("foil", foils)):
        if given is not None and len(given) > 1:
            raise UsageError(f"--{name} is given once with --text, for all windows")
    require_texts(filter(None, (arguments.text, other)), arguments.text_key)
    return _Asked(metric_name(arguments.metric or "loss", answers, foils), None, answers, foils)


# Groups of prompts that are ablated together, each with the prompts that other values come from

_Group = tuple[rp.Run, "rp.Run | None"]


def _of_prompts(
    view: rp.ModelView, asked: _Asked, arguments: argparse.Namespace
) -> Iterator[_Group]:
    assert asked.prompts is not None
    bos = arguments.prepend_bos
    other = None if asked.other is None else rp.capture(view, asked.other, prepend_bos=bos)
    yield rp.capture(view, asked.prompts, prepend_bos=bos), other


def _windows(view: rp.ModelView, arguments: argparse.Namespace, path: str) -> TextWindows:
    return TextWindows(
        view,
        path,
        arguments.length or min(_WINDOW, view.n_ctx),
        arguments.prepend_bos,
        arguments.limit,
        whole=arguments.kind == "resample" or getattr(arguments, "over", None) == "batch",
        text_key=arguments.text_key or "text",
    )


def _of_text(windows: TextWindows, arguments: argparse.Namespace) -> Iterator[_Group]:
    """Some windows of a text at a time, so that memory does not grow with it."""
    view, other, sources = windows.view, None, iter(())
    if arguments.kind == "mean":  # which streams over the reference and keeps nothing of it
        other = rp.capture(view, list(_windows(view, arguments, arguments.reference).rows()))
    if arguments.kind == "resample":
        sources = _windows(view, arguments, arguments.source).groups()
    for prompts in windows.groups():
        captured = rp.capture(view, prompts)
        if arguments.kind == "resample":
            other = _source_of(captured, next(sources, None), arguments)
        yield captured, other


def _source_of(ours: rp.Run, theirs: rp.Prompts | None, arguments: argparse.Namespace) -> rp.Run:
    """The source's windows that go with a group of the text's."""
    found = 0 if theirs is None else len(theirs)
    rowwise = arguments.pairing == "rowwise"
    if theirs is None or (rowwise and found < len(ours)):
        raise UsageError(
            f"{arguments.source} has fewer windows than {arguments.text}; give a longer source, "
            "or --limit the windows"
        )
    tokens = theirs.tokens[: len(ours)] if rowwise else theirs.tokens
    return rp.capture(ours.view, tokens.tolist())


def _joined(parts: list[rp.Effect], windows: TextWindows) -> rp.Effect:
    """The effects on groups of windows as one effect on all of them."""
    import torch

    first = parts[0]
    how = first.how
    if first.how != parts[1].how:  # each group of windows has its own group of the source
        how = f"{first.how}, the first of {len(parts)} groups of windows"
    weights = [part.weights for part in parts if part.weights is not None]
    return dataclasses.replace(
        first,
        values=torch.cat([part.values for part in parts], 1),
        axes=(first.axes[0], rp.Axis("batch", tuple(range(windows.n_windows)))),
        provenance=dataclasses.replace(
            first.provenance,
            tokens=windows.hash,
            n_prompts=windows.n_windows,
            plan=first.provenance.plan.replace(first.how, how),
        ),
        how=how,
        baseline=torch.cat([part.baseline for part in parts]),
        patched=torch.cat([part.patched for part in parts], 1),
        direct=torch.cat([part.direct for part in parts], 1),
        weights=torch.cat(weights) if weights else None,
        routes=tuple(sorted({route for part in parts for route in part.routes})),
    )
