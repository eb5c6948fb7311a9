"""`tuned-lens eval`, `show` and `convert`: what is done with a lens that is there."""

from __future__ import annotations

from argparse import Namespace
from itertools import islice
from pathlib import Path
from typing import Any

import resid_patching as rp
from resid_patching.cli.frame import UsageError, load_model
from resid_patching.cli.lens_reading import (
    beside,
    deliver_kl,
    deliver_readings,
    describe,
    read_asked,
    require_lens,
)
from resid_patching.cli.text import TextWindows, require_texts, windows_of
from resid_patching.show.lens import kl_table
from resid_patching.show.text import console, print_line

_WINDOWS_AT_ONCE = 8


# eval


def evaluate(arguments: Namespace) -> None:
    """Prints the KL of logit and tuned lens by layer on a text."""
    require_lens(arguments.lens)
    require_texts([arguments.text], arguments.text_key)
    view = load_model(arguments)
    lens = rp.TunedLens.load(arguments.lens, view)
    own = int(lens.record.get("fit", {}).get("window", 256))
    length = arguments.length or min(own, view.n_ctx)
    windows = windows_of(view, arguments, arguments.text, length)
    columns, n_tokens, origin = _measure(view, lens, windows)
    # What the fit found on its own held-out tokens, where the file says so.
    found = lens.record.get("validation", {})
    names = {"stored logit": "logit_lens", "stored ridge": "ridge", "stored tuned": "tuned"}
    columns |= {name: list(found[key]) for name, key in names.items() if found.get(key)}
    title = f"KL(final || lens) in nats, mean over {n_tokens:,} tokens"
    if "stored tuned" in columns:
        title += "; stored: on the tokens held out of the fit"
    cut = f"{windows.n_windows} windows of {length} tokens, the first position of each left out"
    deliver_kl(
        arguments,
        view,
        origin,
        lens,
        columns,
        title=title,
        over=f"mean over {n_tokens:,} tokens of {windows.source}",
        facts=(
            ("lens", describe(lens, arguments.lens, view)),
            ("text", f"{windows.source}, {cut}"),
        ),
        body={
            "folder": arguments.lens,
            "text": arguments.text,
            "text_key": arguments.text_key,
            "tokens": n_tokens,
            "unit": "nats",
            "layers": list(lens.labels),
            **{name.replace(" ", "_"): values for name, values in columns.items()},
        },
    )


def _measure(
    view: rp.ModelView, lens: rp.TunedLens, windows: TextWindows
) -> tuple[dict[str, list[Any]], int, Any]:
    """Mean KL by layer over all positions but each window's first, as in the fit."""
    from tqdm import tqdm

    sums: dict[str, Any] = {"logit lens": 0, "tuned": 0}
    n_tokens, origin, rows = 0, None, windows.rows()
    with tqdm(disable=None, delay=2, unit="window", leave=False) as bar:
        while some := list(islice(rows, _WINDOWS_AT_ONCE)):
            bar.total = windows.estimate
            tuned = lens(rp.capture(view, some))
            for name, readout in (("logit lens", beside(tuned)), ("tuned", tuned)):
                kept = readout.kl.values[:-1, :, 1:].cpu().double()
                sums[name] = sums[name] + kept.nansum((1, 2))
                origin = readout.kl.provenance
            n_tokens += sum(len(row) - 1 for row in some)
            bar.update(len(some))
    if n_tokens == 0:
        raise UsageError(f"{windows.path} has one token; a lens is measured from the second on")
    return {name: (total / n_tokens).tolist() for name, total in sums.items()}, n_tokens, origin


# show


def show(arguments: Namespace) -> None:
    """Shows logit and tuned lens on prompts, one beside the other."""
    asked = read_asked(arguments)
    require_lens(arguments.lens)
    view = load_model(arguments)
    lens = rp.TunedLens.load(arguments.lens, view)
    captured = rp.capture(view, asked[0], prepend_bos=arguments.prepend_bos)
    tuned = lens(captured)
    readouts = {"logit lens": beside(tuned), "tuned lens": tuned}
    mean_kl = None
    if arguments.position is None:
        from resid_patching.result import standard_error_over_positions

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
    deliver_readings(arguments, captured, readouts, asked, lens=lens, mean_kl=mean_kl, compare=True)


# convert


def convert(arguments: Namespace) -> None:
    """Writes a lens for other weights of its model, or in another format."""
    require_lens(arguments.lens)
    out, is_theirs = Path(arguments.out), arguments.to == "tuned-lens"
    require_folder(out)
    if out.is_dir() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty; give another --out")
    wanted = {"raw": "raw", "centred": "centred", "tuned-lens": "raw"}.get(arguments.to)
    if _is_centred(arguments.lens):
        arguments.processing = "folded"
    view = load_model(arguments)
    lens = rp.TunedLens.load(arguments.lens, view)
    done = []
    if wanted is not None and lens.fingerprint.basis != wanted:
        arguments.processing = "raw" if wanted == "raw" else "folded"
        lens = lens.rebase(load_model(arguments))
        done.append(f"moved to {wanted} weights, exactly")
    elif arguments.to in ("raw", "centred"):
        raise UsageError(f"the lens at {arguments.lens} is of {wanted} weights already")
    lens.save(out, format="tuned-lens" if is_theirs else "resid_patching")
    package = "the tuned-lens" if is_theirs else "this"
    done.append(f"written to {out} in {package} package's format")
    screen = console()
    if arguments.stand_in is not None:
        print_line(screen, "note", arguments.stand_in.split(": "))
    print_line(screen, "model", [f"{view.name}, {view.n_layers} layers"])
    print_line(screen, "lens", describe(lens, arguments.lens, view))
    print_line(screen, "done", ["; ".join(done)])


def require_folder(out: Path) -> None:
    """Refuses an --out that can be no folder."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; --out is a folder")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out} cannot be made: there is no folder {out.parent}")


def _is_centred(folder: str) -> bool:
    """Whether a lens says that it is of centred weights, with which its model must be loaded."""
    from resid_patching.files import read_json
    from resid_patching.lens import checkpoint

    config = checkpoint.folder_of(folder) / checkpoint.CONFIG
    try:
        return read_json(config.read_text(encoding="utf-8"))["fingerprint"]["basis"] == "centred"
    except (OSError, ValueError, KeyError, TypeError):
        return False  # `TunedLens.load` says what is wrong
