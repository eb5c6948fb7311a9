"""What every analysis returns: values on labelled axes, with their unit and where they come from.

    values   a tensor
    axes     a name and labels for each of its dimensions
    unit     logits, nats, probability
    provenance   model, TransformerLens, processing state, dtype, tokens, the plan as text

No axis is averaged silently. Undefined cells are NaN, never 0.
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

from resid_patching.errors import ResultFormatError
from resid_patching.files import checksum, read_json
from resid_patching.markup import table
from resid_patching.models import ModelView, report
from resid_patching.prompts import Prompts
from resid_patching.version import __version__

if TYPE_CHECKING:
    import pandas

FORMAT_VERSION = 2  # 1 had no checksum
_ROWS_SHOWN = 10  # in notebooks
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


@dataclass(frozen=True, eq=False, repr=False)
class Result:
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

    def _repr_html_(self) -> str:
        """A line that says what this is, and its first rows, for notebooks; no script."""
        frame, which = self._rows_shown()
        rows = [[_short(cell) for cell in row] for row in frame.itertuples(index=False)]
        return table([str(name) for name in frame.columns], rows, f"{self!r}: {which}")

    def _rows_shown(self) -> tuple[pandas.DataFrame, str]:
        """What a notebook shows of the result, and which rows these are."""
        everything, over = self._ranked()
        n = len(everything.dropna(subset=["value"]))
        frame = self.top(_ROWS_SHOWN)
        which = f"the {len(frame)} largest of {n} cells, by size" if len(frame) < n else "all"
        return frame, f"{which}; {over}" if over else which

    def axis(self, name: str) -> Axis:
        """An axis by name.

        Raises:
            KeyError: no such axis.
        """
        if name == "reader" and all(axis.name != name for axis in self.axes):
            warnings.warn("the axis reader is now receiver", DeprecationWarning, stacklevel=3)
            name = "receiver"
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
        """The k largest cells in long form, each its mean over prompts.

        Results about each token (of a lens, of the running total) have a cell for each token of
        each prompt instead, and name both.

        Args:
            k: how many.
            by: `abs` ranks by size, so that strong negative cells are seen; `signed` by value.

        Returns:
            A data frame: a column for each axis but `batch`, and `value` last. A cell that not
            every prompt has, such as a late position, is left out.

        Raises:
            ValueError: `by` is neither.
        """
        if by not in ("abs", "signed"):
            raise ValueError(f"by is 'abs' or 'signed', got {by!r}")
        frame = self._ranked()[0].dropna(subset=["value"])
        key = frame["value"].abs() if by == "abs" else frame["value"]
        order = key.sort_values(ascending=False, kind="stable").index[:k]
        return frame.loc[order].reset_index(drop=True)

    def _ranked(self) -> tuple[pandas.DataFrame, str]:
        """The cells that `top` ranks, in long form, and what their means were taken over."""
        names = [axis.name for axis in self.axes]
        if "batch" not in names:
            return self.to_frame(), ""
        place = names.index("batch")
        n = len(self.axes[place].labels)
        values = self.values.detach().to("cpu", torch.float64).mean(place)
        axes = tuple(axis for axis in self.axes if axis.name != "batch")
        frame = Result(values, axes, self.unit, self.provenance).to_frame()
        return frame, f"mean over {n} prompts" if n > 1 else ""

    def to_frame(self) -> pandas.DataFrame:
        """Long form: one row a cell, a column for each axis, `value` last."""
        import pandas

        index = pandas.MultiIndex.from_product(
            [axis.labels for axis in self.axes], names=[axis.name for axis in self.axes]
        )
        values = self.values.detach().to("cpu", torch.float64).flatten().numpy()
        return pandas.DataFrame({"value": values}, index=index).reset_index()

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
        names = [field.name for field in dataclasses.fields(cls)]
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


def _short(cell: Any) -> str:
    if not isinstance(cell, float):
        return str(cell)
    return "" if math.isnan(cell) else f"{cell:.5g}"


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
