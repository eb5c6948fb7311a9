"""What commands print: lines, tables and bars, for a terminal or a file."""

from __future__ import annotations

import csv
import sys
from typing import TYPE_CHECKING, Any

from resid_patching.markup import printable

if TYPE_CHECKING:
    from rich.console import Console


def quoted(text: str) -> str:
    """A token in quotes, so that its leading space is seen."""
    return f'"{printable(text)}"'


def console() -> Console:
    """A console that prints literally: rich on a terminal, plain when redirected."""
    from rich.console import Console

    class LiteralConsole(Console):
        def on_broken_pipe(self) -> None:
            """Leaves a closed pipe to `run_guarded`; rich itself would exit with 1."""
            raise BrokenPipeError

        def render_str(self, text: str, **options: Any) -> Any:
            """Text with control characters as escapes, whatever file or model it names."""
            return super().render_str("\n".join(map(printable, text.split("\n"))), **options)

    width = None if sys.stdout.isatty() else 100
    return LiteralConsole(
        file=sys.stdout, markup=False, emoji=False, highlight=False, width=width, soft_wrap=False
    )


def fancy() -> bool:
    """Whether the output is a terminal that shows block characters."""
    if not sys.stdout.isatty():
        return False
    try:
        "█▏│".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def shades(out: Console) -> bool:
    """Whether cells are shaded: with few colours, text would vanish in its background."""
    return fancy() and not out.no_color and out.color_system in ("256", "truecolor")


def csv_text(frame: Any) -> str:
    """A frame as CSV.

    All texts are in quotes: pandas leaves a token with a carriage return bare, which ends a line.
    """
    return frame.to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC)


def bar(value: float, largest: float, width: int = 16) -> str:
    """A bar that grows left for negative values and right for positive ones."""
    block, axis = ("█", "│") if fancy() else ("#", "|")
    share = 0.0 if largest <= 0 else min(1.0, abs(value) / largest)
    filled = block * round(share * width)
    return f"{filled if value < 0 else '':>{width}}{axis}{filled if value > 0 else '':<{width}}"


def print_line(out: Console, name: str, *items: str, gap: str = "  ") -> None:
    """A named line of items, wrapped between them."""
    width, line = max(40, out.width), f"{name:<8} "
    for number, item in enumerate(items):
        if number and len(line) + len(item) > width:
            out.print(line.rstrip(), soft_wrap=True)
            line = " " * 9
        line += item + gap
    out.print(line.rstrip(), soft_wrap=True)


def print_model(out: Console, view: Any, origin: Any, stand_in: str | None) -> None:
    """The lines that say which model ran, and in what state."""
    if stand_in is not None:
        print_line(out, "note", *stand_in.split(": "))
    print_line(
        out,
        "model",
        f"{printable(origin.model)} ({origin.backend}, TransformerLens {origin.transformer_lens}),",
        f"{origin.processing}, {origin.dtype}, {view.n_layers} layers of {view.n_heads} heads",
        gap=" ",
    )


def print_tokens(out: Console, prompts: Any, *, rows: int = 4, tokens: int = 60) -> None:
    """The tokens of the first prompts, each with its position."""
    for texts in prompts.token_texts[:rows]:
        items = [f"{p} {quoted(text)}" for p, text in enumerate(texts[:tokens])]
        if len(texts) > tokens:
            items.append(f"... {len(texts) - tokens} more tokens")
        print_line(out, "tokens", *items)
    if len(prompts) > rows:
        print_line(out, "", f"... {len(prompts) - rows} more prompts")


def new_table(*columns: str) -> Any:
    """An empty table: the first column and unnamed ones to the left, numbers to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD if fancy() else box.ASCII2, pad_edge=False, show_edge=False)
    for number, name in enumerate(columns):
        left = number == 0 or not name
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    return table
