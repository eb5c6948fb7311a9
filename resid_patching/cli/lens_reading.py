"""What the commands that read lenses share: flags, reports and files; lenses found in folders."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resid_patching.cli.frame import UsageError
from resid_patching.cli.output import deliver, model_text

if TYPE_CHECKING:
    from resid_patching.lens.readout import LensReadout
    from resid_patching.lens.tuned import TunedLens
    from resid_patching.run import Run
    from resid_patching.show.lens import LensOutput
    from resid_patching.show.report import Section, Table

_PROMPTS_SHOWN = 4


def add_place_flags(parser: argparse.ArgumentParser, in_depth: str) -> None:
    """Adds the flags that say which positions are shown.

    Args:
        parser: where.
        in_depth: what is shown at one position.
    """
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--position",
        type=int,
        metavar="P",
        help=f"one position {in_depth}, from 0, or from the end if negative (unset: a table of "
        "all)",
    )
    place.add_argument(
        "--from",
        dest="first",
        type=_position,
        metavar="P",
        help="the table's first position, from 0 (unset: as many of the last as fit)",
    )


def _position(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0; this position counts from the start")
    return value


def every(readout: LensReadout, stride: int) -> LensReadout:
    """A lens's first row, every so many after it, and always the last."""
    from resid_patching.lens.readout import LensReadout

    last = len(readout.rows) - 1
    kept = [number for number in range(last + 1) if number % stride == 0 or number == last]
    translate = readout.translate

    def moved(row: int, states: Any) -> Any:
        return states if translate is None else translate(kept[row], states)

    rows = tuple(readout.rows[number] for number in kept)
    return LensReadout(readout.run, rows, readout.plan, moved)


def beside(tuned: LensReadout, run: Run) -> LensReadout:
    """The logit lens on the states that a tuned lens reads."""
    from resid_patching.lens.readout import LensReadout

    return LensReadout(run, tuned.rows, tuned.plan.replace("tuned lens", "logit lens"))


def places_of(run: Run, arguments: argparse.Namespace) -> list[int] | None:
    """The --position in each prompt, counted from 0; None for all.

    Raises:
        PositionError: a prompt has no such position, or none where the table would begin.
    """
    if arguments.first is not None:
        run.locate(arguments.first)
    if arguments.position is None:
        return None
    return run.locate(arguments.position).index[:, 0].tolist()


def require_answers(answers: list[str] | None, foils: list[str] | None) -> None:
    """Refuses foils without answers.

    Raises:
        UsageError: foils alone.
    """
    if foils is not None and answers is None:
        raise UsageError("--foil is shown beside an --answer; none was given")


def require_lens(folder: str) -> None:
    """Refuses a folder that is missing, before a model is loaded.

    Raises:
        UsageError: there is none; what lies beside it is named.
    """
    path = Path(folder)
    if folder == "demo" or path.exists():  # demo: the lens shipped with the demo model
        return
    parent = path.absolute().parent
    while not parent.is_dir():
        parent = parent.parent
    names = ", ".join(sorted(p.name for p in parent.iterdir() if p.is_dir())[:8])
    has = f"has the folders {names}" if names else "has no folders"
    raise UsageError(f"there is no lens at {path.absolute()}: {parent} {has}")


def describe(lens: TunedLens, folder: str, model: Any) -> str:
    """Which tuned lens this is, and whether it is of the model, for a line."""
    about = [f"tuned lens from {folder}"]
    if lens.site != "resid_pre":
        about.append(f"on {lens.site}")
    fit = lens.record.get("fit", {})
    if "training_tokens" in fit:
        tokens = f"{fit['training_tokens']:,} tokens"
        about.append(f"fitted on {tokens}, {fit.get('steps_made', 0)} KL steps")
    about.append(lens.mark(model).removeprefix(", ") or "checked against the model")
    return ", ".join(about)


def deliver_readings(
    captured: Run,
    readouts: Mapping[str, LensReadout],
    asked: tuple[list[str], list[str] | None, list[str] | None],
    arguments: argparse.Namespace,
    *,
    lens: TunedLens | None,
    stand_in: str | None,
    mean_kl: Table | None = None,
    compare: bool = False,
) -> None:
    """Reads the prompts through one lens or two, writes the files and shows what they say.

    Args:
        captured: the run.
        readouts: the lenses by name.
        asked: prompts, answers and foils.
        arguments: the flags.
        lens: the tuned lens, where there is one.
        stand_in: says so where the shipped model stands in for another.
        mean_kl: a table below.
        compare: whether two lenses at one position are one table.

    Raises:
        UsageError: more top tokens than there are.
    """
    import pandas

    from resid_patching.show.html import texts_frame
    from resid_patching.show.lens import LensOutput
    from resid_patching.show.report import Document, drawn

    prompts, answers, foils = asked
    if arguments.top > (d_vocab := captured.view.d_vocab):
        raise UsageError(f"--top {arguments.top} was asked for, but the model has {d_vocab} tokens")
    places = places_of(captured, arguments)
    readings = [
        LensOutput.of(name, readout, arguments.top, answers, foils)
        for name, readout in readouts.items()
    ]
    frames = [reading.frame() for reading in readings]
    origin = readings[0].kl.provenance
    sections = _sections(captured, readings, frames, places, arguments, compare)
    if lens is not None:
        said = (("lens", describe(lens, arguments.lens, captured.view)),)
        sections[0] = dataclasses.replace(sections[0], facts=(*said, *sections[0].facts))
    if mean_kl is not None:
        tables = (mean_kl, *sections[-1].tables)
        sections[-1] = dataclasses.replace(sections[-1], tables=tables)
    names = " and ".join(readouts)
    report = Document(
        title=f"{names[:1].upper()}{names[1:]}, {origin.model}",
        origin=origin,
        model=model_text(captured.view, origin),
        sections=tuple(sections),
        prompts=texts_frame({"prompt": prompts}),
        stand_in=stand_in,
        main=drawn("trajectory", *readouts.values()),
    )
    body = {**readings[0].body(), "stand_in": stand_in, "prompts": prompts, "positions": places}
    command = "tuned-lens show" if compare else "logit-lens"
    body |= {"command": command, "folder": arguments.lens}
    body["others"] = [reading.body() for reading in readings[1:]]
    deliver(arguments, report, body=body, frame=lambda: pandas.concat(frames))


def _sections(
    captured: Run,
    readings: Sequence[LensOutput],
    frames: Sequence[Any],
    places: list[int] | None,
    arguments: argparse.Namespace,
    compare: bool,
) -> list[Section]:
    """A section for each prompt that is shown, and one of all cells for the page."""
    from resid_patching.show import lens as show
    from resid_patching.show.report import Section, drawn, token_items

    sections = []
    texts = captured.prompts.token_texts
    for n in range(len(captured)):
        pairs = list(zip(readings, frames, strict=True))
        tables, grids = [], []
        for reading, frame in pairs:
            grid = show.token_grid(reading, frame, n, arguments.first)
            grids.append(grid if places is None else dataclasses.replace(grid, on="page"))
            if places is None:
                grids += show.rank_grids(reading, n, arguments.first)
            elif not compare:
                tables.append(show.depth_table(reading, frame, n, places[n]))
        if places is not None and compare:
            tables.append(show.comparison_table(readings, frames, n, places[n]))
        name = f"tokens {n}" if len(captured) > 1 else "tokens"
        sections.append(
            Section(
                facts=((name, token_items(texts[n])),),
                tables=tuple(tables),
                grids=tuple(grids),
                on="both" if n < _PROMPTS_SHOWN else "page",
            )
        )
    left = len(captured) - _PROMPTS_SHOWN
    readouts = [reading.readout for reading in readings]
    caveats = dict.fromkeys(line for readout in readouts for line in readout.caveats())
    by_layer = [drawn("lens_by_layer", *readouts)]
    by_layer.append(drawn("lens_by_layer", *readouts, quantity="entropy"))
    end = Section(
        facts=(("", f"... and {left} more prompts; --csv and --json write all"),) * (left > 0),
        caveats=tuple(caveats),
        tables=(show.cells_table(frames),),
        draws=tuple(by_layer),
    )
    return [*sections, end]
