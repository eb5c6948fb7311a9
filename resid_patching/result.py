"""What every analysis returns: values on labelled axes, with their unit and where they come from.

    values   a tensor
    axes     a name and labels for each of its dimensions
    unit     logits, nats, probability
    provenance   model, TransformerLens, processing state, dtype, tokens, the plan as text

No axis is averaged silently. Undefined cells are NaN, never 0.

Every result says itself what is shown of it, on a terminal, a page or in a notebook:

    result.table()      its rows as a data frame, means over prompts beside their standard error
    result.facts()      a few labelled lines
    result.caveats()    what it does not say
    result.pictures()   names of functions in `resid_patching.plots`
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from resid_patching.address import Head, parse
from resid_patching.errors import AddressError, ResultFormatError
from resid_patching.files import checksum, read_json
from resid_patching.markup import cell_text, escape, printable, table
from resid_patching.models import ModelView, report
from resid_patching.prompts import Prompts
from resid_patching.version import __version__

if TYPE_CHECKING:
    import pandas

FORMAT_VERSION = 2  # 1 had no checksum
_ROWS_SHOWN = 10  # in notebooks and summaries
_COLUMNS = {"batch": "prompt", "pos": "position"}  # axes, as data frames call them
R = TypeVar("R", bound="Result")


@dataclass(frozen=True)
class Axis:
    """One dimension of a result.

    Attributes:
        name: such as `component`, `batch`, `pos`, `layer`.
        labels: one for each index; addresses as text, token texts, or numbers.
    """

    name: str
    labels: tuple[str | int, ...]

    def index(self, label: Any) -> int:
        """Where a label stands; an address may be given as a value or in its text form.

        Raises:
            KeyError: the axis has no such label.
        """
        wanted = label if isinstance(label, int) else str(label)
        if wanted in self.labels:
            return self.labels.index(wanted)
        shown = ", ".join(map(str, self.labels[:6])) + (" …" if len(self.labels) > 6 else "")
        raise KeyError(f"{self.name} has no {wanted!r}; it has {shown}")


@dataclass(frozen=True)
class Provenance:
    """Where numbers come from.

    Attributes:
        model: the model's name.
        revision: the hub's commit of its weights, where known.
        backend: the TransformerLens class it ran on.
        transformer_lens: the TransformerLens version.
        processing: which weight simplifications the weights show.
        dtype: dtype of the weights.
        tokens: sha256 of the prompts' ids.
        n_prompts: number of prompts.
        bos: whether every prompt begins with the beginning-of-sequence token.
        plan: what was computed, in words.
        user_hooks: hooks of the caller that were on.
        resid_patching: this package's version.
    """

    model: str
    revision: str | None
    backend: str
    transformer_lens: str
    processing: str
    dtype: str
    tokens: str
    n_prompts: int
    bos: bool
    plan: str
    user_hooks: tuple[str, ...] = ()
    resid_patching: str = ""


def provenance(view: ModelView, prompts: Prompts, plan: str) -> Provenance:
    """The provenance of an analysis of prompts on a model."""
    return Provenance(
        model=view.name,
        revision=view.revision,
        backend=view.kind,
        transformer_lens=view.transformer_lens_version,
        processing=str(report(view).processing),
        dtype=str(view.dtype).removeprefix("torch."),
        tokens=prompts.hash,
        n_prompts=len(prompts),
        bos=prompts.bos_id is not None,
        plan=plan,
        user_hooks=tuple(view.user_hooks()),
        resid_patching=__version__,
    )


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
        frame, names = self.table(), self.headings()
        known = frame if self.ordered else _ranked(frame)
        shown = known if self.ordered else known[:k]
        n_all, n = len(known), len(shown)
        which = f"the {n} largest of {n_all} {self.row_name}s, by size" if n < n_all else ""
        return shown[list(names)].set_axis(list(names.values()), axis=1), which

    def summary(self, k: int = _ROWS_SHOWN) -> str:
        """Its facts, its first rows and its caveats as text.

        Args:
            k: how many rows, the largest by size.
        """
        frame, which = self._first_rows(k)
        facts = [f"{name}: {printable(text)}" for name, text in self.facts()]
        texts = frame.apply(lambda column: [cell_text(str(column.name), v) for v in column])
        rows = texts.map(printable).to_string(index=False) if len(frame) else "no rows"
        return "\n".join(
            [repr(self), *facts, *filter(None, [which]), "", rows, "", *self.caveats()]
        )

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
        above = f"{self!r}: {which}" if which else repr(self)
        return f"{table(names, rows, above)}<p>{facts}</p><p><small>{limits}</small></p>"


def _ranked(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Rows that have a value, the largest by size first."""
    known = frame.dropna(subset=["value"])
    order = known["value"].abs().sort_values(ascending=False, kind="stable").index
    return known.loc[order].reset_index(drop=True)


@dataclass(frozen=True, eq=False, repr=False)
class Result(Shown):
    """Values on labelled axes.

    Attributes:
        values: a tensor with one dimension for each axis.
        axes: the names and labels of its dimensions.
        unit: what a value is measured in.
        provenance: where the values come from.
    """

    kind: ClassVar[str] = "result"

    values: Tensor
    axes: tuple[Axis, ...]
    unit: str
    provenance: Provenance

    def __post_init__(self) -> None:
        expected = tuple(len(axis.labels) for axis in self.axes)
        assert tuple(self.values.shape) == expected, (tuple(self.values.shape), expected)

    def __repr__(self) -> str:
        shape = " × ".join(f"{len(axis.labels)} {axis.name}" for axis in self.axes)
        return f"{type(self).__name__}({self.provenance.plan}; {shape}; {self.unit})"

    def axis(self, name: str) -> Axis:
        """An axis by name.

        Raises:
            KeyError: no such axis.
        """
        if name == "reader" and all(axis.name != name for axis in self.axes):
            warnings.warn("the axis reader is now receiver", DeprecationWarning, stacklevel=3)
            name = "receiver"
        if all(axis.name != name for axis in self.axes):  # by the name of a data frame's column
            name = {new: old for old, new in _COLUMNS.items()}.get(name, name)
        for axis in self.axes:
            if axis.name == name:
                return axis
        names = ", ".join(axis.name for axis in self.axes)
        raise KeyError(f"there is no axis {name!r}; the axes are {names}")

    def sel(self, **labels: Any) -> Tensor:
        """Values at labels, those axes dropped: `sel(component="9.9", batch=0)`.

        Raises:
            KeyError: an axis or a label does not exist.
        """
        values = self.values
        places = {self._dimension(name): self._place(name, label) for name, label in labels.items()}
        for dimension in sorted(places, reverse=True):
            values = values.select(dimension, places[dimension])
        return values

    def _dimension(self, name: str) -> int:
        return self.axes.index(self.axis(name))

    def _place(self, name: str, label: Any) -> int:
        return self.axis(name).index(label)

    def top(self, k: int = 10, *, by: Literal["abs", "signed"] = "abs") -> pandas.DataFrame:
        """The k largest rows of the table, ranked by their means over prompts.

        Results about each token (of a lens, of the running total) have a row for each token of
        each prompt instead, and name both.

        Args:
            k: how many.
            by: `abs` ranks by size, so that strong negative rows are seen; `signed` by value.

        Returns:
            The first rows of `table`, sorted. A row that not every prompt has, such as a late
            position, is left out.

        Raises:
            ValueError: `by` is neither.
        """
        if by not in ("abs", "signed"):
            raise ValueError(f"by is 'abs' or 'signed', got {by!r}")
        ranked = _ranked(self._cells())
        if by == "signed":
            order = ranked["value"].sort_values(ascending=False, kind="stable").index
            ranked = ranked.loc[order]
        return ranked[:k].reset_index(drop=True)

    def _cells(self) -> pandas.DataFrame:
        """What `top` ranks."""
        return self.table()

    def table(self) -> pandas.DataFrame:
        """The mean over prompts of each cell, `value`, beside its standard error `se`.

        With one prompt there is no `se`. Results about each token have a row for each token of
        each prompt instead.
        """
        names = [axis.name for axis in self.axes]
        if "batch" not in names:
            return self.to_frame()
        place = names.index("batch")
        values = self.values.detach().to("cpu", torch.float64)
        axes = tuple(axis for axis in self.axes if axis.name != "batch")
        frame = Result(values.mean(place), axes, self.unit, self.provenance).to_frame()
        if (n := values.shape[place]) > 1:
            se = values.std(place) / n**0.5
            frame.insert(len(frame.columns) - 1, "se", se.flatten().numpy())
        return frame

    def headings(self) -> dict[str, str]:
        """The columns that are shown; not the numbers of layer and head, which the names say."""
        columns = [str(name) for name in self.table().columns]
        kept = [n for n in columns if n not in ("layer", "head") or n == columns[0]]
        return {name: name for name in kept}

    def facts(self) -> tuple[tuple[str, str], ...]:
        """The model that ran, its weights' state, and how many prompts."""
        origin = self.provenance
        return (
            (
                "model",
                f"{origin.model} ({origin.backend}, TransformerLens {origin.transformer_lens}), "
                f"{origin.processing}, {origin.dtype}",
            ),
            ("prompts", str(origin.n_prompts)),
        )

    def to_frame(self) -> pandas.DataFrame:
        """Long form: one row a cell, a column for each axis, `value` last.

        The axes `batch` and `pos` are the columns `prompt` and `position`. Addresses are followed
        by their `layer` and `head`, where they have one.
        """
        import pandas

        names = [_COLUMNS.get(axis.name, axis.name) for axis in self.axes]
        index = pandas.MultiIndex.from_product([axis.labels for axis in self.axes], names=names)
        values = self.values.detach().to("cpu", torch.float64).flatten().numpy()
        frame = pandas.DataFrame({"value": values}, index=index).reset_index()
        if names and names[0] in ("target", "component", "write"):
            places = {str(label): _place_of(str(label)) for label in self.axes[0].labels}
            for number, name in enumerate(("layer", "head"), start=1):
                if any(place[number - 1] is not None for place in places.values()):
                    column = [places[str(label)][number - 1] for label in frame[names[0]]]
                    frame.insert(number, name, pandas.array(column, dtype="Int64"))
        return frame

    def to_json(self) -> str:
        """The result as JSON text; NaN is written as null. `from_json` reads it back.

        A checksum of all fields stands beside them; entries that a caller adds are not in it.
        """
        fields = {
            field.name: _encode(getattr(self, field.name)) for field in dataclasses.fields(self)
        }
        head = {"format": "resid_patching", "version": FORMAT_VERSION, "kind": self.kind}
        body = {**head, "sha256": checksum({**head, **fields}), **fields}
        return json.dumps(body, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls: type[R], text: str) -> R:
        """Reads what `to_json` wrote.

        Raises:
            ResultFormatError: the text is no result of this kind, or not what was written.
        """
        body = _load_object(text)
        if body.get("format") != "resid_patching" or body.get("kind") != cls.kind:
            raise ResultFormatError(
                f"a {cls.kind} of resid_patching was expected, found "
                f"{body.get('kind', 'something else')!r}"
            )
        if body.get("version") not in (1, FORMAT_VERSION):
            raise ResultFormatError(
                f"format version {body.get('version')} was found; this version of the package "
                f"reads 1 and {FORMAT_VERSION}"
            )
        fields = dataclasses.fields(cls)
        names = [f.name for f in fields if f.name in body or f.default is dataclasses.MISSING]
        try:
            covered = {name: body[name] for name in ("format", "version", "kind", *names)}
            if body["version"] != 1 and body.get("sha256") != checksum(covered):
                raise ValueError("its numbers or labels are not those that were written")
            return cls(**{name: _decode(body[name]) for name in names})
        except (
            KeyError,
            TypeError,
            AttributeError,
            AssertionError,
            ValueError,
            RuntimeError,  # lists of unequal lengths
            OverflowError,
        ) as error:
            raise ResultFormatError(f"the {cls.kind} is incomplete or damaged: {error}") from error


def _place_of(label: str) -> tuple[int | None, int | None]:
    """The layer and the head of an address; None where it has none, or is of several parts."""
    try:
        address = parse(label)
    except AddressError:
        return None, None
    layer = getattr(address, "layer", None)
    return layer, address.head if isinstance(address, Head) else None


def _load_object(text: str) -> dict[str, Any]:
    try:
        body = read_json(text)
    except ValueError as error:
        raise ResultFormatError(f"this is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise ResultFormatError("a JSON object was expected")
    return body


def _encode(value: Any) -> Any:
    if isinstance(value, Tensor):
        name = str(value.dtype).removeprefix("torch.")
        return {"tensor": _without_nan(value.detach().cpu().tolist()), "dtype": name}
    if isinstance(value, Axis):
        return {"axis": value.name, "labels": list(value.labels)}
    if isinstance(value, Provenance):
        return {"provenance": dataclasses.asdict(value)}
    if isinstance(value, tuple | list):
        return [_encode(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _without_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        if not math.isnan(value):
            raise ResultFormatError(f"{value} cannot be written as JSON")
        return None
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if "tensor" in value:
            dtype = getattr(torch, value["dtype"])
            return torch.tensor(_with_nan(value["tensor"]), dtype=dtype, device="cpu")
        if "axis" in value:
            name = "receiver" if value["axis"] == "reader" else value["axis"]  # before 0.1.0
            return Axis(name, tuple(value["labels"]))
        if "provenance" in value:
            fields = dict(value["provenance"])
            fields["user_hooks"] = tuple(fields.get("user_hooks", ()))
            return Provenance(**fields)
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    return value


def _with_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_nan(item) for item in value]
    return math.nan if value is None else value
