"""What replacing targets did to a metric."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from resid_patching.address import Head, parse
from resid_patching.errors import SmallDenominatorWarning, warn
from resid_patching.result import Axis, Result

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, eq=False, repr=False)
class Effect(Result):
    """What replacing targets did to a metric: values [target, batch] are the total effects.

    Of a path to several receivers side by side they are [target, receiver, batch], NaN where no
    write of a target reaches a receiver; at each position in turn [target, position, batch], NaN
    where a prompt has no such position.

    Attributes:
        how: the kind of ablation, in words.
        metric: the metric, in words.
        joint: whether the targets were replaced together.
        positions: where, in words.
        baseline: the clean run's metric [batch].
        patched: the metric with the target replaced, the model run again; shaped as values.
        direct: the direct effect; shaped as values. Of a path: the same change at its receivers,
            every later write frozen.
        weights: tokens scored in each prompt [batch], where the metric is a mean over tokens.
        routes: how the variants were run; all give the same numbers.
    """

    kind: ClassVar[str] = "effect"

    how: str
    metric: str
    joint: bool
    positions: str
    baseline: Float[Tensor, " batch"]
    patched: Float[Tensor, "target *column batch"]
    direct: Float[Tensor, "target *column batch"]
    weights: Tensor | None
    routes: tuple[str, ...]

    @property
    def total(self) -> Float[Tensor, "target *column batch"]:
        """Patched - baseline: what the whole model did without the target's own value."""
        return self.values

    @property
    def indirect(self) -> Float[Tensor, "target *column batch"]:
        """Total - direct: what later layers and the final norm made of the change."""
        return self.total - self.direct

    def mean(self, values: Tensor) -> Tensor:
        """The mean over prompts of [..., batch], over tokens where the metric is one of tokens."""
        values = values.detach().cpu().double()
        if self.weights is None:
            return values.mean(-1)
        weights = self.weights.detach().cpu().double()
        return (values * weights).sum(-1) / weights.sum()

    @property
    def targets(self) -> tuple[str, ...]:
        """The rows' addresses, as text."""
        return tuple(map(str, self.axis("target").labels))

    @property
    def columns(self) -> Axis | None:
        """The axis between target and batch: receivers side by side, or positions in turn."""
        return self.axes[1] if len(self.axes) == 3 else None

    @property
    def receivers(self) -> tuple[str, ...]:
        """The columns of a path to several receivers side by side; else none."""
        columns = self.columns
        if columns is None or columns.name != "receiver":
            return ()
        return tuple(map(str, columns.labels))

    def receiver(self, label: Any) -> Effect:
        """One column of a path to several receivers side by side.

        Raises:
            KeyError: there is no such receiver.
        """
        return self._column("receiver", label)

    def reader(self, label: Any) -> Effect:
        """The old name of `receiver`; it goes in the next version."""
        warnings.warn("Effect.reader is now Effect.receiver", DeprecationWarning, stacklevel=2)
        return self.receiver(label)

    @property
    def readers(self) -> tuple[str, ...]:
        """The old name of `receivers`; it goes in the next version."""
        warnings.warn("Effect.readers is now Effect.receivers", DeprecationWarning, stacklevel=2)
        return self.receivers

    def position(self, place: int) -> Effect:
        """One column of targets replaced at each position in turn.

        Raises:
            KeyError: there is no such position.
        """
        return dataclasses.replace(
            self._column("position", place), positions=f"position {int(place)}"
        )

    def _column(self, name: str, label: Any) -> Effect:
        place = self.axis(name).index(label)
        axes = tuple(axis for axis in self.axes if axis.name != name)
        return dataclasses.replace(
            self,
            values=self.values[:, place],
            patched=self.patched[:, place],
            direct=self.direct[:, place],
            axes=axes,
        )

    def recovery(self, source: Tensor) -> Tensor:
        """Mean total over mean (source - baseline): the share of the way from base to source.

        Args:
            source: the same metric in the source run [batch], from `rp.measure(source, metric)`.

        Returns:
            [target], [target, receiver] or [target, position]; 1 where the target alone makes the
            base as the source.

        Warns:
            SmallDenominatorWarning: base and source are close, so shares mean little.
        """
        source = source.to(self.baseline)
        gap = float((source - self.baseline).mean())
        size = max(float(source.mean().abs()), float(self.baseline.mean().abs()))
        if abs(gap) < 0.1 * size or gap == 0:
            warn(
                f"source and base differ by {gap:+.4g} in {self.metric}, little beside their size "
                f"of {size:.4g}; a share of it means little, so read the raw effects",
                SmallDenominatorWarning,
            )
        return self.total.mean(-1) / gap

    def to_frame(self) -> pandas.DataFrame:
        """Long form: target, (column,) batch, baseline, patched, direct, indirect, value."""
        frame = super().to_frame()

        def flat(tensor: Tensor) -> Any:
            return tensor.detach().to("cpu", torch.float64).flatten().numpy()

        columns = {
            "baseline": self.baseline.expand_as(self.values),
            "patched": self.patched,
            "direct": self.direct,
            "indirect": self.indirect,
        }
        for place, (name, tensor) in enumerate(columns.items(), start=len(self.axes)):
            frame.insert(place, name, flat(tensor))
        return frame

    def top(self, k: int = 10, *, by: Literal["abs", "signed"] = "abs") -> pandas.DataFrame:
        """The k targets with the largest total effects, by their `mean` over prompts (or tokens).

        Args:
            k: how many rows.
            by: `abs` ranks by size, so that strong negative effects are seen; `signed` by value.

        Returns:
            A data frame with one row a target: target, (receiver or position,) baseline, patched,
            direct, indirect, value; the value is the total effect, and all are means. Of receivers
            side by side or positions in turn each has a row; those without a path, and positions
            that not every prompt has, are left out. `to_frame` has each prompt's own numbers.

        Raises:
            ValueError: `by` is neither.
        """
        return super().top(k, by=by)

    def _ranked(self) -> tuple[pandas.DataFrame, str]:
        one = dataclasses.replace(
            self,
            values=self.mean(self.values)[..., None],
            patched=self.mean(self.patched)[..., None],
            direct=self.mean(self.direct)[..., None],
            baseline=self.mean(self.baseline)[None],
            axes=(*self.axes[:-1], Axis("batch", (0,))),
        )
        return one.to_frame().drop(columns="batch"), self.averaged

    @property
    def averaged(self) -> str:
        """What `mean` is taken over, in words; nothing where there is one prompt."""
        n = self.baseline.shape[0]
        if self.weights is not None:
            return f"mean over {int(self.weights.sum())} tokens of {n} prompt{'s' * (n != 1)}"
        return f"mean over {n} prompts" if n > 1 else ""

    def summary(self, *, seed: int, confidence: float = 0.95, draws: int = 2000) -> Any:
        """Mean over prompts with standard error and bootstrap interval, one row a target.

        Args:
            seed: seed of the bootstrap, which draws prompts with replacement.
            confidence: coverage of the interval.
            draws: number of resamples.

        Returns:
            A data frame: target, (receiver or position,) n, total, se, low, high, direct, indirect.
            With one prompt the spread is undefined, and NaN.
        """
        import pandas

        total = self.total.detach().to("cpu", torch.float64).flatten(0, -2)
        n = total.shape[1]
        nan = total.new_full((total.shape[0],), torch.nan)
        se, low, high = nan, nan, nan
        if n > 1:
            se = total.std(1) / n**0.5
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randint(n, (draws, n), generator=generator, device="cpu")
            counts = total.new_zeros(draws, n)
            counts.scatter_add_(1, drawn, torch.ones_like(counts))
            means = total @ counts.T / n
            tail = (1 - confidence) / 2
            low, high = means.quantile(tail, 1), means.quantile(1 - tail, 1)

        def mean(values: Tensor) -> Any:
            return values.detach().cpu().double().mean(-1).flatten().numpy()

        between = self.columns
        labels = ("",) if between is None else between.labels
        rows = list(itertools.product(self.targets, labels))
        columns: dict[str, Any] = {"target": [target for target, _ in rows]}
        if between is not None:
            columns[between.name] = [label for _, label in rows]
        columns |= {"n": n, "total": mean(self.total), "se": se.numpy()}
        columns |= {"low": low.numpy(), "high": high.numpy()}
        columns |= {"direct": mean(self.direct), "indirect": mean(self.indirect)}
        return pandas.DataFrame(columns)

    def _require_one_column(self, wanted: str) -> None:
        if self.columns is not None:
            name = self.columns.name
            raise ValueError(f"choose one {name} first: effect.{name}(...).{wanted}")

    def grid(self, of: Literal["total", "direct", "indirect"] = "total") -> Result:
        """Heads as layer × head × batch; NaN where a head was no target.

        Raises:
            ValueError: no target is a head, or there are several receivers or positions.
        """
        self._require_one_column("grid()")
        heads = {i: a for i, t in enumerate(self.targets) if isinstance(a := parse(t), Head)}
        if not heads:
            raise ValueError(f"a grid is of heads; the targets are {', '.join(self.targets[:4])}")
        source = {"total": self.total, "direct": self.direct, "indirect": self.indirect}[of]
        n_layers = 1 + max(head.layer for head in heads.values())
        n_heads = 1 + max(head.head for head in heads.values())
        values = source.new_full((n_layers, n_heads, source.shape[1]), torch.nan)
        for number, head in heads.items():
            values[head.layer, head.head] = source[number]
        axes = (
            Axis("layer", tuple(range(n_layers))),
            Axis("head", tuple(range(n_heads))),
            self.axis("batch"),
        )
        return Result(values, axes, self.unit, self.provenance)

    @property
    def has_perplexity(self) -> bool:
        """Whether there is a `perplexity`: the metric is the loss, and each target has one cell."""
        return self.weights is not None and self.columns is None

    @property
    def perplexity(self) -> pandas.DataFrame:
        """Perplexity before, after and their ratio, over all tokens of all prompts.

        Raises:
            ValueError: the metric is not the loss, or there are several receivers or positions.
        """
        import pandas

        self._require_one_column("perplexity")
        if self.weights is None:
            raise ValueError(f"perplexity is of metric=rp.loss(); this metric is {self.metric}")
        weights, baseline, patched = (
            tensor.detach().to("cpu", torch.float64)
            for tensor in (self.weights, self.baseline, self.patched)
        )
        share = weights / weights.sum()
        before = (baseline * share).sum().exp()
        after = (patched * share).sum(1).exp()
        return pandas.DataFrame(
            {
                "target": self.targets,
                "before": float(before),
                "after": after.numpy(),
                "ratio": (after / before).numpy(),
            }
        )
