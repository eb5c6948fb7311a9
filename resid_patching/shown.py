"""The questions that every result answers about itself, and how a notebook shows the answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from resid_patching.markup import cell_text, escape, printable, table

if TYPE_CHECKING:
    import pandas

_ROWS_SHOWN = 10  # in notebooks and summaries


class Shown:
    """A result that says what is shown of it; terminal, page and notebook all ask it the same."""

    ordered: ClassVar[bool] = False  # whether its rows have an order that ranking would destroy
    adds_up: ClassVar[bool] = False  # whether its rows sum to a number that means something

    def table(self) -> pandas.DataFrame:
        """Its rows as a data frame; means over prompts have their standard error beside them."""
        raise NotImplementedError

    @property
    def row_name(self) -> str:
        """What a row of the table is called."""
        return "row"

    @property
    def grid_name(self) -> str:
        """What the values of heads are, as the title of a grid; empty where there is no grid."""
        return ""

    @property
    def why_absent(self) -> str:
        """What a cell of a grid without a value means; empty where a title need not say it."""
        return ""

    @property
    def why_no_value(self) -> str:
        """Why some rows have no value, as words that follow "3 of 12 rows"."""
        return "are not in every prompt: n/a"

    @property
    def caption(self) -> str:
        """What the numbers in the table are: their unit, and what they are means over."""
        return ""

    def headings(self) -> dict[str, str]:
        """Which columns of the table are shown, and the heading of each."""
        return {str(name): str(name) for name in self.table().columns}

    def facts(self) -> tuple[tuple[str, str], ...]:
        """Labelled lines: what was computed, on what, and what is needed to read the table."""
        return ()

    def caveats(self) -> tuple[str, ...]:
        """What the numbers do not say."""
        return ()

    def pictures(self) -> tuple[str, ...]:
        """The functions in `resid_patching.plots` that draw it, the main one first."""
        return ("show",)

    def _first_rows(self, k: int) -> tuple[pandas.DataFrame, str]:
        """The first k rows under their headings, and a text that says which rows these are."""
        names, which = self.headings(), ""
        frame: Any = self.table()
        if not self.ordered:
            frame = ranked(frame)
            if (n := len(frame)) > k:
                which = f"the {k} largest of {n} {self.row_name}s, by size"
            frame = frame[:k]
        return under_headings(frame, names), which

    def summary(self, k: int = _ROWS_SHOWN) -> str:
        """Its facts, its first rows and its caveats as text.

        Args:
            k: how many rows, the largest by size.
        """
        frame, which = self._first_rows(k)
        facts = [f"{name}: {printable(text)}" for name, text in self.facts()]
        texts = frame.apply(lambda column: [cell_text(str(column.name), v) for v in column])
        rows = texts.map(printable).to_string(index=False) if len(frame) else "no rows"
        above = "; ".join(filter(None, [self.caption, which]))
        return "\n".join([repr(self), *facts, "", above, rows, "", *self.caveats()])

    def _repr_html_(self) -> str:
        """Its facts, its first rows and its caveats, for notebooks; no script."""
        frame, which = self._first_rows(_ROWS_SHOWN)
        names = [str(name) for name in frame.columns]
        rows = [
            [cell_text(name, cell) for name, cell in zip(names, row, strict=True)]
            for row in frame.itertuples(index=False)
        ]
        facts = "<br>".join(f"{escape(name)}: {escape(text)}" for name, text in self.facts())
        limits = " ".join(map(escape, self.caveats()))
        above = ": ".join(
            filter(None, [repr(self), "; ".join(filter(None, [which, self.caption]))])
        )
        return f"{table(names, rows, above)}<p>{facts}</p><p><small>{limits}</small></p>"


def ranked(frame: pandas.DataFrame) -> pandas.DataFrame:
    """The rows that have a value, sorted by absolute value, the largest first."""
    known = frame.dropna(subset=["value"])
    order = known["value"].abs().sort_values(ascending=False, kind="stable").index
    return known.loc[order].reset_index(drop=True)


def under_headings(frame: pandas.DataFrame, headings: Mapping[str, str]) -> pandas.DataFrame:
    """The columns of a table that are shown, under the names above them."""
    columns: Any = frame[list(headings)]
    return columns.set_axis(list(headings.values()), axis=1)
