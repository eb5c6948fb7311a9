"""What every analysis returns: values on labelled axes, with their unit and where they come from.

    values   a tensor
    axes     a name and labels for each of its dimensions
    unit     logits, nats, probability
    provenance   model, TransformerLens, processing state, dtype, tokens, the plan as text

No axis is averaged silently. Undefined cells are NaN, never 0.

Every result says what is shown of it on a terminal, on a page and in a notebook:

    result.table()      its rows as a data frame, means over prompts beside their standard error
    result.facts()      a few labelled lines
    result.caveats()    what it does not say
    result.pictures()   names of functions in `resid_patching.plots`
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy
import torch
from jaxtyping import Float, Num
from torch import Tensor

from resid_patching.address import Address, Head, parse
from resid_patching.errors import AddressError, ResultFormatError
from resid_patching.files import checksum, read_json
from resid_patching.models import report
from resid_patching.prompts import Positions
from resid_patching.run import Run
from resid_patching.shown import Shown, ranked
from resid_patching.version import __version__

if TYPE_CHECKING:
    import pandas

RESULT_VERSION = 2  # 1 had no checksum
# The module and the class of each kind of result.
_HOMES = {
    "result": ("result", "Result"),
    "comparison": ("result", "Comparison"),
    "attention": ("patterns", "AttentionPatterns"),
    "attribution": ("attribution", "Attribution"),
    "effect": ("ablation.effect", "Effect"),
    "linearised": ("ablation.linearised", "Linearised"),
    "stream_report": ("stream", "StreamReport"),
    "lens": ("lens.results", "LensResult"),
    "lens_top_tokens": ("lens.results", "TopTokens"),
}
_COLUMN_NAMES = {"batch": "prompt", "pos": "position"}  # axes, as data frames call them
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

    def index(self, label: str | int | Address) -> int:
        """The index of a label; an address may be given as text.

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
        intervention: what the run has replaced, as `rp.ablated` says; empty for a plain run.
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
    intervention: str = ""

    @property
    def model_text(self) -> str:
        """Which model ran, and in what state."""
        library = f"{self.backend}, TransformerLens {self.transformer_lens}"
        return f"{self.model} ({library}), {self.processing}, {self.dtype}"


def standard_error(
    values: Float[Tensor, "*cell batch"], weights: Num[Tensor, "... batch"] | None = None
) -> Float[Tensor, "*cell"]:
    """The standard error of the mean over prompts; NaN where there is one prompt.

    With weights w that sum to 1, n of them above 0, and the mean m:
    sqrt(n / (n - 1) * sum w^2 (x - m)^2).

    Args:
        values: a number for each prompt.
        weights: how much each prompt counts in the mean; None for all alike.
    """
    values = values.detach().cpu().double()
    share = torch.ones(values.shape[-1]) if weights is None else weights.detach().cpu()
    share = share.double() / share.sum(-1, keepdim=True)
    n = (share > 0).sum(-1)
    off = values - (values * share).sum(-1, keepdim=True)
    widened = torch.where(n > 1, n / (n - 1), torch.nan)
    return ((share * off).square().sum(-1) * widened).sqrt()


def standard_error_over_positions(
    values: Float[Tensor, "*cell batch pos"],
) -> Float[Tensor, "*cell"]:
    """The standard error of a mean over all positions of several prompts.

    Positions of one prompt are not independent of each other, so each prompt counts as one
    observation: its own mean, weighed by how many positions it has.

    Args:
        values: a number for each position; NaN where a prompt has none.
    """
    values = values.detach().cpu().double()
    n = (~values.isnan()).sum(-1)
    return standard_error(values.nansum(-1) / n.clamp_min(1), n)


def position_axis(positions: Positions, n: int) -> Axis:
    """The axis of the positions asked for.

    Args:
        positions: None for all, one of every prompt, or one for each prompt, which is "own".
        n: how many there are of a prompt.
    """
    if positions is None:
        return Axis("pos", tuple(range(n)))
    return Axis("pos", (positions,) if isinstance(positions, int) else ("own",))


def flat(values: Tensor) -> Any:
    """All numbers of a tensor in float64, in the order of the rows of a data frame."""
    return values.detach().cpu().double().flatten().numpy()


def insert_before_value(frame: pandas.DataFrame, columns: Mapping[str, Tensor]) -> None:
    """Inserts tensors as columns before the last one; they are shaped as the frame's values."""
    for name, values in columns.items():
        frame.insert(len(frame.columns) - 1, name, flat(values))


def insert_tokens(
    frame: pandas.DataFrame, texts: Sequence[Sequence[str]], column: str = "position"
) -> None:
    """Inserts the token of each prompt's position behind it; None where a prompt has none.

    Args:
        frame: has the columns `prompt` and `column`.
        texts: the tokens of each prompt.
        column: the positions; the new column is `token`, or such as `key_token`.
    """
    cells = zip(frame["prompt"], frame[column], strict=True)
    tokens = [texts[n][p] if p < len(texts[n]) else None for n, p in cells]
    name = "token" if column == "position" else f"{column}_token"
    frame.insert(list(frame.columns).index(column) + 1, name, tokens)


def provenance(run: Run, plan: str) -> Provenance:
    """The provenance of an analysis of a run."""
    view, prompts = run.view, run.prompts
    under = "" if run.intervention is None else str(run.intervention)
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
        plan=f"{plan}, under {under}" if under else plan,
        user_hooks=tuple(view.user_hooks()),
        resid_patching=__version__,
        intervention=under,
    )


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
            name = {new: old for old, new in _COLUMN_NAMES.items()}.get(name, name)
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
        values, axes = self.values, list(self.axes)
        for name, label in labels.items():
            axis = self.axis(name)
            values = values.select(axes.index(axis), axis.index(label))
            axes.remove(axis)
        return values

    def top(self, k: int = 10, *, by: Literal["abs", "signed"] = "abs") -> pandas.DataFrame:
        """The k largest rows of the table, ranked by their means over prompts.

        Results that have a number for each token (lenses, the running total) are ranked by token
        instead: their rows name the prompt and the token.

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
        known: Any = ranked(self.to_frame() if self.ordered else self.table())
        if by == "signed":
            known = known.sort_values("value", ascending=False, kind="stable")
        return known[:k].reset_index(drop=True)

    def table(self) -> pandas.DataFrame:
        """The mean over prompts of each cell, `value`, beside its standard error `se`.

        There is no `se` where there is one prompt.
        """
        names = [axis.name for axis in self.axes]
        if "batch" not in names:
            return self.to_frame()
        place = names.index("batch")
        values = self.values.detach().cpu().double()
        axes = tuple(axis for axis in self.axes if axis.name != "batch")
        frame = Result(values.mean(place), axes, self.unit, self.provenance).to_frame()
        if self.has_error:
            insert_before_value(frame, {"se": standard_error(values.movedim(place, -1))})
        return frame

    @property
    def has_error(self) -> bool:
        """Whether rows of the table are means over several prompts, with a standard error."""
        return any(axis.name == "batch" and len(axis.labels) > 1 for axis in self.axes)

    @property
    def averaged(self) -> str:
        """What the rows of the table are means over, in words; empty where they are no means."""
        return f"mean over {self.provenance.n_prompts} prompts" if self.has_error else ""

    @property
    def caption(self) -> str:
        """The unit, and what the numbers are means over."""
        error = "se: standard error of the mean" if self.has_error else ""
        return "; ".join(filter(None, [f"{self.kind} in {self.unit}", self.averaged, error]))

    def headings(self) -> dict[str, str]:
        """The axes, the value, and its standard error."""
        axes = [_COLUMN_NAMES.get(axis.name, axis.name) for axis in self.axes]
        axes = [name for name in axes if name != "prompt"]
        return {name: name for name in [*axes, "value", *["se"] * self.has_error]}

    def facts(self) -> tuple[tuple[str, str], ...]:
        """The model that ran, its weights' state, under which intervention, how many prompts."""
        origin = self.provenance
        under = (("under", origin.intervention),) if origin.intervention else ()
        return ("model", origin.model_text), *under, ("prompts", str(origin.n_prompts))

    def to_frame(self) -> pandas.DataFrame:
        """Long form: one row a cell, a column for each axis, `value` last.

        The axes `batch` and `pos` are the columns `prompt` and `position`. Addresses are followed
        by their `layer` and `head`, where they have one.
        """
        import pandas

        names = [_COLUMN_NAMES.get(axis.name, axis.name) for axis in self.axes]
        index = pandas.MultiIndex.from_product([axis.labels for axis in self.axes], names=names)
        frame = pandas.DataFrame({"value": flat(self.values)}, index=index).reset_index()
        if names and names[0] in ("target", "component", "write"):
            places = {str(label): place_of(str(label)) for label in self.axes[0].labels}
            for number, name in enumerate(("layer", "head"), start=1):
                if any(place[number - 1] is not None for place in places.values()):
                    column = [places[str(label)][number - 1] for label in frame[names[0]]]
                    frame.insert(number, name, pandas.array(column, dtype="Int64"))
        return frame

    def __sub__(self, other: Result) -> Comparison:
        """This result beside another: `compare(self, other)`."""
        return compare(self, other)

    def to_json(self) -> str:
        """The result as JSON text; NaN is written as null. `from_json` reads it back."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)

    def to_dict(self) -> dict[str, Any]:
        """What `to_json` writes, as lists, numbers and texts.

        It holds a checksum of all fields, which does not cover entries that a caller adds.
        """
        fields = {
            field.name: _encode(getattr(self, field.name)) for field in dataclasses.fields(self)
        }
        head = {"format": "resid_patching", "version": RESULT_VERSION, "kind": self.kind}
        return {**head, "sha256": checksum({**head, **fields}), **fields}

    @classmethod
    def _from_fields(cls: type[R], fields: dict[str, Any]) -> R:
        """A result from the fields of a file, which may be older than this version."""
        return cls(**fields)

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
        if body.get("version") not in (1, RESULT_VERSION):
            raise ResultFormatError(
                f"format version {body.get('version')} was found; this version of the package "
                f"reads 1 and {RESULT_VERSION}"
            )
        fields = dataclasses.fields(cls)
        names = [f.name for f in fields if f.name in body or f.default is dataclasses.MISSING]
        try:
            covered = {name: body[name] for name in ("format", "version", "kind", *names)}
            if body["version"] != 1 and body.get("sha256") != checksum(covered):
                raise ValueError("its numbers or labels are not those that were written")
            return cls._from_fields({name: _decode(body[name]) for name in names})
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


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Result):
    """Two results side by side: values are their difference, a - b.

    Attributes:
        a: the first result's values.
        b: the second's.
        plans: what was computed in each, in words.
    """

    kind: ClassVar[str] = "comparison"

    a: Tensor
    b: Tensor
    plans: tuple[str, ...]

    def to_frame(self) -> pandas.DataFrame:
        """Long form: a column for each axis, a, b, and `value`, their difference."""
        frame = super().to_frame()
        insert_before_value(frame, {"a": self.a, "b": self.b})
        return frame

    def table(self) -> pandas.DataFrame:
        """Means over prompts: a, b, and `value`, their difference, beside its standard error."""
        names = [axis.name for axis in self.axes]
        if "batch" not in names:
            return self.to_frame()
        frame = super().table()
        place = list(frame.columns).index("se" if self.has_error else "value")
        for name, values in (("b", self.b), ("a", self.a)):
            frame.insert(
                place, name, flat(values.detach().cpu().double().mean(names.index("batch")))
            )
        return frame

    def headings(self) -> dict[str, str]:
        """The axes, a, b and their difference with its standard error."""
        columns = super().headings()
        axes = [name for name in columns if name not in ("value", "se")]
        named = {name: name for name in [*axes, "a", "b"]}
        return named | {**columns, "value": "difference"}

    def facts(self) -> tuple[tuple[str, str], ...]:
        """What was computed in a and in b."""
        return (*zip(("a", "b"), self.plans, strict=True), *super().facts())

    def caveats(self) -> tuple[str, ...]:
        """The direction of the difference."""
        return ("difference: a - b, on the same prompts.",)


def compare(a: Result, b: Result) -> Comparison:
    """Two results of one kind side by side; also written `a - b`.

    Args:
        a: a result, such as an attribution of an ablated run.
        b: another of the same kind, with the same axes, unit, prompts and scored tokens.

    Returns:
        A `Comparison` on the same axes: a, b and a - b.

    Raises:
        ValueError: they cannot be set side by side; it says what differs.
    """
    pairs: dict[str, tuple[Any, Any]] = {
        "kinds": (getattr(a, "kind", type(a).__name__), getattr(b, "kind", type(b).__name__))
    }
    if isinstance(a, Result) and isinstance(b, Result):
        pairs["axes"] = _axes_text(a), _axes_text(b)
        pairs["units"] = a.unit, b.unit
        pairs["prompts"] = a.provenance.tokens, b.provenance.tokens
        for name in ("metric", "answers", "foils", "direction"):
            pairs[name] = getattr(a, name, None), getattr(b, name, None)
    for what, (one, other) in pairs.items():
        if one != other:
            raise ValueError(f"two results are compared cell by cell: {what} {one} and {other}")
    if a.axes != b.axes:
        raise ValueError("two results are compared cell by cell, but the labels of axes differ")
    plans = a.provenance.plan, b.provenance.plan
    origin = dataclasses.replace(a.provenance, plan=f"{plans[0]}, minus {plans[1]}")
    values = a.values - b.values.to(a.values)
    return Comparison(values, a.axes, a.unit, origin, a.values, b.values, plans)


def _axes_text(result: Result) -> str:
    return " × ".join(f"{len(axis.labels)} {axis.name}" for axis in result.axes)


def load_result(path: str | os.PathLike[str]) -> Result:
    """Reads a result of any kind from a JSON file, as `to_json` or a command's --json wrote it.

    Raises:
        ResultFormatError: the file holds no result, or not what was written.
        OSError: it cannot be read.
    """
    text = Path(path).read_text(encoding="utf-8")
    kind = _load_object(text).get("kind")
    if not isinstance(kind, str) or kind not in _HOMES:
        known = ", ".join(_HOMES)
        raise ResultFormatError(f"{path} holds no result: its kind is {kind!r}, none of {known}")
    module, name = _HOMES[kind]
    return getattr(importlib.import_module(f"resid_patching.{module}"), name).from_json(text)


@functools.cache
def place_of(label: str) -> tuple[int | None, int | None]:
    """The layer and the head of an address; None where it has none, or names several parts."""
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
        return {"tensor": _with_none(value), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Axis):
        return {"axis": value.name, "labels": list(value.labels)}
    if isinstance(value, Provenance):
        return {"provenance": dataclasses.asdict(value)}
    if isinstance(value, tuple | list):
        return [_encode(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _with_none(values: Tensor) -> Any:
    """Nested lists of a tensor's numbers, with None for NaN."""
    values = values.detach().cpu()
    if not values.is_floating_point():
        return values.tolist()
    if bool((infinite := values.isinf()).any()):
        raise ResultFormatError(f"{float(values[infinite][0])} cannot be written as JSON")
    numbers = values.double().numpy()
    return numpy.where(numpy.isnan(numbers), None, numbers).tolist()  # type: ignore[call-overload]


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if "tensor" in value:
            dtype, numbers = getattr(torch, value["dtype"]), value["tensor"]
            if dtype.is_floating_point:
                numbers = numpy.array(numbers, dtype=numpy.float64)  # None becomes NaN
            return torch.tensor(numbers, dtype=dtype, device="cpu")
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
