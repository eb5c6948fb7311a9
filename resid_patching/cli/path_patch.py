"""`resid-patching path-patch`: what senders tell receivers, as tables, JSON and CSV."""

from __future__ import annotations

import argparse
import json
import warnings
from typing import TYPE_CHECKING, Any

from resid_patching.cli.frame import (
    Parser,
    UsageError,
    add_model_flags,
    add_output_flags,
    load_model,
)
from resid_patching.cli.inputs import count
from resid_patching.cli.page import asked, require_files, write_page
from resid_patching.cli.pages import paths_page
from resid_patching.cli.path_inputs import (
    Inputs,
    add_metric_flags,
    add_pair_flags,
    add_path_flags,
    add_sender_flags,
    read_inputs,
)
from resid_patching.cli.path_output import Found, print_found
from resid_patching.cli.progress import Progress
from resid_patching.cli.scores import ANSWERED, new_metric, shared
from resid_patching.cli.screen import console, csv_text
from resid_patching.cli.sharing import Sharing, add_rows_flag, join

if TYPE_CHECKING:
    from resid_patching.ablation import Effect, Path
    from resid_patching.models import ModelView
    from resid_patching.prompt_sets import PromptPairs
    from resid_patching.run import Run


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The flags of `path-patch`."""
    parser = Parser(
        prog=prog,
        description="Replaces what senders tell chosen receivers, and nothing else they do, and "
        "measures what that does to a metric. Other heads keep their values between the two.",
        epilog=f"Example: {prog} --sweep heads --to logits --mlps recompute --using resample "
        "--indirect-object 16 --seed 0 --corrupt names --positions END",
    )
    add_sender_flags(parser)
    add_path_flags(parser)
    add_pair_flags(parser)
    add_metric_flags(parser)
    parser.add_argument(
        "--top", type=count, default=15, metavar="N", help="rows shown (default: 15)"
    )
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

    from resid_patching.files import write_text
    from resid_patching.models import ModelView

    view = ModelView(model)
    pairs = inputs.pairs or _drawn(view, arguments)
    found = _patch(view, pairs, inputs, arguments, sharing)
    if found is None:
        return
    if arguments.json is not None:
        write_text(arguments.json, _as_json(found, arguments, stand_in))
    if arguments.csv is not None:
        write_text(arguments.csv, _as_csv(found))
    write_page(arguments, lambda: paths_page(found, stand_in, asked(arguments)))
    print_found(console(), view, found, stand_in, top=arguments.top)


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
    senders = _all_senders(view, inputs, arguments)
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
        pairs=pairs,
        sources=sources,
        prompts=base.prompts,
        where="all positions" if arguments.positions is None else arguments.positions,
        differing=differing,
        linearised=_linearised(base, senders, path, options) if arguments.linearised else None,
        swept=arguments.sweep == "heads" and not arguments.joint,
        using=arguments.using,
        mlps=arguments.mlps,
        **_compared(effect, source, metric, inputs, arguments),
    )


def _new_metric(name: str, pairs: PromptPairs) -> Any:
    def tokens(given: Any) -> Any:
        return None if given is None else shared(list(given))

    return new_metric(name, tokens(pairs.answers), tokens(pairs.foils), on_text=False)


def _all_senders(view: ModelView, inputs: Inputs, arguments: argparse.Namespace) -> list[Any]:
    from resid_patching.ablation import heads, writers
    from resid_patching.address import MLP, Attn

    match arguments.sweep:
        case "heads":
            swept: list[Any] = list(heads(view))
        case "layers":
            swept = [writer for writer in writers(view) if isinstance(writer, Attn | MLP)]
        case _:
            swept = []
    return inputs.senders + [sender for sender in swept if sender not in inputs.senders]


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


# Files


def _as_json(found: Found, arguments: argparse.Namespace, stand_in: str | None) -> str:
    """The result, readable by `Effect.from_json`, with what the command knew beside it."""
    pairs = found.pairs
    body = json.loads(found.effect.to_json())
    body |= {"command": "path-patch", "stand_in": stand_in, "pairs": pairs.how}
    body |= {"base": list(pairs.base), "answers": _listed(pairs.answers)}
    body["source"] = _listed(found.sources)
    body |= {"foils": _listed(pairs.foils), "orders": list(pairs.orders)}
    body["differences"] = found.differing
    for flag in ("using", "over", "mlps", "together", "seed", "corrupt"):
        body[flag] = getattr(arguments, flag)
    body["sent_from"] = found.where
    body["named_positions"] = {name: list(rows) for name, rows in pairs.positions.items()}
    body["source_metric"] = _finite(found.source)
    body["recovery"] = _finite(found.recovery)
    body["linearised"] = _finite(found.linearised)
    return json.dumps(body, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


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


def _as_csv(found: Found) -> str:
    frame = found.effect.to_frame()
    if found.linearised is not None:
        frame["linearised"] = found.linearised.detach().cpu().double().flatten().numpy()
    return csv_text(frame)
