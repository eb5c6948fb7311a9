"""The neutral form of what is shown: facts, tables, grids, caveats and pictures, in sections."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from resid_patching.markup import quoted
from resid_patching.shown import ranked

if TYPE_CHECKING:
    import pandas

    from resid_patching.ablation import Effect
    from resid_patching.attribution import Attribution
    from resid_patching.result import Provenance
    from resid_patching.shown import Shown

On = Literal["both", "text", "page"]
Facts = tuple[tuple[str, str | Sequence[str]], ...]
NO_PATH = "no path: it writes too late"


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
class Cell:
    """A cell of a grid: its text, how it is shaded (-1 red, 0 white, 1 blue), and a hint."""

    text: str
    shade: float = 0.0
    hint: str = ""


@dataclass(frozen=True, eq=False)
class Grid:
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
    cells: Sequence[Sequence[Cell | None]]
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
    grids: tuple[Grid, ...] = ()
    draws: tuple[Callable[[], Any], ...] = ()
    on: On = "both"


@dataclass(frozen=True, eq=False)
class Report:
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
    more: dict[str, Sequence[float]] | None = None,
    top: int | None = None,
    grids: bool = True,
) -> Section:
    """What a result says of itself.

    Args:
        result: any result.
        title: a heading.
        facts: lines above its own.
        caveats: lines below its own.
        more: further columns, a number for each row of `result.table()`.
        top: rows that a terminal shows.
        grids: also its numbers by layer and head, or target by column, on a terminal.
    """
    given = {name for name, _ in facts} | {"model", "prompts"}
    own = tuple(fact for fact in result.facts() if fact[0] not in given)
    return Section(
        title=title,
        facts=(*facts, *own),
        caveats=(*result.caveats(), *caveats),
        tables=(table_of(result, more=more, top=top),),
        grids=grids_of(result, top or 15) if grids else (),
        draws=tuple(drawn(name, result) for name in result.pictures()),
    )


def table_of(
    result: Shown, *, more: dict[str, Sequence[float]] | None = None, top: int | None = None
) -> Table:
    """The rows of a result under their headings, the largest first, with columns beside them."""
    frame: Any = result.table()
    headings = result.headings()
    for name, values in (more or {}).items():
        frame[name] = values
        headings[name] = name
    after: tuple[str, ...] = ()
    bar = ""
    if not result.ordered:
        n, lost = len(frame), int(frame["value"].isna().sum())
        if lost < n:
            frame = ranked(frame)
        if lost:
            why = "are not in every prompt: n/a"
            if getattr(result, "is_path", False):
                one = result.row_name == "sender"
                why = "have no path to the receiver: n/a" if one else f"do not exist ({NO_PATH})"
            after = (f"{lost} of {n} {result.row_name}s {why}",)
        bar = headings["value"]
    return Table(
        frame[list(headings)].set_axis(list(headings.values()), axis=1),
        title=result.caption,
        bar=bar,
        top=None if result.ordered else top,
        sums=(bar,) if getattr(result, "adds_up", False) else (),
        after=after,
        what=f"{result.row_name}s",
    )


# Grids of numbers


def grids_of(result: Any, top: int) -> tuple[Grid, ...]:
    """Numbers by layer and head where all rows are heads, or target by receiver or position."""
    from resid_patching.ablation import Effect
    from resid_patching.attribution import Attribution

    if isinstance(result, Effect) and result.columns is not None:
        return crossed(result, top)
    if isinstance(result, Effect | Attribution):
        return by_layer_and_head(result)
    return ()


def by_layer_and_head(result: Effect | Attribution, title: str = "") -> tuple[Grid, ...]:
    """The mean of each head, layer by head; nothing where fewer than two rows are heads."""
    frame = result.table()
    if "head" not in frame or frame["head"].count() < 2 or "position" in frame.columns[4:]:
        return ()
    heads = frame.dropna(subset=["head"])
    pivot = heads.pivot(index="layer", columns="head", values="value")
    missing = getattr(result, "is_path", False) and bool(heads["value"].isna().any())
    name = title or ("total effect" if hasattr(result, "how") else "written")
    return (
        Grid(
            f"{name} in {result.unit}, layer by head{_legend(missing)}",
            [f"{layer:>4}" for layer in pivot.index],
            [(str(head),) for head in pivot.columns],
            number_cells(pivot.to_numpy(dtype=float)),
            missing=".",
        ),
    )


def _legend(missing: bool) -> str:
    return f" (. {NO_PATH})" if missing else ""


def crossed(effect: Effect, top: int) -> tuple[Grid, ...]:
    """Totals of the strongest rows and columns, in the order they were given."""
    assert effect.columns is not None
    name, is_path = effect.columns.name, effect.is_path
    frame: Any = effect.table()
    if bool(frame["value"].isna().all()):
        said = "no sender writes before a receiver reads: there is no path"
        return (Grid(said if is_path else "no number in every prompt", [], [], []),)
    row = "sender" if is_path else "target"
    pivot = frame.pivot(index="target", columns=name, values="value")
    pivot = pivot.loc[list(effect.targets), list(effect.columns.labels)]
    kept = [_strongest(pivot.abs().max(axis=axis), top) for axis in (1, 0)]
    shown = pivot.iloc[kept[0], kept[1]]
    left = [
        f"{n} more {what}{'s' * (n > 1)}"
        for what, all_of, some in zip((row, name), pivot.shape, kept, strict=True)
        if (n := all_of - len(some))
    ]
    why = "weaker or without a path" if is_path else "weaker or not in every prompt"
    tokens = dict(zip(frame[name], frame.get("token", []), strict=False))
    heads = [(str(c), quoted(tokens[c])) if c in tokens else (str(c),) for c in shown.columns]
    return (
        Grid(
            f"total effect in {effect.unit}, {row} by {name}"
            f"{_legend(is_path and bool(shown.isna().any().any()))}",
            [clipped_target(str(target)) for target in shown.index],
            heads,
            number_cells(shown.to_numpy(dtype=float)),
            missing=".",
            after=f"and {' and '.join(left)}, {why} (--top N shows more)" if left else "",
        ),
    )


def _strongest(sizes: Any, top: int) -> list[int]:
    order = sizes.reset_index(drop=True).dropna().sort_values(ascending=False, kind="stable")
    return sorted(order.index[:top])


def clipped_target(target: str) -> str:
    """A target, shortened where it is a long list."""
    return target if len(target) <= 30 else f"{target[:26]} ... ({target.count(' + ') + 1})"


def number_cells(values: Any) -> list[list[Cell | None]]:
    """Numbers as cells, shaded by sign and size; None for NaN.

    Where all of them read as 0 none is shaded.
    """
    known = [abs(v) for row in values for v in row if not math.isnan(v)]
    largest = max(known, default=0.0)
    digits = 3 if largest < 10 else 2 if largest < 100 else 1
    scale = largest if largest >= 5e-4 else math.inf
    return [
        [None if math.isnan(v) else Cell(f"{v:+.{digits}f}", v / scale) for v in row]
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
