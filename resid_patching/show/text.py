"""A report as lines, tables and grids, for a terminal or a file."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from resid_patching.markup import cell_text, printable
from resid_patching.show.report import Document, Section, Table, TextGrid, clipped_target

if TYPE_CHECKING:
    from rich.console import Console


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


def print_report(out: Console, report: Document) -> None:
    """Prints a report, section by section."""
    if report.stand_in is not None:
        print_line(out, "note", report.stand_in.split(": "))
    print_line(out, "model", report.model)
    shown = [part for part in report.sections if part.on != "page"]
    several = len([part for part in shown if part.title]) > 1
    for number, part in enumerate(shown, start=1):
        _print_section(out, part, f"{number}. " if several else "")


def _print_section(out: Console, part: Section, number: str) -> None:
    out.print()
    if part.title:
        out.print(f"{number}{part.title}", style="bold")
    if part.says:
        out.print(part.says)
    for name, said in part.facts:
        print_line(out, name, said)
    for table in part.tables:
        if table.on != "page":
            print_table(out, table)
    for grid in part.grids:
        if grid.on != "page":
            print_grid(out, grid)
    if part.caveats and (part.facts or part.tables or part.grids):
        out.print()
    for line in part.caveats:
        out.print(line, style="dim" if fancy() else "")


def print_line(out: Console, name: str, said: str | Sequence[str]) -> None:
    """A named line of words or of items, broken between them where it is long."""
    items, gap = (said.split(" "), " ") if isinstance(said, str) else (said, "  ")
    width, line = max(40, out.width), f"{name:<8} "
    for number, item in enumerate(map(printable, items)):
        if number and len(line) + len(item) > width:
            out.print(line.rstrip(), soft_wrap=True)
            line = " " * 9
        line += item + gap
    out.print(line.rstrip(), soft_wrap=True)


# Tables


def print_table(out: Console, table: Table) -> None:
    """Prints a table's first rows, what the others sum to, and how many there are."""
    from rich import box
    from rich.table import Table as RichTable

    frame = table.frame if table.top is None else table.frame.iloc[: table.top]
    rest = table.frame.iloc[len(frame) :]
    columns = [_column_texts(str(name), frame[name]) for name in frame.columns]
    room = _room_for_lists(out, frame, columns)
    out.print()
    if table.title:
        out.print(table.title)
    lines = box.SIMPLE_HEAD if fancy() else box.ASCII2
    drawn = RichTable(box=lines, pad_edge=False, show_edge=False)
    for number, name in enumerate(frame.columns):
        left = number == 0 or frame[name].dtype.kind not in "fiu"
        drawn.add_column(shown(str(name)), justify="left" if left else "right", no_wrap=True)
    if table.bar:
        drawn.add_column("", no_wrap=True)
        largest = float(frame[table.bar].abs().max()) if len(frame) else 0.0
        columns.append([bar_text(value, largest) for value in frame[table.bar]])
    for row in zip(*columns, strict=True):
        drawn.add_row(*(cell if isinstance(cell, str) else _packed(cell, room) for cell in row))
    what = table.what if len(rest) > 1 else table.what.removesuffix("s")
    if table.sums and len(rest):
        names = [str(name) for name in frame.columns[1:]]
        sums = [cell_text(n, float(rest[n].sum())) if n in table.sums else "" for n in names]
        drawn.add_row(f"{len(rest)} other {what}", *sums, "")
    out.print(drawn)
    if len(rest) and not table.sums:
        out.print(f"and {len(rest)} more {what} (--top {len(table.frame)} shows all)")
    for line in table.after:
        out.print(line)


def _column_texts(name: str, values: Iterable[Any]) -> list[str | list[str]]:
    """The cells of a column as text; a list of items stays one."""
    if name in ("target", "sender", "component"):
        return [shown(clipped_target(value)) for value in values]
    return [
        [shown(item) for item in value]
        if isinstance(value, tuple)
        else shown(cell_text(name, value))
        for value in values
    ]


def _room_for_lists(out: Console, frame: Any, columns: Sequence[Sequence[Any]]) -> int:
    """The width that each column of lists has beside the other columns."""
    used, n_lists = 3 * (len(columns) - 1), 0
    for name, cells in zip(frame.columns, columns, strict=True):
        if cells and not isinstance(cells[0], str):
            n_lists += 1
        else:
            used += max(map(len, [str(name), *cells]))
    return max(20, (out.width - used) // max(1, n_lists))


def _packed(items: Sequence[str], room: int) -> str:
    """Items on as many lines as the room needs."""
    from rich.cells import cell_len

    lines = [items[0]]
    for item in items[1:]:
        longer = f"{lines[-1]}  {item}"
        if cell_len(longer) > room:
            lines.append(item)
        else:
            lines[-1] = longer
    return "\n".join(lines)


def bar_text(value: float, largest: float, width: int = 10) -> str:
    """A bar that grows left for negative values and right for positive ones.

    There is none where the numbers all read as 0.
    """
    block, axis = ("█", "│") if fancy() else ("#", "|")
    none = math.isnan(value) or not largest >= 5e-5
    filled = "" if none else block * round(min(1.0, abs(value) / largest) * width)
    return f"{filled if value < 0 else '':>{width}}{axis}{filled if value > 0 else '':<{width}}"


def shown(text: str) -> str:
    """Text with what the output cannot show as escapes."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    return printable(text).encode(encoding, "backslashreplace").decode(encoding)


# Grids


def print_grid(out: Console, grid: TextGrid) -> None:
    """Prints cells under their columns: positions that fit, or all in as many blocks as needed."""
    from rich.text import Text

    out.print()
    out.print(grid.title)
    if not grid.rows:
        return
    lines = _lines_of(out, grid)
    least, side = (0, "left") if grid.of_tokens else (6, "right")
    left, *widths = [max(cell.cell_len for cell in column) for column in zip(*lines, strict=True)]
    widths = [max(least, width) for width in widths]
    for name, *cells in lines:
        name.align("left", left)
        for cell, width in zip(cells, widths, strict=True):
            cell.align(side, width)
    blocks = [that_fit(widths, out.width - left - 1, grid.first if grid.of_tokens else 0)]
    while not grid.of_tokens and blocks[-1].stop < len(widths):
        blocks.append(that_fit(widths, out.width - left - 1, blocks[-1].stop))
    for places in blocks:
        for name, *cells in lines:
            line = Text(" ").join([name, *cells[places.start : places.stop]])
            line.rstrip()
            out.print(line, soft_wrap=True)
    if grid.of_tokens:
        _print_hidden(out, blocks[0], len(widths))
    if grid.after:
        out.print(grid.after)


def _lines_of(out: Console, grid: TextGrid) -> list[list[Any]]:
    """The lines of a grid, its heads first: the name of the row, then its cells, as rich texts."""
    from rich.text import Text

    cut = clipped if grid.of_tokens else shown
    shaded = shades(out)
    rows = [
        [
            Text(cut(cell.text), heat(cell.shade) if shaded else "") if cell else Text(grid.missing)
            for cell in row
        ]
        for row in grid.cells
    ]
    if grid.shares and not shaded:
        for place in range(len(grid.columns)):
            width = max(row[place].cell_len for row in rows)
            for row, cells in zip(rows, grid.cells, strict=True):
                row[place].align("left", width)
                row[place].append(f" {cell.shade:>4.0%}" if (cell := cells[place]) else "")
    names = [Text(shown(name)) for name in grid.rows]
    heads = [
        [Text(cut(lines[n]) if n < len(lines) else "") for lines in [(), *grid.columns]]
        for n in range(max(map(len, grid.columns)))
    ]
    return heads + [[name, *row] for name, row in zip(names, rows, strict=True)]


def heat(share: float) -> str:
    """Blue for 1, red for -1, paler towards 0; none for exactly 0 or NaN."""
    if math.isnan(share) or share == 0:
        return ""
    full = (33, 102, 172) if share > 0 else (178, 24, 43)
    size = min(1.0, abs(share))
    red, green, blue = (round(247 + size * (part - 247)) for part in full)
    return f"{'white' if size > 0.87 else 'black'} on rgb({red},{green},{blue})"


def that_fit(widths: Sequence[int], room: int, first: int | None) -> range:
    """The columns that fit beside each other: from the first one, or up to the last."""
    order = range(len(widths) - 1, -1, -1) if first is None else range(first, len(widths))
    taken = 0
    for place in order:
        room -= widths[place] + 1
        if room < -1 and taken:
            break
        taken += 1
    kept = order[:taken]
    return range(min(kept), max(kept) + 1)


def _print_hidden(out: Console, places: range, n_positions: int) -> None:
    def span(start: int, stop: int) -> str:
        if start >= stop:
            return ""
        return f"position {start}" if stop == start + 1 else f"positions {start} to {stop - 1}"

    hidden = [span(0, places.start), span(places.stop, n_positions)]
    if said := " and ".join(filter(None, hidden)):
        hint = "--from P begins the table at P, --csv writes all"
        out.print(f"({said} not shown; {hint})", soft_wrap=True)


def clipped(text: str, widest: int = 16) -> str:
    """A token in quotes as the output can show it, cut where it is long."""
    from rich.cells import cell_len, set_cell_size

    whole = shown(text)
    if cell_len(whole) <= widest:
        return whole
    return set_cell_size(whole, widest - 4).rstrip() + '..."'
