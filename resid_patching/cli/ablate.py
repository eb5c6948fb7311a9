"""`resid-patching ablate`: what replacing parts of the model does, as a table, JSON and CSV."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resid_patching.cli.flags import add_flags
from resid_patching.cli.frame import (
    Parser,
    UsageError,
    add_model_flags,
    add_output_flags,
    load_model,
)
from resid_patching.cli.inputs import (
    add_answer_flags,
    add_prompt_flags,
    read_lines,
    read_prompts,
    with_swept,
)
from resid_patching.cli.output import body_of, deliver, model_text, require_files
from resid_patching.cli.progress import Progress
from resid_patching.cli.scores import METRIC_HELP, METRICS, metric_name, new_metric, shared
from resid_patching.cli.sharing import Sharing, add_rows_flag, join
from resid_patching.cli.text import TextWindows, require_texts

if TYPE_CHECKING:
    from resid_patching.ablation import Effect
    from resid_patching.models import ModelView
    from resid_patching.prompts import Prompts
    from resid_patching.run import Run
    from resid_patching.show.report import Facts

_WINDOW = 512
_SWEEPS = {
    "heads": "every head",
    "layers": "every attention layer and MLP",
    "streams": "every stream state",
}
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
        _add_flags(kinds.add_parser(kind, help=text, description=f"{kind}: {text}."), kind)
    return parser


def _add_flags(parser: argparse.ArgumentParser, kind: str) -> None:
    sweeps = "; ".join(f"{name}: {text}" for name, text in _SWEEPS.items())
    add_flags(
        parser,
        {
            "targets TARGET*": "attn.6, mlp.0, 9.9 (a head), embed, resid_pre.6, 9.9.z, ...; "
            "9.6+9.9: both together",
            f"--sweep {'|'.join(_SWEEPS)}": f"also {sweeps}",
            "--joint": "replace all targets together (unset: one at a time)",
            "--positions P|each": "replace at this position alone, from 0, or from the end if "
            "negative; each: at every position in turn (unset: at all together)",
            **_KIND_FLAGS[kind],
        },
        positions=_position,
        seed=int,
    )
    add_prompt_flags(parser)
    add_flags(
        parser,
        {
            "--text FILE": "a UTF-8 text of any length, or a .jsonl file, cut into windows",
            "--text-key COLUMN": "what holds the text in a .jsonl file (default: text)",
            "--length N": f"tokens of a window, its first token included (default: {_WINDOW}, or "
            "the context where that is shorter)",
            "--limit N": "windows taken from the text (unset: all)",
            f"--metric {'|'.join(METRICS)}": f"{METRIC_HELP[:-1]}, loss with --text)",
        },
    )
    add_answer_flags(parser)
    add_flags(
        parser,
        {
            "--top N = 15": "rows shown",
            "--continue N": "also print N tokens that the model writes behind each prompt, with "
            "and without each target",
        },
    )
    add_rows_flag(parser)
    add_model_flags(parser)
    add_output_flags(parser)


def _position(text: str) -> int | str:
    if text == "each":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a position nor each") from None


@dataclass(frozen=True)
class _Inputs:
    """What the flags give, read and checked before the model is loaded.

    Attributes:
        prompts: the prompts, or None for a text.
        answers: an answer for each prompt (for a text: for all windows).
        foils: likewise.
        metric: the metric's name.
        other: the lines of the reference or source; None for a text or where there is none.
    """

    prompts: list[str] | None
    answers: list[str] | None
    foils: list[str] | None
    metric: str
    other: list[str] | None


def run(arguments: argparse.Namespace) -> None:
    """Ablates the targets and prints what that did."""
    inputs = _read_inputs(arguments)
    require_files(arguments)
    sharing = join(arguments)
    model, stand_in = load_model(arguments)

    from resid_patching.models import ModelView
    from resid_patching.show.html import texts_frame
    from resid_patching.show.report import Document, section

    view = ModelView(model)
    sites = _targets(view, arguments)
    with Progress(shown=sharing.team.is_first) as progress:
        work = _Ablation(arguments, sites, sharing, progress)
        if inputs.prompts is None:
            effect, facts = _on_text(view, work, inputs)
        else:
            effect, facts = _on_prompts(view, work, inputs)
    if not sharing.team.is_first:
        return
    origin = effect.provenance
    report = Document(
        title=f"Ablation ({effect.how}), {origin.model}",
        origin=origin,
        model=model_text(view, origin),
        sections=(section(effect, facts=facts, top=arguments.top),),
        prompts=None if inputs.prompts is None else texts_frame({"prompt": inputs.prompts}),
        stand_in=stand_in,
    )
    body = body_of(effect, **_known(effect, arguments, inputs), stand_in=stand_in)
    deliver(arguments, report, body=body, frame=effect.to_frame)


# What was asked


def _read_inputs(arguments: argparse.Namespace) -> _Inputs:
    if not arguments.targets and arguments.sweep is None:
        raise UsageError(
            "no target was given; name one, such as attn.6 or 9.9, or --sweep heads|layers|streams"
        )
    _require_seed(arguments)
    _require_continued(arguments)
    other = getattr(arguments, "reference", None) or getattr(arguments, "source", None)
    if arguments.text is not None:
        if arguments.prompt or arguments.prompts:
            raise UsageError("--text does not go with --prompt or --prompts; give one of them")
        if arguments.positions == "each":
            raise UsageError(
                "--positions each goes with --prompt or --prompts; for a text give one position, "
                "or none"
            )
        require_texts(filter(None, (arguments.text, other)), arguments.text_key)
        answers, foils = _once("answer", arguments.answer), _once("foil", arguments.foil)
        metric = metric_name(arguments.metric or "loss", answers, foils)
        return _Inputs(None, answers, foils, metric, None)
    for flag in ("length", "limit", "text_key"):
        if getattr(arguments, flag) is not None:
            raise UsageError(f"--{flag.replace('_', '-')} goes with --text; none was given")
    prompts, answers, foils = read_prompts(arguments)
    metric = metric_name(arguments.metric, answers, foils)
    lines = None if other is None else read_lines(other)
    return _Inputs(prompts, answers, foils, metric, lines)


def _require_seed(arguments: argparse.Namespace) -> None:
    pairing, seed = getattr(arguments, "pairing", None), getattr(arguments, "seed", None)
    if pairing == "shuffle" and seed is None:
        raise UsageError("--pairing shuffle draws at random and needs a seed, such as --seed 0")
    if pairing == "rowwise" and seed is not None:
        raise UsageError("--pairing rowwise draws nothing; leave out --seed, or give shuffle")


def _require_continued(arguments: argparse.Namespace) -> None:
    if getattr(arguments, "continue") is None:
        return
    without = {"--sweep": arguments.sweep, "--text": arguments.text}
    if arguments.positions == "each":
        without["--positions each"] = True
    if given := [flag for flag, value in without.items() if value is not None]:
        raise UsageError(f"--continue writes on once for each target, without {given[0]}")


def _once(name: str, given: list[str] | None) -> list[str] | None:
    if given is not None and len(given) > 1:
        raise UsageError(f"--{name} is given once with --text, for all windows")
    return given


def _targets(view: ModelView, arguments: argparse.Namespace) -> list[Any]:
    from resid_patching.address import parse

    named = [text if "+" in text else parse(text) for text in arguments.targets]
    return with_swept(view, named, arguments.sweep)


# Running


@dataclass(frozen=True)
class _Ablation:
    """What is ablated, by whom, and who is told how far it is."""

    arguments: argparse.Namespace
    sites: list[Any]
    sharing: Sharing
    progress: Progress

    def ablate(self, captured: Run, kind: Any, metric: Any, part: int = 0) -> Effect:
        """Ablates the targets in one group of prompts."""
        from resid_patching.ablation import ablate

        n_variants = 1 if self.arguments.joint else len(self.sites)
        if self.arguments.positions == "each":
            n_variants *= captured.prompts.tokens.shape[1]
        return ablate(
            captured,
            self.sites,
            kind,
            metric=metric,
            positions=self.arguments.positions,
            joint=self.arguments.joint,
            progress=self.progress.ticker(captured, n_variants),
            **self.sharing.options(part),
        )

    def continued(self, captured: Run, kind: Any) -> Facts:
        """What the model writes behind each prompt, as it is and with each target replaced."""
        from resid_patching.ablation import ablated
        from resid_patching.markup import quoted

        n = getattr(self.arguments, "continue")
        if n is None or not self.sharing.team.is_first:
            return ()
        targets = [self.sites] if self.arguments.joint else [[site] for site in self.sites]
        runs = {"as it is, it says": captured}
        for sites in targets:
            name = f"{self.arguments.kind} {' + '.join(map(str, sites))}"
            runs[name] = ablated(captured, sites, kind, positions=self.arguments.positions)
        return tuple((k, tuple(map(quoted, run.generate(n).texts))) for k, run in runs.items())


def _on_prompts(view: ModelView, work: _Ablation, inputs: _Inputs) -> tuple[Effect, Facts]:
    from resid_patching.run import capture
    from resid_patching.show.report import token_facts

    arguments = work.arguments
    prompts = inputs.prompts
    assert prompts is not None
    captured = capture(view, prompts, prepend_bos=arguments.prepend_bos)
    other = None
    if inputs.other is not None:
        other = capture(view, inputs.other, prepend_bos=arguments.prepend_bos)
    metric = new_metric(inputs.metric, shared(inputs.answers), shared(inputs.foils), on_text=False)
    work.progress.expect(len(prompts))
    kind = _kind(arguments, other)
    effect = work.ablate(captured, kind, metric)
    facts = token_facts(captured.prompts.token_texts)
    return effect, (*facts, *work.continued(captured, kind))


def _on_text(view: ModelView, work: _Ablation, inputs: _Inputs) -> tuple[Effect, Facts]:
    """Ablates a text group by group of its windows, so that memory does not grow with it."""
    from resid_patching.run import capture

    arguments = work.arguments
    aligned = arguments.kind == "resample" or getattr(arguments, "over", None) == "batch"
    windows = _windows(view, arguments, arguments.text, aligned)
    other = None
    if arguments.kind == "mean":
        other = _whole_text(view, _windows(view, arguments, arguments.reference, aligned))
    sources = _sources(view, arguments)
    answer = inputs.answers[0] if inputs.answers else None
    foil = inputs.foils[0] if inputs.foils else None
    metric = new_metric(inputs.metric, answer, foil, on_text=True)
    parts = []
    for part, prompts in enumerate(windows.groups()):
        work.progress.expect(windows.estimate)
        captured = capture(view, prompts)
        if arguments.kind == "resample":
            other = _source_of(captured, next(sources, None), arguments)
        parts.append(work.ablate(captured, _kind(arguments, other), metric, part))
    effect = joined(parts, windows.hash, windows.n_windows)
    n, length = windows.n_windows, windows.length
    start = ", each from a beginning-of-sequence token" if effect.provenance.bos else ""
    said = f"{windows.n_tokens} tokens in {n} window{'s' * (n > 1)} of up to {length}{start}"
    return effect, (("text", (f"{windows.source}:", said)),)


def _windows(view: ModelView, arguments: argparse.Namespace, path: str, whole: bool) -> TextWindows:
    length = arguments.length or min(_WINDOW, view.n_ctx)
    key = arguments.text_key or "text"
    return TextWindows(view, path, length, arguments.prepend_bos, arguments.limit, whole, key)


def _whole_text(view: ModelView, windows: TextWindows) -> Run:
    """All windows of a text as one run; a mean streams over it and keeps nothing of it."""
    from resid_patching.run import capture

    rows = [
        row[:length]
        for prompts in windows.groups()
        for row, length in zip(prompts.tokens.tolist(), prompts.lengths, strict=True)
    ]
    return capture(view, rows)


def _sources(view: ModelView, arguments: argparse.Namespace) -> Iterator[Prompts]:
    if arguments.kind != "resample":
        return iter(())
    return _windows(view, arguments, arguments.source, True).groups()


def _source_of(ours: Run, theirs: Prompts | None, arguments: argparse.Namespace) -> Run:
    """The source's windows that go with a group of the text's."""
    from resid_patching.run import capture

    found = 0 if theirs is None else len(theirs)
    rowwise = arguments.pairing == "rowwise"
    if theirs is None or (rowwise and found < len(ours)):
        raise UsageError(
            f"{arguments.source} has fewer windows than {arguments.text}; give a longer source, "
            "or --limit the windows"
        )
    tokens = theirs.tokens[: len(ours)] if rowwise else theirs.tokens
    return capture(ours.view, tokens.tolist())


def _kind(arguments: argparse.Namespace, other: Run | None) -> Any:
    from resid_patching.ablation import Mean, Resample, Zero

    if arguments.kind == "zero":
        return Zero()
    assert other is not None
    if arguments.kind == "mean":
        return Mean(other, over=tuple(arguments.over.split(",")))
    return Resample(other, pairing=arguments.pairing, seed=arguments.seed)


# Files


def _known(effect: Effect, arguments: argparse.Namespace, inputs: _Inputs) -> dict[str, Any]:
    """What the command knew, for the JSON."""
    known = {"command": f"ablate {arguments.kind}", "prompts": inputs.prompts}
    for flag in ("text", "text_key", "reference", "over", "source", "pairing", "seed"):
        if hasattr(arguments, flag):
            known[flag] = getattr(arguments, flag)
    if effect.has_perplexity:
        known["perplexity"] = effect.perplexity.replace([math.inf], None).to_dict("records")
    return known


def joined(parts: list[Effect], tokens: str, n_prompts: int) -> Effect:
    """The effects on groups of windows as one effect on all of them.

    Args:
        parts: one effect or more, of the same targets, kind and metric.
        tokens: hash of all prompts.
        n_prompts: how many prompts there are in all.
    """
    import torch

    from resid_patching.result import Axis

    first = parts[0]
    if len(parts) == 1:
        return first
    how = first.how
    if first.how != parts[1].how:  # each group of windows has its own group of the source
        how = f"{first.how}, the first of {len(parts)} groups of windows"
    origin = dataclasses.replace(
        first.provenance,
        tokens=tokens,
        n_prompts=n_prompts,
        plan=first.provenance.plan.replace(first.how, how),
    )
    weights = None
    if first.weights is not None:
        weights = torch.cat([part.weights for part in parts if part.weights is not None])
    return dataclasses.replace(
        first,
        values=torch.cat([part.values for part in parts], 1),
        axes=(first.axes[0], Axis("batch", tuple(range(n_prompts)))),
        provenance=origin,
        how=how,
        baseline=torch.cat([part.baseline for part in parts]),
        patched=torch.cat([part.patched for part in parts], 1),
        direct=torch.cat([part.direct for part in parts], 1),
        weights=weights,
        routes=tuple(sorted({route for part in parts for route in part.routes})),
    )
