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
from resid_patching.errors import SmallDenominatorWarning
from resid_patching.result import Axis, Result

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, eq=False, repr=False)
class Effect(Result):
    """What replacing targets did to a metric: values [target, batch] are the total effects.

    Of a path to several readers side by side they are [target, reader, batch], NaN where no write
    of a target reaches a reader.

    Attributes:
        how: the kind of ablation, in words.
        metric: the metric, in words.
        joint: whether the targets were replaced together.
        positions: where, in words.
        baseline: the clean run's metric [batch].
        patched: the metric with the target replaced, the model run again; shaped as values.
        direct: the direct effect; shaped as values. Of a path: the same change at its readers,
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
    patched: Float[Tensor, "target *reader batch"]
    direct: Float[Tensor, "target *reader batch"]
    weights: Tensor | None
    routes: tuple[str, ...]

    @property
    def total(self) -> Float[Tensor, "target *reader batch"]:
        """Patched - baseline: what the whole model did without the target's own value."""
        return self.values

    @property
    def indirect(self) -> Float[Tensor, "target *reader batch"]:
        """Total - direct: what later layers and the final norm made of the change."""
        return self.total - self.direct

    def mean(self, values: Tensor) -> Tensor:
        """The mean over prompts of [..., batch], over tokens where the metric is one of tokens."""
        values = values.detach().double().cpu()
        if self.weights is None:
            return values.mean(-1)
        weights = self.weights.detach().double().cpu()
        return (values * weights).sum(-1) / weights.sum()

    @property
    def targets(self) -> tuple[str, ...]:
        """The rows' addresses, as text."""
        return tuple(map(str, self.axis("target").labels))

    @property
    def readers(self) -> tuple[str, ...]:
        """The columns of a path to several readers side by side; else none."""
        names = [axis.name for axis in self.axes]
        return tuple(map(str, self.axis("reader").labels)) if "reader" in names else ()

    def reader(self, label: Any) -> Effect:
        """One column of a path to several readers side by side.

        Raises:
            KeyError: there is no such reader.
        """
        place = self.axis("reader").index(label)
        axes = tuple(axis for axis in self.axes if axis.name != "reader")
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
            [target] or [target, reader]; 1 where the target alone makes the base as the source.

        Warns:
            SmallDenominatorWarning: base and source are close, so shares mean little.
        """
        source = source.to(self.baseline)
        gap = float((source - self.baseline).mean())
        size = max(float(source.mean().abs()), float(self.baseline.mean().abs()))
        if abs(gap) < 0.1 * size or gap == 0:
            warnings.warn(
                f"source and base differ by {gap:+.4g} in {self.metric}, little beside their size "
                f"of {size:.4g}; a share of it means little, so read the raw effects",
                SmallDenominatorWarning,
                stacklevel=2,
            )
        return self.total.mean(-1) / gap

    def to_frame(self) -> pandas.DataFrame:
        """Long form: target, (reader,) batch, baseline, patched, direct, indirect, value."""
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

    def summary(self, *, seed: int, confidence: float = 0.95, draws: int = 2000) -> Any:
        """Mean over prompts with standard error and bootstrap interval, one row a target.

        Args:
            seed: seed of the bootstrap, which draws prompts with replacement.
            confidence: coverage of the interval.
            draws: number of resamples.

        Returns:
            A data frame: target, (reader,) n, total, se, low, high, direct, indirect. With one
            prompt the spread is undefined, and NaN.
        """
        import pandas

        total = self.total.detach().to("cpu", torch.float64).flatten(0, -2)
        n = total.shape[1]
        nan = torch.full((total.shape[0],), torch.nan, dtype=torch.float64)
        se, low, high = nan, nan, nan
        if n > 1:
            se = total.std(1) / n**0.5
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randint(n, (draws, n), generator=generator)
            counts = torch.zeros(draws, n, dtype=torch.float64)
            counts.scatter_add_(1, drawn, torch.ones(draws, n, dtype=torch.float64))
            means = total @ counts.T / n
            tail = (1 - confidence) / 2
            low, high = means.quantile(tail, 1), means.quantile(1 - tail, 1)

        def mean(values: Tensor) -> Any:
            return values.detach().cpu().double().mean(-1).flatten().numpy()

        rows = list(itertools.product(self.targets, self.readers or ("",)))
        columns: dict[str, Any] = {"target": [target for target, _ in rows]}
        if self.readers:
            columns["reader"] = [reader for _, reader in rows]
        columns |= {"n": n, "total": mean(self.total), "se": se.numpy()}
        columns |= {"low": low.numpy(), "high": high.numpy()}
        columns |= {"direct": mean(self.direct), "indirect": mean(self.indirect)}
        return pandas.DataFrame(columns)

    def grid(self, of: Literal["total", "direct", "indirect"] = "total") -> Result:
        """Heads as layer × head × batch; NaN where a head was no target.

        Raises:
            ValueError: no target is a head, or there are several readers.
        """
        if self.readers:
            raise ValueError("choose one of the readers first: effect.reader(label).grid()")
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
    def perplexity(self) -> pandas.DataFrame:
        """Perplexity before, after and their ratio, over all tokens of all prompts.

        Raises:
            ValueError: the metric is not the loss, or there are several readers.
        """
        import pandas

        if self.readers:
            raise ValueError("choose one of the readers first: effect.reader(label).perplexity")
        if self.weights is None:
            raise ValueError(f"perplexity is of metric=rp.loss(); this metric is {self.metric}")
        share = self.weights.double() / self.weights.double().sum()
        before = (self.baseline.double() * share).sum().exp()
        after = (self.patched.double() * share).sum(1).exp()
        return pandas.DataFrame(
            {
                "target": self.targets,
                "before": float(before),
                "after": after.cpu().numpy(),
                "ratio": (after / before).cpu().numpy(),
            }
        )
