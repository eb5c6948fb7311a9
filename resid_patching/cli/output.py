"""What every command does with what it found: files, a page, a picture, and the terminal."""

from __future__ import annotations

import csv
import json
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from resid_patching.cli.frame import require_writable

if TYPE_CHECKING:
    import pandas

    from resid_patching.lens.tuned import TunedLens
    from resid_patching.models import ModelView
    from resid_patching.result import Provenance
    from resid_patching.show.report import Document, Facts

_NOT_ASKED = ("json", "csv", "html", "png", "debug", "stand_in")


def require_files(arguments: Namespace) -> None:
    """Refuses output files that cannot be written or drawn, before anything is computed.

    Raises:
        UsageError: a file cannot be written.
        MissingExtraError: a PNG is asked for and nothing can draw one.
    """
    rows = getattr(arguments, "rows", None)
    require_writable(arguments.json, arguments.csv, arguments.html, arguments.png, rows)
    if arguments.png is not None:
        from resid_patching.plots import require_renderer

        require_renderer()


def deliver(
    arguments: Namespace,
    report: Document,
    *,
    body: dict[str, Any],
    frame: Callable[[], pandas.DataFrame],
) -> None:
    """Writes the files that were asked for, and prints the report.

    Args:
        arguments: the flags --json, --csv, --html and --png.
        report: what is shown.
        body: what the JSON holds; of a result, readable by its `from_json`.
        frame: makes what the CSV holds.
    """
    from resid_patching.files import write_bytes, write_text
    from resid_patching.show.html import page_of
    from resid_patching.show.text import console, print_report

    if arguments.json is not None:
        text = json.dumps(body, ensure_ascii=False, indent=1, allow_nan=False)
        write_text(arguments.json, text + "\n")
    if arguments.csv is not None:
        write_text(arguments.csv, csv_text(frame()))
    if arguments.html is not None or arguments.png is not None:
        flags = {name: v for name, v in vars(arguments).items() if name not in _NOT_ASKED}
        page = page_of(report, flags)
        image = b"" if arguments.png is None else page.png()
        if arguments.html is not None:
            write_text(arguments.html, page.html())
        if arguments.png is not None:
            write_bytes(arguments.png, image)
    print_report(console(), report)


def deliver_kl(
    arguments: Namespace,
    lens: TunedLens,
    columns: dict[str, list[float]],
    *,
    title: str,
    over: str,
    facts: Facts,
    view: ModelView,
    origin: Provenance,
    stand_in: str | None,
    known: dict[str, Any],
) -> None:
    """Delivers the KL of lenses by layer.

    Args:
        arguments: the flags.
        lens: the tuned lens.
        columns: KL of each layer, by what read it.
        title: the line above the table.
        over: what the means are taken over.
        facts: lines above.
        view: the model.
        origin: where the numbers come from.
        stand_in: says so where the shipped model stands in for another.
        known: what the JSON holds.
    """
    import pandas

    from resid_patching.show.lens import kl_table
    from resid_patching.show.report import Document, Section, drawn

    part = Section(
        facts=facts,
        caveats=lens.caveats(),
        tables=(kl_table(title, columns, lens.labels),),
        draws=(drawn("kl_by_layer", columns, lens.labels, over=over),),
    )
    report = Document(
        title=f"Logit and tuned lens by layer, {origin.model}",
        origin=origin,
        model=model_text(view, origin),
        sections=(part,),
        stand_in=stand_in,
    )
    named = {name.replace(" ", "_"): values for name, values in columns.items()}
    frame = pandas.DataFrame({"layer": lens.labels, **named})
    body = {"format": "resid_patching", "stand_in": stand_in, **known}
    deliver(arguments, report, body=body, frame=lambda: frame)


def body_of(result: Any, **known: Any) -> dict[str, Any]:
    """A result as JSON, with what the command knew beside it."""
    return {**result.to_dict(), **known}


def csv_text(frame: pandas.DataFrame) -> str:
    """A frame as CSV.

    All texts are in quotes: pandas leaves a token with a carriage return bare, which ends a line.
    """
    return frame.to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC)


def model_text(view: ModelView, origin: Provenance) -> str:
    """Which model ran, and in what state."""
    return f"{origin.model_text}, {view.n_layers} layers of {view.n_heads} heads"
