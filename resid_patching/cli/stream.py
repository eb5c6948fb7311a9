"""`resid-patching stream`: the running total of a prompt, as a table, JSON and CSV."""

from __future__ import annotations

import argparse
import contextlib
import json
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
from resid_patching.cli.page import asked, require_files, write_page
from resid_patching.cli.pages import stream_page
from resid_patching.cli.screen import (
    bar,
    console,
    csv_text,
    new_table,
    print_model,
    print_tokens,
    quoted,
)

if TYPE_CHECKING:
    from resid_patching.prompts import Prompts
    from resid_patching.run import Run
    from resid_patching.stream import StreamReport

_PROMPTS_SHOWN = 4
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

    from resid_patching.files import write_text
    from resid_patching.run import capture
    from resid_patching.stream import stream_report

    captured = capture(model, prompts, prepend_bos=arguments.prepend_bos)
    clean = stream_report(captured, positions=arguments.positions)
    how = _intervention(arguments)
    changed = None
    if how is not None:
        changed = stream_report(captured, how, positions=arguments.positions)
    if arguments.json is not None:
        write_text(arguments.json, _as_json(clean, changed, prompts, stand_in))
    if arguments.csv is not None:
        write_text(arguments.csv, _as_csv(clean, changed))
    flags = asked(arguments)
    write_page(arguments, lambda: stream_page(clean, changed, prompts, stand_in, flags))
    _print(captured, clean, changed, stand_in)


def _intervention(arguments: argparse.Namespace) -> Any:
    from resid_patching.stream import Overwrite, WriteScale

    if arguments.overwrite:
        return Overwrite()
    return None if arguments.write_scale is None else WriteScale(arguments.write_scale)


def _as_json(
    clean: StreamReport, changed: StreamReport | None, prompts: list[str], stand_in: str | None
) -> str:
    """The changed report, or the clean one, readable by `StreamReport.from_json`."""
    body = json.loads((changed or clean).to_json())
    body["command"] = "stream"
    body["stand_in"] = stand_in
    body["prompts"] = prompts
    body["clean"] = None if changed is None else json.loads(clean.to_json())
    return json.dumps(body, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def _as_csv(clean: StreamReport, changed: StreamReport | None) -> str:
    import pandas

    frames = [
        report.to_frame().assign(intervention=report.how or "none")
        for report in (clean, changed)
        if report is not None
    ]
    return csv_text(pandas.concat(frames))


def _print(
    run: Run, clean: StreamReport, changed: StreamReport | None, stand_in: str | None
) -> None:
    out = console()
    print_model(out, run.view, clean.provenance, stand_in)
    out.print()
    print_tokens(out, run.prompts)
    for report in (clean, changed):
        if report is not None:
            _print_writes(out, report)
    _print_survival(out, run.prompts, clean, changed)


def _print_writes(out: Any, report: StreamReport) -> None:
    frame = report.summary()
    n = int(frame["n"].iloc[0])
    title = "running total, clean" if report.how is None else f"intervention: {report.how}"
    out.print()
    out.print(f"{title}; {f'mean over {n} positions' if n > 1 else 'one position'}")
    table = new_table("write", "norm", "stream after", "share", "cosine with start", "")
    start = float(report.start_norm.cpu().double().nanmean())
    table.add_row("start", "", f"{start:.3f}", "", "+1.0000", "")
    for row in frame.to_dict("records"):
        cosine = float(row["mean_cosine"])
        table.add_row(
            str(row["write"]),
            f"{row['mean_write_norm']:.3f}",
            f"{row['mean_stream_norm']:.3f}",
            f"{row['mean_share']:.1%}",
            f"{cosine:+.4f}",
            bar(0.0 if math.isnan(cosine) else cosine, 1.0, 10),
        )
    out.print(table)
    terms = "last write" if _overwrites(report) else "start + all writes"
    out.print(
        f"largest |{terms} - last state|  {report.exactness:.1e}, "
        f"{report.relative_exactness:.1e} of the largest entry summed"
    )


def _overwrites(report: StreamReport) -> bool:
    from resid_patching.stream import Overwrite

    return report.how == str(Overwrite())


def _print_survival(
    out: Any, prompts: Prompts, clean: StreamReport, changed: StreamReport | None
) -> None:
    """Cosine of the last state with the start, prompt by prompt and position by position."""
    reports = [clean] if changed is None else [clean, changed]
    table = new_table("survival", *["clean", "changed"][: len(reports)], "")
    for row, texts in enumerate(clean.token_texts[:_PROMPTS_SHOWN]):
        for place, text in enumerate(texts[:_POSITIONS_SHOWN]):
            name = f"{clean.axis('pos').labels[place]} {quoted(text)}"
            values = [float(report.survival[row, place]) for report in reports]
            cells = [f"{value:+.4f}" for value in values]
            last = 0.0 if math.isnan(values[-1]) else values[-1]
            table.add_row(
                f"{row}: {name}" if len(prompts) > 1 else name, *cells, bar(last, 1.0, 10)
            )
    out.print()
    out.print(table)
    if any(len(texts) > _POSITIONS_SHOWN for texts in clean.token_texts[:_PROMPTS_SHOWN]):
        out.print(f"the first {_POSITIONS_SHOWN} positions of each prompt; --csv writes all")
    means = [float(report.survival.cpu().double().nanmean()) for report in reports]
    line = f"mean survival, cos(start, last state)  {means[0]:+.4f}"
    out.print(line if changed is None else f"{line} clean, {means[1]:+.4f} changed")
