"""`resid-patching path-patch`: what senders tell receivers, as tables, JSON and CSV."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resid_patching.cli.frame import (
    Parser,
    UsageError,
    add_model_flags,
    add_output_flags,
    load_model,
)
from resid_patching.cli.inputs import with_swept
from resid_patching.cli.output import body_of, deliver, model_text, require_files
from resid_patching.cli.path_inputs import Inputs, add_path_patch_flags, read_inputs
from resid_patching.cli.progress import Progress
from resid_patching.cli.scores import ANSWERED, new_metric, shared
from resid_patching.cli.sharing import Sharing, add_rows_flag, join
from resid_patching.markup import quoted

if TYPE_CHECKING:
    from torch import Tensor

    from resid_patching.ablation import Effect, Path
    from resid_patching.models import ModelView
    from resid_patching.prompt_sets import Difference, PromptPairs
    from resid_patching.prompts import Prompts
    from resid_patching.run import Run
    from resid_patching.show.report import Facts

_PAIRS, _TOKENS = 4, 60  # that are shown
_REPLACED = {
    "zero": "at zero",
    "mean": "at its mean over the source prompts",
    "resample": "at its value in source",
}
_MLPS = {
    "recompute": "recompute: MLPs between sender and receiver answer the change",
    "freeze": "freeze: MLPs between sender and receiver keep their values",
}
_WITHOUT = {
    "zero": "without the message",
    "mean": "with the mean message",
    "resample": "with the source's message",
}


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The flags of `path-patch`."""
    parser = Parser(
        prog=prog,
        description="Replaces what senders tell chosen receivers, and nothing else they do, and "
        "measures what that does to a metric. Other heads keep their values between the two.",
        epilog=f"Example: {prog} --sweep heads --to logits --mlps recompute --using resample "
        "--indirect-object 16 --seed 0 --corrupt names --positions END",
    )
    add_path_patch_flags(parser)
    add_rows_flag(parser)
    add_model_flags(parser)
    add_output_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Patches the paths and prints what that did."""
    inputs = read_inputs(arguments)
    if arguments.rows is not None and arguments.linearised:
        raise UsageError("--linearised is computed anew each time and not kept by --rows; drop one")
    require_files(arguments)
    sharing = join(arguments)
    model, stand_in = load_model(arguments)

    from resid_patching.models import ModelView
    from resid_patching.show.html import texts_frame
    from resid_patching.show.report import Document, section

    view = ModelView(model)
    pairs = inputs.pairs or _drawn(view, arguments)
    found = _patch(view, pairs, inputs, arguments, sharing)
    if found is None:
        return
    effect = found.effect
    more = {
        "recovery": None if found.small_gap else found.recovery,
        "linearised": None if found.linearised is None else effect.mean(found.linearised),
    }
    part = section(
        effect,
        facts=_facts(found, pairs, arguments),
        caveats=_caveats(found, arguments),
        more={
            n: v.detach().cpu().double().flatten().tolist()
            for n, v in more.items()
            if v is not None
        },
        top=arguments.top,
    )
    sources = None if found.sources is None else list(found.sources)[: len(pairs)]
    report = Document(
        title=f"Path patching, {effect.provenance.model}",
        origin=effect.provenance,
        model=model_text(view, effect.provenance),
        sections=(part,),
        prompts=texts_frame({"base": list(pairs.base), "source": sources}),
        stand_in=stand_in,
    )
    body = body_of(effect, **_known(found, pairs, arguments), stand_in=stand_in)
    deliver(arguments, report, body=body, frame=lambda: _frame(found))


@dataclass(frozen=True, eq=False)
class Found:
    """What a command found.

    Attributes:
        effect: the effects.
        sources: the texts that other values come from; None for zero.
        prompts: the base prompts as tokens.
        differing: where base and source differ, for each pair; None where none is resampled.
        linearised: effects with the receivers' norms frozen, shaped as the effect's values.
        source: the metric in the source [batch].
        recovery: shares of the way from base to source, [target] or [target, receiver].
        small_gap: whether base and source are too close for shares to mean much.
    """

    effect: Effect
    sources: Sequence[str] | None
    prompts: Prompts
    differing: list[list[Difference]] | None
    linearised: Tensor | None
    source: Tensor | None = None
    recovery: Tensor | None = None
    small_gap: bool = False


# Running


def _drawn(view: ModelView, arguments: argparse.Namespace) -> PromptPairs:
    from resid_patching.prompt_sets import indirect_object_prompts

    return indirect_object_prompts(
        view,
        arguments.indirect_object,
        seed=arguments.seed,
        corrupt=arguments.corrupt,
        prepend_bos=arguments.prepend_bos,
    )


def _patch(
    view: ModelView,
    pairs: PromptPairs,
    inputs: Inputs,
    arguments: argparse.Namespace,
    sharing: Sharing,
) -> Found | None:
    """What was found; None in a process that only shares the work."""
    from resid_patching.ablation import Path, ablate
    from resid_patching.prompt_sets import differences
    from resid_patching.run import capture

    base = capture(view, pairs.base, prepend_bos=arguments.prepend_bos)
    source, differing = None, None
    sources = None if arguments.using == "zero" else inputs.sources or pairs.source
    if sources is not None:
        source = capture(view, sources, prepend_bos=arguments.prepend_bos)
    if arguments.using == "resample" and source is not None:
        differing = differences(base.prompts, source.prompts)
    metric = _new_metric(inputs.metric, pairs)
    senders = with_swept(view, inputs.senders, arguments.sweep)
    path = Path(
        to=_ends(view, inputs, arguments), using=_using(arguments, source), mlps=arguments.mlps
    )
    options: dict[str, Any] = {
        "metric": metric,
        "positions": _positions(arguments, pairs),
        "joint": arguments.joint,
    }
    with Progress(shown=sharing.team.is_first) as progress:
        progress.expect(len(base))
        n_variants = (1 if arguments.joint else len(senders)) * len(path.ends.sets)
        tick = progress.ticker(base, n_variants)
        effect = ablate(base, senders, path, progress=tick, **options, **sharing.options())
    if not sharing.team.is_first:
        return None
    return Found(
        effect=effect,
        sources=sources,
        prompts=base.prompts,
        differing=differing,
        linearised=_linearised(base, senders, path, options) if arguments.linearised else None,
        **_compared(effect, source, metric, inputs, arguments),
    )


def _new_metric(name: str, pairs: PromptPairs) -> Any:
    def tokens(given: Any) -> Any:
        return None if given is None else shared(list(given))

    return new_metric(name, tokens(pairs.answers), tokens(pairs.foils), on_text=False)


def _ends(view: ModelView, inputs: Inputs, arguments: argparse.Namespace) -> Any:
    """The receivers together, or side by side."""
    from resid_patching.paths import inputs as inputs_of
    from resid_patching.paths import receivers

    swept = [] if arguments.to_sweep is None else inputs_of(view, arguments.to_sweep)
    ends = inputs.receivers + [receiver for receiver in swept if receiver not in inputs.receivers]
    if not ends:
        raise UsageError(f"{view.name} has no receiver of the kind {arguments.to_sweep}")
    return ends if arguments.together or len(ends) == 1 else receivers(*ends)


def _using(arguments: argparse.Namespace, source: Run | None) -> Any:
    from resid_patching.ablation import Mean, Resample, Zero

    if source is None:
        return Zero()
    if arguments.using == "mean":
        return Mean(source, over=tuple(arguments.over.split(",")))
    return Resample(source)


def _positions(arguments: argparse.Namespace, pairs: PromptPairs) -> Any:
    asked = arguments.positions
    if asked is None:
        return None
    if asked in pairs.positions:
        return list(pairs.positions[asked])
    return -1 if asked == "END" else int(asked)


def _linearised(base: Run, senders: list[Any], path: Path, options: dict[str, Any]) -> Any:
    from resid_patching.ablation import linearised_paths

    return linearised_paths(base, senders, path, **options).values


def _compared(
    effect: Effect, source: Run | None, metric: Any, inputs: Inputs, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The metric in the source, and each effect's share of the way there."""
    if source is None or arguments.using != "resample" or inputs.metric not in ANSWERED:
        return {}
    from resid_patching.ablation import measure
    from resid_patching.errors import SmallDenominatorWarning, warn

    measured = measure(source, metric)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        shares = effect.recovery(measured)
    small = False
    for warning in told:
        small = small or issubclass(warning.category, SmallDenominatorWarning)
        warn(str(warning.message), warning.category)
    return {"source": measured, "recovery": shares, "small_gap": small}


# What is said beside the numbers


def _where(arguments: argparse.Namespace) -> str:
    return "all positions" if arguments.positions is None else arguments.positions


def _facts(found: Found, pairs: PromptPairs, arguments: argparse.Namespace) -> Facts:
    """Prompts and where they differ, what was changed, and the metric in both runs."""
    from resid_patching.show.report import token_items

    effect = found.effect
    facts: list[tuple[str, str | Sequence[str]]] = [
        ("pairs", pairs.how.split("\t")),
        ("base", token_items(found.prompts.token_texts[0], _TOKENS)),
    ]
    differing = found.differing or []
    for row, differences in enumerate(differing[:_PAIRS]):
        items = [f"{d.position} {quoted(d.base)} -> {quoted(d.source)}" for d in differences]
        if len(items) > _TOKENS:
            items[_TOKENS:] = [f"... {len(items) - _TOKENS} more tokens"]
        name = [f"pair {row}:"] if len(differing) > 1 else []
        facts.append(("" if row else "differs", name + (items or ["nowhere: its own source"])))
    if len(differing) > _PAIRS:
        facts.append(("", f"... {len(differing) - _PAIRS} more pairs"))
    change = "base runs; only the sender's message to the receiver is replaced, by what it is"
    change += f" with the sender {_REPLACED[arguments.using]}, at {_where(arguments)}"
    facts += [("change", change), ("mlps", f"{_MLPS[arguments.mlps]}; other heads keep theirs")]
    (_, kind), _, (name, base) = effect.facts()[:3]
    facts += [("kind", kind), ("at", _where(arguments)), (name, base)]
    if found.source is not None:
        value = float(found.source.cpu().double().mean())
        before = float(effect.mean(effect.baseline))
        facts[-1] = (name, f"{base}; source {value:+.4f}, source - base {value - before:+.4f}")
    return tuple(facts)


def _caveats(found: Found, arguments: argparse.Namespace) -> tuple[str, ...]:
    said = []
    if found.small_gap:
        said.append("recovery is not shown: base and source nearly agree, so read the raw effects.")
    elif found.recovery is not None:
        said.append(
            "recovery: total / (source - base); 100% makes the base prompts as the source's."
        )
    if found.linearised is not None:
        said.append("linearised: with the receiver's norm frozen, an approximation of the total.")
    if found.effect.metric.startswith(("KL", "change")):
        said.append("Sign: effects run from 0 up, and say how far the prediction moves.")
    else:
        other = _WITHOUT[arguments.using]
        said.append(
            f"Sign: negative: {other} the metric is lower, so in base the sender raises it."
        )
    if arguments.using == "resample":
        said.append("Direction: source into base. The other way round is another experiment.")
    return tuple(said)


# Files


def _known(found: Found, pairs: PromptPairs, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the command knew, for the JSON."""
    known: dict[str, Any] = {"command": "path-patch", "pairs": pairs.how}
    known |= {"base": list(pairs.base), "answers": _listed(pairs.answers)}
    known |= {"source": _listed(found.sources), "foils": _listed(pairs.foils)}
    known |= {"orders": list(pairs.orders), "differences": found.differing}
    for flag in ("using", "over", "mlps", "together", "seed", "corrupt"):
        known[flag] = getattr(arguments, flag)
    known["sent_from"] = _where(arguments)
    known["named_positions"] = {name: list(rows) for name, rows in pairs.positions.items()}
    known["source_metric"] = _finite(found.source)
    known["recovery"] = _finite(found.recovery)
    known["linearised"] = _finite(found.linearised)
    return known


def _listed(texts: Any) -> list[str] | None:
    return None if texts is None else list(texts)


def _finite(values: Any) -> Any:
    """A tensor as nested lists, with null for what is no finite number."""
    if values is None:
        return None

    def clean(value: Any) -> Any:
        if isinstance(value, list):
            return [clean(item) for item in value]
        return value if abs(value) < float("inf") else None

    return clean(values.detach().cpu().double().tolist())


def _frame(found: Found) -> Any:
    frame = found.effect.to_frame()
    if found.linearised is not None:
        frame["linearised"] = found.linearised.detach().cpu().double().flatten().numpy()
    return frame
