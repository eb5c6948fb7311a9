"""`resid-patching stream`: the running total of a prompt, as a table, JSON and CSV."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from argparse import ArgumentTypeError, Namespace

import resid_patching as rp
from resid_patching.cli.flags import PROMPTS
from resid_patching.cli.frame import Parser, command_parser, load_model
from resid_patching.cli.inputs import read_bare_prompts
from resid_patching.cli.output import body_of, deliver
from resid_patching.show.report import Table, section, token_facts

_POSITIONS_SHOWN = 24


def build_parser(prog: str) -> Parser:
    """The flags of `stream`."""
    return command_parser(
        prog,
        "How the stream grows, write by write: norm of each write, its share of the stream after "
        "it, cosine with the start, and how exactly start + writes give the last state. "
        "--write-scale and --overwrite run the model again with every write changed.",
        {
            **PROMPTS,
            "--positions P": "report this position alone, from 0, or from the end if negative "
            "(unset: all)",
            "one of": {
                "--write-scale A": "run again with every attention and MLP output multiplied by A",
                "--overwrite": "run again with every attention and MLP output replacing the state",
            },
        },
        write_scale=_factor,
    )


def _factor(text: str) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise ArgumentTypeError(f"{text} is not a finite number")


def run(arguments: Namespace) -> None:
    """Reports the running total and prints it."""
    import pandas

    prompts = read_bare_prompts(arguments)
    view = load_model(arguments)
    captured = rp.capture(view, prompts, prepend_bos=arguments.prepend_bos)
    how = rp.Overwrite() if arguments.overwrite else None
    if arguments.write_scale is not None:
        how = rp.WriteScale(arguments.write_scale)
    reports = [rp.stream_report(captured, positions=arguments.positions)]
    if how is not None:
        reports.insert(0, rp.stream_report(captured, how, positions=arguments.positions))
    titles = [f"The running total, {each.how or 'clean'}" for each in reports]
    parts = [
        section(each, title=title if how else "")
        for each, title in zip(reports, titles, strict=True)
    ]
    if how is not None:  # both have the same caveats
        parts[0] = dataclasses.replace(parts[0], caveats=())
    facts = (*token_facts(captured.prompts.token_texts), *parts[0].facts)
    parts[0] = dataclasses.replace(parts[0], facts=facts)
    tables = (*parts[-1].tables, _survival(reports))
    parts[-1] = dataclasses.replace(parts[-1], tables=tables)
    main, *clean = reports
    body = body_of(main, prompts=prompts, clean=body_of(clean[0]) if clean else None)
    frames = [each.to_frame().assign(intervention=each.how or "none") for each in reports[::-1]]
    deliver(
        arguments,
        view,
        main.provenance,
        titles[0],
        parts,
        body,
        lambda: pandas.concat(frames),
        prompts={"prompt": prompts},
    )


def _survival(reports: list[rp.StreamReport]) -> Table:
    """Cosine of the last state with the start, prompt by prompt and position by position."""
    frame = reports[-1].survivals().rename(columns={"survival": "clean"})
    if len(reports) > 1:
        frame["changed"] = reports[0].survivals()["survival"]
    bar = str(frame.columns[-1])
    return Table(frame, "survival: cos(start, last state)", bar=bar, top=_POSITIONS_SHOWN)
