"""`resid-patching path-patch`: what senders tell receivers, as tables, JSON and CSV."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import resid_patching as rp
from resid_patching.cli.flags import position_or
from resid_patching.cli.frame import Parser, UsageError, command_parser, load_model
from resid_patching.cli.inputs import ANSWERED, new_kind, new_metric, with_swept
from resid_patching.cli.output import body_of, deliver
from resid_patching.cli.path_inputs import FLAGS, NAMED, Inputs, read_inputs
from resid_patching.cli.progress import Progress, join
from resid_patching.errors import warn
from resid_patching.markup import quoted
from resid_patching.show.report import Facts, section, token_items

if TYPE_CHECKING:
    from torch import Tensor

    from resid_patching.prompt_sets import Difference

_PAIRS, _TOKENS = 4, 60  # that are shown
_REPLACED = {
    "zero": "at zero",
    "mean": "at its mean over the source prompts",
    "resample": "at its value in source",
}
_MLPS = {"freeze": "keep their values", "recompute": "answer the change"}
_WITHOUT = {
    "zero": "without the message",
    "mean": "with the mean message",
    "resample": "with the source's message",
}


def build_parser(prog: str) -> Parser:
    """The flags of `path-patch`."""
    return command_parser(
        prog,
        "Replaces what senders tell chosen receivers, and nothing else they do, and measures what "
        "that does to a metric. Other heads keep their values between the two.",
        FLAGS,
        epilog=f"Example: {prog} --sweep heads --to logits --mlps recompute --using resample "
        "--indirect-object 16 --seed 0 --corrupt names --positions END",
        positions=position_or("END", *NAMED),
        seed=int,
    )


def run(arguments: Namespace) -> None:
    """Patches the paths and prints what that did."""
    inputs = read_inputs(arguments)
    team, kept = join(arguments)
    view = load_model(arguments)
    pairs = inputs.pairs or rp.indirect_object_prompts(
        view,
        arguments.indirect_object,
        seed=arguments.seed,
        corrupt=arguments.corrupt,
        prepend_bos=arguments.prepend_bos,
    )
    found = _patch(view, pairs, inputs, arguments, team, kept(0))
    if found is None:
        return
    effect, more, columns = found.effect, {}, {}
    if found.recovery is not None and not found.small_gap:
        more["recovery"] = found.recovery.flatten().tolist()
    if found.linearised is not None:
        more["linearised"] = effect.mean(found.linearised).flatten().tolist()
        columns["linearised"] = found.linearised.flatten().tolist()
    facts, caveats = _facts(found, pairs, arguments), _caveats(found, arguments)
    part = section(effect, facts=facts, caveats=caveats, more=more, top=arguments.top)
    sources = None if found.sources is None else list(found.sources)[: len(pairs)]
    shown = {"base": pairs.base, "source": sources}
    body = body_of(effect, **_known(found, pairs, arguments))
    deliver(
        arguments,
        view,
        effect.provenance,
        "Path patching",
        [part],
        body,
        lambda: effect.to_frame().assign(**columns),
        prompts=shown,
    )


@dataclass(frozen=True, eq=False)
class _Found:
    """What was found."""

    effect: rp.Effect
    sources: Sequence[str] | None  # texts that other values come from; None for zero
    token_texts: Sequence[Sequence[str]]  # of the base prompts
    differing: list[list[Difference]]  # pair by pair; empty where nothing is resampled
    linearised: Tensor | None  # with the receivers' norms frozen, shaped as the effect's values
    source: Tensor | None = None  # the metric in the source [batch]
    recovery: Tensor | None = None  # shares of the way to it, [target] or [target, receiver]
    small_gap: bool = False  # base and source are too close for shares to mean much


# Running


def _patch(
    view: rp.ModelView,
    pairs: rp.PromptPairs,
    inputs: Inputs,
    arguments: Namespace,
    team: rp.Team,
    rows: Any,
) -> _Found | None:
    """What was found; None in a process that only shares the work."""
    using, source, differing = arguments.using, None, []
    base = rp.capture(view, pairs.base, prepend_bos=arguments.prepend_bos)
    own = arguments.source if using == "mean" else None
    sources = None if using == "zero" else own or pairs.source
    if sources is not None:
        source = rp.capture(view, sources, prepend_bos=arguments.prepend_bos)
    if using == "resample" and source is not None:
        differing = rp.differences(base.prompts, source.prompts)
    metric = new_metric(inputs.metric, pairs.answers, pairs.foils)
    senders = with_swept(view, inputs.senders, arguments.sweep)
    path = rp.Path(
        to=_ends(view, inputs, arguments),
        using=new_kind(source, arguments.over),
        mlps=arguments.mlps,
    )
    options: dict[str, Any] = {
        "metric": metric,
        "positions": _places(arguments, pairs),
        "joint": arguments.joint,
    }
    with Progress(shown=team.is_first) as progress:
        progress.expect(len(base))
        n_variants = (1 if arguments.joint else len(senders)) * len(path.ends.sets)
        tick = progress.ticker(base, n_variants)
        effect = rp.ablate(base, senders, path, progress=tick, team=team, rows=rows, **options)
    if not team.is_first:
        return None
    linearised = None
    if arguments.linearised:
        linearised = rp.linearised_paths(base, senders, path, **options).values
    found = _Found(effect, sources, base.prompts.token_texts, differing, linearised)
    if source is None or using != "resample" or inputs.metric not in ANSWERED:
        return found
    return _compared(found, rp.measure(source, metric))


def _ends(view: rp.ModelView, inputs: Inputs, arguments: Namespace) -> Any:
    """The receivers together, or side by side."""
    swept = rp.inputs(view, arguments.to_sweep) if arguments.to_sweep else []
    ends = list(dict.fromkeys([*inputs.receivers, *swept]))
    if not ends:
        raise UsageError(f"{view.name} has no receiver of the kind {arguments.to_sweep}")
    return ends if arguments.together or len(ends) == 1 else rp.receivers(*ends)


def _places(arguments: Namespace, pairs: rp.PromptPairs) -> Any:
    asked = arguments.positions
    if asked in pairs.positions:
        return list(pairs.positions[asked])
    return -1 if asked == "END" else asked


def _compared(found: _Found, source: Tensor) -> _Found:
    """With each effect's share of the way to the metric in the source."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        recovery = found.effect.recovery(source)
    for warning in told:  # of a small gap
        warn(str(warning.message), warning.category)
    return replace(found, source=source, recovery=recovery, small_gap=bool(told))


# What is said beside the numbers


def _where(arguments: Namespace) -> str:
    return "all positions" if arguments.positions is None else str(arguments.positions)


def _facts(found: _Found, pairs: rp.PromptPairs, arguments: Namespace) -> Facts:
    """Prompts and where they differ, what was changed, and the metric in both runs."""
    effect = found.effect
    facts: list[tuple[str, str | Sequence[str]]] = [
        ("pairs", pairs.how.split("\t")),
        ("base", token_items(found.token_texts[0], _TOKENS)),
    ]
    for row, differences in enumerate(found.differing[:_PAIRS]):
        items = [f"{d.position} {quoted(d.base)} -> {quoted(d.source)}" for d in differences]
        if len(items) > _TOKENS:
            items[_TOKENS:] = [f"... {len(items) - _TOKENS} more tokens"]
        name = [f"pair {row}:"] if len(found.differing) > 1 else []
        facts.append(("" if row else "differs", name + (items or ["nowhere: its own source"])))
    if (left := len(found.differing) - _PAIRS) > 0:
        facts.append(("", f"... {left} more pairs"))
    change = "base runs; only the sender's message to the receiver is replaced, by what it is"
    change += f" with the sender {_REPLACED[arguments.using]}, at {_where(arguments)}"
    mlps = f"{arguments.mlps}: MLPs between sender and receiver {_MLPS[arguments.mlps]}"
    facts += [("change", change), ("mlps", f"{mlps}; other heads keep theirs")]
    (_, kind), _, (name, base) = effect.facts()[:3]
    if found.source is not None:
        value = float(found.source.cpu().double().mean())
        before = float(effect.mean(effect.baseline))
        base += f"; source {value:+.4f}, source - base {value - before:+.4f}"
    return (*facts, ("kind", kind), ("at", _where(arguments)), (name, base))


def _caveats(found: _Found, arguments: Namespace) -> tuple[str, ...]:
    is_distance = found.effect.metric.startswith(("KL", "change"))
    sign = f"Sign: negative: {_WITHOUT[arguments.using]} the metric is lower, so in base the "
    said = {
        "recovery is not shown: base and source nearly agree, so read the raw effects.": (
            found.small_gap
        ),
        "recovery: total / (source - base); 100% makes the base prompts as the source's.": (
            found.recovery is not None and not found.small_gap
        ),
        "linearised: with the receiver's norm frozen, an approximation of the total.": (
            found.linearised is not None
        ),
        "Sign: effects run from 0 up, and say how far the prediction moves.": is_distance,
        f"{sign}sender raises it.": not is_distance,
        "Direction: source into base. The other way round is another experiment.": (
            arguments.using == "resample"
        ),
    }
    return tuple(line for line, holds in said.items() if holds)


def _known(found: _Found, pairs: rp.PromptPairs, arguments: Namespace) -> dict[str, Any]:
    """What the command knew, for the JSON."""
    asked = ("using", "over", "mlps", "together", "seed", "corrupt")
    return {
        **{name: getattr(arguments, name) for name in asked},
        "pairs": pairs.how,
        "base": pairs.base,
        "source": found.sources,
        "answers": pairs.answers,
        "foils": pairs.foils,
        "orders": pairs.orders,
        "differences": found.differing if arguments.using == "resample" else None,
        "sent_from": _where(arguments),
        "named_positions": dict(pairs.positions),
        "source_metric": found.source,
        "recovery": found.recovery,
        "linearised": found.linearised,
    }
