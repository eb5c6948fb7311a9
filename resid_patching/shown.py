"""What says itself how it is shown, on a terminal, a page or in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from resid_patching.markup import cell_text, escape, printable, table

if TYPE_CHECKING:
    import pandas

_ROWS_SHOWN = 10  # in notebooks and summaries


class Shown:
    """What says itself how it is shown. Renderers ask it, and have no layout of their own."""

    ordered: ClassVar[bool] = False  # whether its rows have an order that ranking would destroy

    def table(self) -> pandas.DataFrame:
        """Its rows; means over prompts, with the standard error `se` where there are several."""
        raise NotImplementedError

    @property
    def row_name(self) -> str:
        """What a row of the table is called."""
        return "row"

    @property
    def caption(self) -> str:
        """What the numbers of the table are: their unit, and what they are means of."""
        return ""

    def headings(self) -> dict[str, str]:
        """The columns of the table that are shown, each with the name above it."""
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
        """The first k rows under their headings, and which of them these are."""
        names, which = self.headings(), ""
        frame: Any = self.table()
        if not self.ordered:
            frame = ranked(frame)
            if (n := len(frame)) > k:
                which = f"the {k} largest of {n} {self.row_name}s, by size"
            frame = frame[:k]
        return frame[list(names)].set_axis(list(names.values()), axis=1), which

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
    """Rows that have a value, the largest by size first."""
    known = frame.dropna(subset=["value"])
    order = known["value"].abs().sort_values(ascending=False, kind="stable").index
    return known.loc[order].reset_index(drop=True)
