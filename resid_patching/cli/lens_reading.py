"""What the commands that read lenses share: flags, checks, and how readings are shown."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import resid_patching as rp
from resid_patching.cli.flags import whole
from resid_patching.cli.frame import UsageError
from resid_patching.cli.inputs import read_prompts
from resid_patching.cli.output import deliver
from resid_patching.show import lens as shown
from resid_patching.show.lens import LensOutput
from resid_patching.show.report import Facts, Section, Table, drawn, token_items

_PROMPTS_SHOWN = 4

Asked = tuple[list[str], list[str] | None, list[str] | None]  # prompts, answers and foils


def place_flags(in_depth: str) -> dict[str, Any]:
    """The flags that say which positions are shown, with what is shown at one position."""
    first = "the first position of the table, from 0 (unset: the last ones that fit)"
    return {
        "one of": {
            "--position P": f"show one position {in_depth}, from 0, or from the end if negative "
            "(unset: a table of all)",
            "--from": {"dest": "first", "type": whole, "metavar": "P", "help": first},
        }
    }


def read_asked(arguments: Namespace) -> Asked:
    """The prompts that the flags give, and the tokens that are followed."""
    asked = read_prompts(arguments)
    if asked[2] is not None and asked[1] is None:
        raise UsageError("--foil is shown beside an --answer; none was given")
    return asked


def require_lens(folder: str) -> None:
    """Refuses a folder that is missing, before a model is loaded; says what lies beside it."""
    path = Path(folder).absolute()
    if folder == "demo" or path.exists():  # demo: the lens shipped with the demo model
        return
    parent = next(parent for parent in path.parents if parent.is_dir())
    names = ", ".join(sorted(p.name for p in parent.iterdir() if p.is_dir())[:8])
    has = f"has the folders {names}" if names else "has no folders"
    raise UsageError(f"there is no lens at {path}: {parent} {has}")


def beside(tuned: rp.LensReadout) -> rp.LensReadout:
    """The logit lens on the states that a tuned lens reads."""
    plan = tuned.plan.replace("tuned lens", "logit lens")
    return dataclasses.replace(tuned, plan=plan, translate=None, _memo={})


def describe(lens: rp.TunedLens, folder: str, model: rp.ModelView) -> str:
    """Which tuned lens this is, and whether it is of the model, for a line."""
    about = f"tuned lens from {folder}"
    if lens.site != "resid_pre":
        about += f", on {lens.site}"
    fit = lens.record.get("fit", {})
    if "training_tokens" in fit:
        steps = fit.get("steps_made", 0)
        about += f", fitted on {fit['training_tokens']:,} tokens, {steps} KL steps"
    return about + (lens.mark(model) or ", checked against the model")


def deliver_kl(
    arguments: Namespace,
    view: rp.ModelView,
    origin: rp.Provenance,
    lens: rp.TunedLens,
    columns: Mapping[str, list[float]],
    *,
    title: str,
    over: str,
    facts: Facts,
    body: Mapping[str, Any],
) -> None:
    """Delivers the KL of lenses by layer, `columns`, each by what read it.

    `title` stands above the table, `over` says what the means are taken over; the rest is as in
    `deliver`.
    """
    import pandas

    part = Section(
        facts=facts,
        caveats=lens.caveats(),
        tables=(shown.kl_table(title, columns, lens.labels),),
        draws=(drawn("kl_by_layer", columns, lens.labels, over=over),),
    )
    named = {name.replace(" ", "_"): values for name, values in columns.items()}
    frame = pandas.DataFrame({"layer": lens.labels, **named})
    body = {**body, "format": "resid_patching", "fingerprint": lens.fingerprint.as_dict()}
    deliver(arguments, view, origin, "Logit and tuned lens by layer", [part], body, lambda: frame)


def deliver_readings(
    arguments: Namespace,
    captured: rp.Run,
    readouts: Mapping[str, rp.LensReadout],
    asked: Asked,
    *,
    lens: rp.TunedLens | None,
    mean_kl: Table | None = None,
    compare: bool = False,
) -> None:
    """Reads the prompts through one lens or two, by name, and delivers what they say.

    `lens` is the tuned one, `mean_kl` a table below; with `compare`, two lenses at one position
    are one table.
    """
    import pandas

    prompts, answers, foils = asked
    if arguments.top > (d_vocab := captured.view.d_vocab):
        raise UsageError(f"--top {arguments.top} was asked for, but the model has {d_vocab} tokens")
    if arguments.first is not None:
        captured.locate(arguments.first)
    places = None
    if arguments.position is not None:
        places = captured.locate(arguments.position).index[:, 0].tolist()
    readings = [
        LensOutput.of(name, readout, arguments.top, answers, foils)
        for name, readout in readouts.items()
    ]
    frames = [reading.frame() for reading in readings]
    sections = [
        _of_prompt(readings, frames, n, None if places is None else places[n], arguments, compare)
        for n in range(len(captured))
    ]
    sections.append(_of_all(readings, frames, mean_kl))
    if lens is not None:
        said = (("lens", describe(lens, arguments.lens, captured.view)),)
        sections[0] = dataclasses.replace(sections[0], facts=(*said, *sections[0].facts))
    first, *others = [reading.body() for reading in readings]
    more = {"prompts": prompts, "positions": places, "folder": arguments.lens, "others": others}
    deliver(
        arguments,
        captured.view,
        readings[0].kl.provenance,
        " and ".join(readouts).capitalize(),
        sections,
        {**first, **more},
        lambda: pandas.concat(frames),
        prompts={"prompt": prompts},
        main=drawn("trajectory", *readouts.values()),
    )


def _of_prompt(
    readings: Sequence[LensOutput],
    frames: Sequence[Any],
    n: int,
    place: int | None,
    arguments: Namespace,
    compare: bool,
) -> Section:
    """What the lenses say of one prompt: grids of all positions, or tables at one."""
    tables, grids = [], []
    for reading, frame in zip(readings, frames, strict=True):
        grid = shown.token_grid(reading, frame, n, arguments.first)
        if place is None:
            grids += [grid, *shown.rank_grids(reading, n, arguments.first)]
            continue
        grids.append(dataclasses.replace(grid, on="page"))
        if not compare:
            tables.append(shown.depth_table(reading, frame, n, place))
    if place is not None and compare:
        tables.append(shown.comparison_table(readings, frames, n, place))
    texts = readings[0].top.token_texts
    name = f"tokens {n}" if len(texts) > 1 else "tokens"
    return Section(
        facts=((name, token_items(texts[n])),),
        tables=tuple(tables),
        grids=tuple(grids),
        on="both" if n < _PROMPTS_SHOWN else "page",
    )


def _of_all(
    readings: Sequence[LensOutput], frames: Sequence[Any], mean_kl: Table | None
) -> Section:
    """Below the prompts: what a lens is not, KL and entropy by layer, and all cells for a page."""
    readouts = [reading.readout for reading in readings]
    left = len(readings[0].top.token_texts) - _PROMPTS_SHOWN
    caveats = dict.fromkeys(line for readout in readouts for line in readout.caveats())
    cells = shown.cells_table(frames)
    return Section(
        facts=(("", f"... and {left} more prompts; --csv and --json write all"),) * (left > 0),
        caveats=tuple(caveats),
        tables=(cells,) if mean_kl is None else (mean_kl, cells),
        draws=tuple(
            drawn("lens_by_layer", *readouts, quantity=quantity) for quantity in ("kl", "entropy")
        ),
    )
