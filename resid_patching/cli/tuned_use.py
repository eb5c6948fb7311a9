"""`tuned-lens eval`, `show` and `convert`: what is done with a lens that is there."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resid_patching.cli.frame import UsageError, load_model
from resid_patching.cli.inputs import read_prompts
from resid_patching.cli.lens_reading import (
    beside,
    deliver_readings,
    describe,
    require_answers,
    require_lens,
)
from resid_patching.cli.output import deliver_kl, require_files
from resid_patching.cli.text import TextWindows, require_texts

if TYPE_CHECKING:
    from resid_patching.lens.tuned import TunedLens
    from resid_patching.models import ModelView

_WINDOWS_AT_ONCE = 8


def _load(arguments: argparse.Namespace) -> tuple[ModelView, TunedLens, str | None]:
    from resid_patching.lens.tuned import TunedLens
    from resid_patching.models import ModelView

    model, stand_in = load_model(arguments)
    view = ModelView(model)
    return view, TunedLens.load(arguments.lens, view), stand_in


# eval


def evaluate(arguments: argparse.Namespace) -> None:
    """Prints the KL of logit and tuned lens by layer on a text."""
    require_lens(arguments.lens)
    require_texts([arguments.text], arguments.text_key)
    require_files(arguments)
    view, lens, stand_in = _load(arguments)
    own = int(lens.record.get("fit", {}).get("window", 256))
    length = arguments.length or min(own, view.n_ctx)
    windows = TextWindows(
        view,
        arguments.text,
        length,
        arguments.prepend_bos,
        arguments.limit,
        whole=False,
        text_key=arguments.text_key or "text",
    )
    columns, n_tokens, origin = _measure(view, lens, windows)
    columns |= _stored(lens)
    title = f"KL(final || lens) in nats, mean over {n_tokens:,} tokens"
    if "stored tuned" in columns:
        title += "; stored: on the tokens held out of the fit"
    cut = f"{windows.n_windows} windows of {length} tokens, the first position of each left out"
    deliver_kl(
        arguments,
        lens,
        columns,
        title=title,
        over=f"mean over {n_tokens:,} tokens of {windows.source}",
        facts=(
            ("lens", describe(lens, arguments.lens, view)),
            ("text", f"{windows.source}, {cut}"),
        ),
        view=view,
        origin=origin,
        stand_in=stand_in,
        known={
            "command": "tuned-lens eval",
            "folder": arguments.lens,
            "text": arguments.text,
            "text_key": arguments.text_key,
            "tokens": n_tokens,
            "unit": "nats",
            "layers": list(lens.labels),
            **{name.replace(" ", "_"): values for name, values in columns.items()},
            "fingerprint": lens.fingerprint.as_dict(),
        },
    )


def _measure(
    view: ModelView, lens: TunedLens, windows: TextWindows
) -> tuple[dict[str, list[Any]], int, Any]:
    """Mean KL by layer over all positions but each window's first, as in the fit."""
    from tqdm import tqdm

    from resid_patching.run import capture

    sums: dict[str, Any] = {"logit lens": 0, "tuned": 0}
    n_tokens, origin = 0, None
    with tqdm(disable=None, delay=2, unit="window", leave=False) as bar:
        for rows in _batches(windows):
            bar.total = windows.estimate
            captured = capture(view, rows)
            tuned = lens(captured)
            for name, readout in (("logit lens", beside(tuned, captured)), ("tuned", tuned)):
                kl = readout.kl
                kept = kl.values[:-1, :, 1:].cpu().double()
                sums[name] = sums[name] + kept.nansum((1, 2))
                origin = kl.provenance
            n_tokens += sum(len(row) - 1 for row in rows)
            bar.update(len(rows))
    if n_tokens == 0:
        raise UsageError(f"{windows.path} holds one token; a lens is measured after the first")
    return {name: (total / n_tokens).tolist() for name, total in sums.items()}, n_tokens, origin


def _batches(windows: TextWindows) -> Iterator[list[list[int]]]:
    for prompts in windows.groups():
        rows = [
            row[:length]
            for row, length in zip(prompts.tokens.tolist(), prompts.lengths, strict=True)
        ]
        for start in range(0, len(rows), _WINDOWS_AT_ONCE):
            yield rows[start : start + _WINDOWS_AT_ONCE]


def _stored(lens: TunedLens) -> dict[str, list[Any]]:
    """What the fit found on its own held-out tokens, where the file says so."""
    found = lens.record.get("validation", {})
    names = {"stored logit": "logit_lens", "stored ridge": "ridge", "stored tuned": "tuned"}
    return {name: list(found[key]) for name, key in names.items() if found.get(key)}


# show


def show(arguments: argparse.Namespace) -> None:
    """Shows logit and tuned lens on prompts, one beside the other."""
    asked = read_prompts(arguments)
    require_answers(*asked[1:])
    require_lens(arguments.lens)
    require_files(arguments)
    view, lens, stand_in = _load(arguments)

    from resid_patching.result import standard_error_over_positions
    from resid_patching.run import capture
    from resid_patching.show.lens import kl_table

    captured = capture(view, asked[0], prepend_bos=arguments.prepend_bos)
    tuned = lens(captured)
    readouts = {"logit lens": beside(tuned, captured), "tuned lens": tuned}
    mean_kl = None
    if arguments.position is None:
        columns, errors = {}, {}
        for name, readout in zip(("logit lens", "tuned"), readouts.values(), strict=True):
            kl = readout.kl.values[:-1].cpu().double()  # without the last state, where it is 0
            columns[name] = kl.nanmean((1, 2)).tolist()
            if len(captured) > 1:
                of_all = standard_error_over_positions(kl.mean(0)).tolist()
                by_layer = standard_error_over_positions(kl).tolist()
                errors[f"se {name.split()[0]}"] = [*by_layer, of_all]
        n = sum(captured.prompts.lengths)
        title = f"KL(final || lens) in nats, mean over all {n} positions"
        title += "; se: standard error over prompts" if errors else ""
        mean_kl = kl_table(title, columns, lens.labels, errors)
    deliver_readings(
        *(captured, readouts, asked, arguments),
        lens=lens,
        stand_in=stand_in,
        mean_kl=mean_kl,
        compare=True,
    )


# convert


def convert(arguments: argparse.Namespace) -> None:
    """Writes a lens for other weights of its model, or in another format."""
    require_lens(arguments.lens)
    _require_free(arguments)
    wanted = {"raw": "raw", "centred": "centred", "tuned-lens": "raw"}.get(arguments.to)
    arguments.processing = _processing(arguments)
    view, lens, stand_in = _load(arguments)
    done = []
    if wanted is not None and lens.fingerprint.basis != wanted:
        arguments.processing = "raw" if wanted == "raw" else "folded"
        target, _ = load_model(arguments)
        lens = lens.rebase(target)
        done.append(f"moved to {wanted} weights, exactly")
    elif arguments.to in ("raw", "centred"):
        raise UsageError(f"the lens at {arguments.lens} is of {wanted} weights already")
    lens.save(arguments.out, format="tuned-lens" if arguments.to == "tuned-lens" else _OURS)
    done.append(f"written to {arguments.out} in {_FORMATS[arguments.to == 'tuned-lens']}")
    _print_converted(view, lens, done, arguments, stand_in)


_OURS = "resid_patching"
_FORMATS = ("this package's format", "the tuned-lens package's format")


def _require_free(arguments: argparse.Namespace) -> None:
    out = Path(arguments.out)
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; --out is a folder")
    if out.is_dir() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty; give another --out")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out} cannot be made: there is no folder {out.parent}")


def _processing(arguments: argparse.Namespace) -> str:
    """How the model must be loaded for the lens to be its own: as the file says."""
    from resid_patching.files import read_json
    from resid_patching.lens import checkpoint

    config = checkpoint.folder_of(arguments.lens) / checkpoint.CONFIG
    try:
        basis = read_json(config.read_text(encoding="utf-8"))["fingerprint"]["basis"]
    except (OSError, ValueError, KeyError, TypeError):
        return arguments.processing
    return "folded" if basis == "centred" else arguments.processing


def _print_converted(
    view: ModelView,
    lens: TunedLens,
    done: list[str],
    arguments: argparse.Namespace,
    stand_in: str | None,
) -> None:
    from resid_patching.show.text import console, print_line

    out = console()
    if stand_in is not None:
        print_line(out, "note", stand_in.split(": "))
    print_line(out, "model", [f"{view.name}, {view.n_layers} layers"])
    print_line(out, "lens", describe(lens, arguments.lens, view))
    print_line(out, "done", ["; ".join(done)])
