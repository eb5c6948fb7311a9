"""The neutral form of what is shown: facts, tables, grids, caveats and pictures, in sections."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from resid_patching.markup import quoted
from resid_patching.shown import ranked, under_headings

if TYPE_CHECKING:
    import pandas

    from resid_patching.ablation import Effect
    from resid_patching.result import Provenance
    from resid_patching.shown import Shown

On = Literal["both", "text", "page"]
Facts = tuple[tuple[str, str | Sequence[str]], ...]


@dataclass(frozen=True, eq=False)
class Table:
    """Rows under headings.

    Attributes:
        frame: a column for each heading; floats are written as `markup.number_text` says.
        title: the line above.
        bar: the column that is also drawn as a bar on a terminal; none where empty.
        top: how many rows a terminal shows; None for all.
        sums: the columns whose rest, below the rows shown, is given as a sum.
        after: what is said below.
        what: what rows are called.
        on: a terminal, a page, or both.
    """

    frame: pandas.DataFrame
    title: str = ""
    bar: str = ""
    top: int | None = None
    sums: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    what: str = "rows"
    on: On = "both"


@dataclass(frozen=True)
class GridCell:
    """A cell of a grid: its text, how it is shaded (-1 red, 0 white, 1 blue), and a hint."""

    text: str
    shade: float = 0.0
    hint: str = ""


@dataclass(frozen=True, eq=False)
class TextGrid:
    """Cells under their columns.

    Attributes:
        title: the line above.
        rows: the name of each row.
        columns: the lines above each column.
        cells: [row][column]; None where there is none.
        missing: what stands for None.
        of_tokens: whether columns are positions: those that fit are shown, the last ones or from
            `first` on, texts to the left; other grids are broken into blocks, numbers to the right.
        shares: whether shades are probabilities, which stand beside the text where none is seen.
        first: the first position shown.
        after: what is said below.
        on: a terminal, a page, or both.
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[tuple[str, ...]]
    cells: Sequence[Sequence[GridCell | None]]
    missing: str = ""
    of_tokens: bool = False
    shares: bool = False
    first: int | None = None
    after: str = ""
    on: On = "text"


@dataclass(frozen=True, eq=False)
class Section:
    """A part of a report.

    Attributes:
        title: its heading; none where empty.
        says: what its numbers are.
        facts: labelled lines; a line of several items is broken between them.
        caveats: what its numbers do not say.
        tables, grids: the numbers.
        draws: each draws a picture of `resid_patching.plots`, the main one first.
        on: a terminal, a page, or both.
    """

    title: str = ""
    says: str = ""
    facts: Facts = ()
    caveats: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    grids: tuple[TextGrid, ...] = ()
    draws: tuple[Callable[[], Any], ...] = ()
    on: On = "both"


@dataclass(frozen=True, eq=False)
class Document:
    """What a command shows.

    Attributes:
        title: of the page.
        origin: where the numbers come from.
        model: which model ran, in words.
        sections: its parts.
        prompts: what was asked about, a row each, whole on a page.
        stand_in: says so where the shipped model stands in for another.
        main: draws what a PNG shows; None for the first picture.
    """

    title: str
    origin: Provenance
    model: str
    sections: tuple[Section, ...]
    prompts: pandas.DataFrame | None = None
    stand_in: str | None = None
    main: Callable[[], Any] | None = None


def drawn(name: str, *results: Any, **options: Any) -> Callable[[], Any]:
    """Draws a picture of results by its name in `resid_patching.plots`, when it is called."""

    def draw() -> Any:
        from resid_patching import plots

        return getattr(plots, name)(*results, **options)

    return draw


def section(
    result: Shown,
    *,
    title: str = "",
    facts: Facts = (),
    caveats: tuple[str, ...] = (),
    more: Mapping[str, Sequence[float]] | None = None,
    top: int | None = None,
) -> Section:
    """What a result says of itself.

    Args:
        result: any result.
        title: a heading.
        facts: lines above its own.
        caveats: lines below its own.
        more: further columns, a number for each row of `result.table()`.
        top: rows that a terminal shows.
    """
    given = {name for name, _ in facts} | {"model", "prompts"}
    own = tuple(fact for fact in result.facts() if fact[0] not in given)
    frame = result.table()
    return Section(
        title=title,
        facts=(*facts, *own),
        caveats=(*result.caveats(), *caveats),
        tables=(table_of(result, frame.assign(**more or {}), more or (), top=top),),
        grids=grids_of(result, frame, top or 15),
        draws=tuple(drawn(name, result) for name in result.pictures()),
    )


def table_of(
    result: Shown, frame: pandas.DataFrame, more: Iterable[str] = (), *, top: int | None = None
) -> Table:
    """A result's rows under their headings, the largest first unless they have an order.

    Args:
        result: any result.
        frame: `result.table()`, perhaps with further columns.
        more: the names of these columns.
        top: rows that a terminal shows.
    """
    headings = result.headings() | {name: name for name in more}
    shown: dict[str, Any] = {"title": result.caption, "what": f"{result.row_name}s"}
    if not result.ordered:
        n, lost = len(frame), int(frame["value"].isna().sum())
        frame = ranked(frame) if lost < n else frame
        bar = headings["value"]
        shown |= {"bar": bar, "top": top, "sums": (bar,) if result.adds_up else ()}
        if lost:
            shown["after"] = (f"{lost} of {n} {result.row_name}s {result.why_no_value}",)
    return Table(under_headings(frame, headings), **shown)


# Grids of numbers


def grids_of(
    result: Any, frame: pandas.DataFrame, top: int = 15, name: str = ""
) -> tuple[TextGrid, ...]:
    """The value of each head, layer by head, or target by receiver or position.

    Args:
        result: any result; there is a grid where it names one and several rows are heads.
        frame: `result.table()`.
        top: how many receivers, positions, and targets of these.
        name: what the values are, where not as the result calls them.
    """
    if getattr(result, "columns", None) is not None:
        return (_by_column(result, frame, top),)
    name = name or result.grid_name
    if not name or "head" not in frame or frame["head"].count() < 2:
        return ()
    heads = frame.dropna(subset=["head"])
    pivot = heads.pivot(index="layer", columns="head", values="value")
    return (
        TextGrid(
            f"{name} in {result.unit}, layer by head{_legend(result, heads['value'])}",
            [f"{layer:>4}" for layer in pivot.index],
            [(str(head),) for head in pivot.columns],
            number_cells(pivot.to_numpy(dtype=float)),
            missing=".",
        ),
    )


def _by_column(effect: Effect, frame: Any, top: int) -> TextGrid:
    """Totals of the strongest targets and receivers or positions, in the order they were given."""
    assert effect.columns is not None
    column, row = effect.columns.name, "sender" if effect.is_path else "target"
    if bool(frame["value"].isna().all()):
        no_path = "no sender writes before a receiver reads: there is no path"
        return TextGrid(no_path if effect.is_path else "no position is in every prompt", [], [], [])
    pivot = frame.pivot(index="target", columns=column, values="value")
    pivot = pivot.loc[list(effect.targets), list(effect.columns.labels)]
    sizes = pivot.abs()
    shown = pivot.loc[
        _strongest_labels(sizes.max(axis=1), top), _strongest_labels(sizes.max(axis=0), top)
    ]
    left = [
        f"{n} more {what}{'s' * (n > 1)}"
        for what, whole, some in zip((row, column), pivot.shape, shown.shape, strict=True)
        if (n := whole - some)
    ]
    why = "weaker or without a path" if effect.is_path else "weaker or not in every prompt"
    tokens = dict(zip(frame[column], frame.get("token", []), strict=False))
    return TextGrid(
        f"total effect in {effect.unit}, {row} by {column}{_legend(effect, shown)}",
        [clipped_target(str(target)) for target in shown.index],
        [(str(c), *([quoted(tokens[c])] if c in tokens else [])) for c in shown.columns],
        number_cells(shown.to_numpy(dtype=float)),
        missing=".",
        after=f"and {' and '.join(left)}, {why} (--top N shows more)" if left else "",
    )


def _legend(result: Shown, values: Any) -> str:
    """What a cell without a value means, where there is one and the result says it."""
    lacks = result.why_absent and bool(values.isna().any(axis=None))
    return f" (. {result.why_absent})" if lacks else ""


def _strongest_labels(sizes: Any, top: int) -> Any:
    """Which labels have the largest sizes, in the order of the labels."""
    return sizes.index[(sizes.rank(method="first", ascending=False) <= top).to_numpy()]


def clipped_target(target: str) -> str:
    """A target, shortened where it is a long list."""
    return target if len(target) <= 30 else f"{target[:26]} ... ({target.count(' + ') + 1})"


def number_cells(values: Any) -> list[list[GridCell | None]]:
    """Numbers as cells, shaded by sign and size; None for NaN.

    Where all of them read as 0 none is shaded.
    """
    largest = max((abs(v) for row in values for v in row if not math.isnan(v)), default=0.0)
    digits = 3 if largest < 10 else 2 if largest < 100 else 1
    scale = largest if largest >= 5e-4 else math.inf
    return [
        [None if math.isnan(v) else GridCell(f"{v:+.{digits}f}", v / scale) for v in row]
        for row in values
    ]


# Lines


def token_items(texts: Sequence[str], most: int = 60) -> list[str]:
    """Tokens with their positions, at most so many."""
    items = [f"{place} {quoted(text)}" for place, text in enumerate(texts[:most])]
    return items + [f"... {len(texts) - most} more tokens"] * (len(texts) > most)


def token_facts(prompts: Sequence[Sequence[str]], most: int = 4) -> Facts:
    """The tokens of the first prompts, a line each."""
    rows: list[tuple[str, str | Sequence[str]]] = [
        ("tokens" if len(prompts) == 1 else f"tokens {n}", token_items(texts))
        for n, texts in enumerate(prompts[:most])
    ]
    if len(prompts) > most:
        rows.append(("", f"... {len(prompts) - most} more prompts"))
    return tuple(rows)
