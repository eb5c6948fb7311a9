"""`resid-patching stream`: the running total of a prompt, as a table, JSON and CSV."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any

from resid_patching.cli.frame import (
    Parser,
    UsageError,
    add_model_flags,
    add_output_flags,
    load_model,
)
from resid_patching.cli.inputs import add_prompt_flags, read_prompts
from resid_patching.cli.output import body_of, deliver, model_text, require_files

if TYPE_CHECKING:
    from resid_patching.show.report import Table
    from resid_patching.stream import StreamReport

_POSITIONS_SHOWN = 24


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The flags of `stream`."""
    parser = Parser(
        prog=prog,
        description="How the stream grows, write by write: norm of each write, its share of the "
        "stream after it, cosine with the start, and how exactly start + writes give the last "
        "state. --write-scale and --overwrite run the model again with every write changed.",
    )
    add_prompt_flags(parser)
    parser.add_argument(
        "--positions",
        type=int,
        metavar="P",
        help="report this position alone, from 0, or from the end if negative (unset: all)",
    )
    change = parser.add_mutually_exclusive_group()
    change.add_argument(
        "--write-scale",
        type=_factor,
        metavar="A",
        help="run again with every attention and MLP output multiplied by A",
    )
    change.add_argument(
        "--overwrite",
        action="store_true",
        help="run again with every attention and MLP output replacing the state",
    )
    add_model_flags(parser)
    add_output_flags(parser)
    parser.set_defaults(answer=None, foil=None)
    return parser


def _factor(text: str) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise argparse.ArgumentTypeError(f"{text} is not a finite number")


def run(arguments: argparse.Namespace) -> None:
    """Reports the running total and prints it."""
    prompts, answers, _ = read_prompts(arguments)
    if answers is not None:
        raise UsageError(f"{arguments.prompts}: stream reads no answers; give one prompt a line")
    require_files(arguments)
    model, stand_in = load_model(arguments)

    import pandas

    from resid_patching.run import capture
    from resid_patching.show.html import texts_frame
    from resid_patching.show.report import Document, section, token_facts
    from resid_patching.stream import stream_report

    captured = capture(model, prompts, prepend_bos=arguments.prepend_bos)
    reports = [stream_report(captured, positions=arguments.positions)]
    how = _intervention(arguments)
    if how is not None:
        reports.insert(0, stream_report(captured, how, positions=arguments.positions))
    main, clean = reports[0], reports[-1]
    parts = [section(each, title=_title(each) if how else "") for each in reports]
    for number, part in enumerate(parts[:-1]):
        parts[number] = dataclasses.replace(part, caveats=())
    facts = (*token_facts(captured.prompts.token_texts), *parts[0].facts)
    tables = (*parts[-1].tables, _survival(clean, main if how else None))
    parts[0] = dataclasses.replace(parts[0], facts=facts)
    parts[-1] = dataclasses.replace(parts[-1], tables=tables)
    report = Document(
        title=f"The running total, {main.how or 'clean'}, {main.provenance.model}",
        origin=main.provenance,
        model=model_text(captured.view, main.provenance),
        sections=tuple(parts),
        prompts=texts_frame({"prompt": prompts}),
        stand_in=stand_in,
    )
    body = body_of(main, command="stream", stand_in=stand_in, prompts=prompts)
    body["clean"] = body_of(clean) if how else None
    frames = [each.to_frame().assign(intervention=each.how or "none") for each in reports[::-1]]
    deliver(arguments, report, body=body, frame=lambda: pandas.concat(frames))


def _title(report: StreamReport) -> str:
    return f"The running total, {report.how or 'clean'}"


def _survival(clean: StreamReport, changed: StreamReport | None) -> Table:
    """Cosine of the last state with the start, prompt by prompt and position by position."""
    from resid_patching.show.report import Table

    frame = clean.survivals().rename(columns={"survival": "clean"})
    if changed is not None:
        frame["changed"] = changed.survivals()["survival"]
    bar = str(frame.columns[-1])
    return Table(frame, "survival: cos(start, last state)", bar=bar, top=_POSITIONS_SHOWN)


def _intervention(arguments: argparse.Namespace) -> Any:
    from resid_patching.stream import Overwrite, WriteScale

    if arguments.overwrite:
        return Overwrite()
    return None if arguments.write_scale is None else WriteScale(arguments.write_scale)
