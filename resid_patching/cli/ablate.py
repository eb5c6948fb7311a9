"""`resid-patching ablate`: what replacing parts of the model does, as a table, JSON and CSV."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import resid_patching as rp
from resid_patching.cli.flags import PROMPTS, answer_flags, position_or
from resid_patching.cli.frame import Parser, UsageError, add_command_flags, load_model
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
from resid_patching.cli.text import TextWindows, require_texts, windows_of
from resid_patching.markup import quoted
from resid_patching.show.report import Facts, section, token_facts

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
        "shuffle: of a source drawn at random, never its own",
        "--seed N": "the seed of the shuffle",
    },
}


def build_parser(prog: str) -> Parser:
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
        add_command_flags(inner, _flags(kind), positions=position_or("each"), seed=int)
    return parser


def _flags(kind: str) -> dict[str, Any]:
    return {
        "targets TARGET*": "attn.6, mlp.0, 9.9 (a head), embed, resid_pre.6, 9.9.z, ...; 9.6+9.9: "
        "both together; 9.6->10.0.q: what a part tells one other",
        "--sweep heads|layers|streams": "add targets: heads: every head; layers: every attention "
        "layer and MLP; streams: every state of the stream",
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
        **answer_flags(),
        "--top N = 15": "rows shown",
        "--continue N": "also print N tokens that the model writes behind each prompt, with and "
        "without each target",
        **ROWS,
    }


def run(arguments: Namespace) -> None:
    """Ablates the targets and prints what that did."""
    asked = _read(arguments)
    team, kept = join(arguments)
    view = load_model(arguments)
    named = [text if "+" in text or "->" in text else rp.parse(text) for text in arguments.targets]
    sites = with_swept(view, named, arguments.sweep)
    on_text = asked.prompts is None
    metric = new_metric(asked.metric, asked.answers, asked.foils, on_text=on_text)
    windows = _windows(view, arguments, arguments.text) if on_text else None
    groups: Any = _of_text(windows, arguments) if windows else [_of_prompts(view, asked, arguments)]
    parts = []
    with Progress(shown=team.is_first) as progress:
        for part, (captured, other) in enumerate(groups):
            n_variants = 1 if arguments.joint else len(sites)
            if arguments.positions == "each":
                n_variants *= captured.prompts.tokens.shape[1]
            progress.expect(windows.estimate if windows else len(captured))
            effect = rp.ablate(
                captured,
                sites,
                _kind(arguments, other),
                metric=metric,
                positions=arguments.positions,
                joint=arguments.joint,
                progress=progress.ticker(captured, n_variants),
                team=team,
                rows=kept(part),
            )
            parts.append(effect)
    if not team.is_first:
        return
    if windows:
        effect = _joined(parts, windows)
        facts = _text_facts(windows, effect)
    else:
        effect, (captured, other) = parts[0], groups[0]
        said = _continued(arguments, captured, other, sites)
        facts = (*token_facts(captured.prompts.token_texts), *said)
    title, part = f"Ablation ({effect.how})", section(effect, facts=facts, top=arguments.top)
    body = body_of(effect, **_known(effect, arguments), prompts=asked.prompts)
    shown = None if on_text else {"prompt": asked.prompts}
    deliver(arguments, view, effect.provenance, title, [part], body, effect.to_frame, prompts=shown)


def _kind(arguments: Namespace, other: rp.Run | None) -> Any:
    pairing = {n: v for n, v in vars(arguments).items() if n in ("pairing", "seed")}
    return new_kind(other, getattr(arguments, "over", None), **pairing)


def _continued(
    arguments: Namespace, captured: rp.Run, other: rp.Run | None, sites: list[Any]
) -> Facts:
    """What the model writes behind each prompt, as it is and with each target replaced."""
    n = getattr(arguments, "continue")
    if n is None:
        return ()
    how = _kind(arguments, other)
    runs = {"as it is, it says": captured}
    for targets in [sites] if arguments.joint else [[site] for site in sites]:
        name = f"{arguments.kind} {' + '.join(map(str, targets))}"
        runs[name] = rp.ablated(captured, targets, how, positions=arguments.positions)
    return tuple((name, tuple(map(quoted, run.generate(n).texts))) for name, run in runs.items())


def _text_facts(windows: TextWindows, effect: rp.Effect) -> Facts:
    n = windows.n_windows
    start = ", each from a beginning-of-sequence token" if effect.provenance.bos else ""
    cut = f"{windows.n_tokens} tokens in {n} window{'s' * (n > 1)} of up to {windows.length}"
    return (("text", (f"{windows.source}:", f"{cut}{start}")),)


def _known(effect: rp.Effect, arguments: Namespace) -> dict[str, Any]:
    """What the command knew, for the JSON."""
    asked = ("text", "text_key", "reference", "over", "source", "pairing", "seed")
    known = {name: value for name, value in vars(arguments).items() if name in asked}
    if effect.has_perplexity:
        known["perplexity"] = effect.perplexity.to_dict("records")
    return known


# What was asked


@dataclass(frozen=True)
class _Asked:
    """What the flags give, read and checked before the model is loaded."""

    metric: str
    prompts: list[str] | None  # None for a text
    answers: list[str] | None  # one for each prompt; for a text, one for all windows
    foils: list[str] | None
    other: list[str] | None = None  # the lines of the reference or source


def _read(arguments: Namespace) -> _Asked:
    if not arguments.targets and arguments.sweep is None:
        raise UsageError("no target was given; give one, such as attn.6 or 9.9, or --sweep heads")
    if arguments.kind == "resample":
        if arguments.pairing == "shuffle" and arguments.seed is None:
            raise UsageError("--pairing shuffle draws at random and needs a seed, such as --seed 0")
        if arguments.pairing == "rowwise" and arguments.seed is not None:
            raise UsageError("--pairing rowwise draws nothing; leave out --seed, or give shuffle")
    if getattr(arguments, "continue") is not None:
        refuse(arguments, "does not go with --continue", "sweep", "text")
        if arguments.positions == "each":
            raise UsageError("--positions each does not go with --continue")
    other = getattr(arguments, "reference", None) or getattr(arguments, "source", None)
    if arguments.text is None:
        refuse(arguments, "goes with --text; none was given", "length", "limit", "text_key")
        prompts, answers, foils = read_prompts(arguments)
        metric = metric_name(arguments.metric, answers, foils)
        return _Asked(metric, prompts, answers, foils, read_lines(other) if other else None)
    refuse(arguments, "does not go with --text; give one of them", "prompt", "prompts")
    if arguments.positions == "each":
        raise UsageError("--positions each goes with --prompt or --prompts, not with --text")
    answers, foils = arguments.answer, arguments.foil
    for name, given in (("answer", answers), ("foil", foils)):
        if given is not None and len(given) > 1:
            raise UsageError(f"--{name} is given once with --text, for all windows")
    require_texts(filter(None, (arguments.text, other)), arguments.text_key)
    return _Asked(metric_name(arguments.metric or "loss", answers, foils), None, answers, foils)


# Groups of prompts that are ablated together, each with the prompts that other values come from


def _of_prompts(
    view: rp.ModelView, asked: _Asked, arguments: Namespace
) -> tuple[rp.Run, rp.Run | None]:
    assert asked.prompts is not None
    bos = arguments.prepend_bos
    other = None if asked.other is None else rp.capture(view, asked.other, prepend_bos=bos)
    return rp.capture(view, asked.prompts, prepend_bos=bos), other


def _windows(view: rp.ModelView, arguments: Namespace, path: str) -> TextWindows:
    length = arguments.length or min(_WINDOW, view.n_ctx)
    aligned = arguments.kind == "resample" or getattr(arguments, "over", None) == "batch"
    return windows_of(view, arguments, path, length, whole=aligned)


def _of_text(windows: TextWindows, arguments: Namespace) -> Iterator[tuple[rp.Run, rp.Run | None]]:
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


def _source_of(ours: rp.Run, theirs: rp.Prompts | None, arguments: Namespace) -> rp.Run:
    """The source's windows that go with a group of the text's."""
    found = 0 if theirs is None else len(theirs)
    rowwise = arguments.pairing == "rowwise"
    if theirs is None or (rowwise and found < len(ours)):
        raise UsageError(
            f"{arguments.source} has fewer windows than {arguments.text}; give a longer source, "
            "or fewer windows with --limit"
        )
    tokens = theirs.tokens[: len(ours)] if rowwise else theirs.tokens
    return rp.capture(ours.view, tokens.tolist())


def _joined(parts: list[rp.Effect], windows: TextWindows) -> rp.Effect:
    """The effects on groups of windows as one effect on all of them."""
    import torch

    first = parts[0]
    if len(parts) == 1:
        return first
    how = first.how
    if first.how != parts[1].how:  # each group of windows has its own group of the source
        how = f"{first.how}, the first of {len(parts)} groups of windows"
    names = ["values", "baseline", "patched", "direct"]
    names += [] if first.weights is None else ["weights"]
    return dataclasses.replace(
        first,
        axes=(first.axes[0], rp.Axis("batch", tuple(range(windows.n_windows)))),
        provenance=dataclasses.replace(
            first.provenance,
            tokens=windows.hash,
            n_prompts=windows.n_windows,
            plan=first.provenance.plan.replace(first.how, how),
        ),
        how=how,
        routes=tuple(sorted({route for part in parts for route in part.routes})),
        **{name: torch.cat([getattr(part, name) for part in parts], -1) for name in names},
    )
