"""What every command does with what it found: files, a page, a picture, and the terminal."""

from __future__ import annotations

import csv
import json
import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import resid_patching as rp
from resid_patching.files import write_bytes, write_text
from resid_patching.show.html import page_of, texts_frame
from resid_patching.show.report import Document, Section
from resid_patching.show.text import console, print_report

if TYPE_CHECKING:
    import pandas

_NOT_ASKED = ("json", "csv", "html", "png", "debug", "stand_in", "command")


def deliver(
    arguments: Namespace,
    view: rp.ModelView,
    origin: rp.Provenance,
    title: str,
    sections: Sequence[Section],
    body: Mapping[str, Any],
    frame: Callable[[], pandas.DataFrame],
    *,
    prompts: Mapping[str, Sequence[str] | None] | None = None,
    main: Callable[[], Any] | None = None,
) -> None:
    """Writes the files that were asked for, and prints the report.

    Args:
        arguments: the flags --json, --csv, --html and --png, and what else was asked.
        view: the model.
        origin: where the numbers come from.
        title: of the page, without the model's name.
        sections: what is shown.
        body: what the JSON holds; of a result, readable by its `from_json`.
        frame: makes what the CSV holds.
        prompts: what was asked about, by the names of columns.
        main: draws what the PNG shows; None for the first picture.
    """
    report = Document(
        title=f"{title}, {origin.model}",
        origin=origin,
        model=model_text(view, origin),
        sections=tuple(sections),
        prompts=None if prompts is None else texts_frame(prompts),
        stand_in=arguments.stand_in,
        main=main,
    )
    if arguments.json is not None:
        whole = {**body, "command": arguments.command, "stand_in": arguments.stand_in}
        text = json.dumps(whole, ensure_ascii=False, indent=1, allow_nan=False)
        write_text(arguments.json, text + "\n")
    if arguments.csv is not None:
        # All texts in quotes: pandas leaves a token with a carriage return bare, which ends a line.
        text = frame().to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC)
        write_text(arguments.csv, text)
    if arguments.html is not None or arguments.png is not None:
        page = page_of(report, {n: v for n, v in vars(arguments).items() if n not in _NOT_ASKED})
        image = b"" if arguments.png is None else page.png()
        if arguments.html is not None:
            write_text(arguments.html, page.html())
        if arguments.png is not None:
            write_bytes(arguments.png, image)
    print_report(console(), report)


def body_of(result: rp.Result, **known: Any) -> dict[str, Any]:
    """A result as JSON, with what the command knew beside it."""
    return {**result.to_dict(), **_plain(known)}


def _plain(value: Any) -> Any:
    """What JSON can hold: tensors as lists, and null for what is no finite number."""
    match value:
        case dict():
            return {name: _plain(item) for name, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case float():
            return value if math.isfinite(value) else None
    return _plain(value.tolist()) if hasattr(value, "tolist") else value


def model_text(view: rp.ModelView, origin: rp.Provenance) -> str:
    """Which model ran, and in what state."""
    return f"{origin.model_text}, {view.n_layers} layers of {view.n_heads} heads"
