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

from resid_patching.address import Address, Head
from resid_patching.errors import SmallDenominatorWarning, warn
from resid_patching.markup import number_text
from resid_patching.result import (
    Axis,
    Result,
    flat,
    insert_before_value,
    insert_tokens,
    place_of,
    standard_error,
)

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, eq=False, repr=False)
class Effect(Result):
    """What replacing targets did to a metric: values [target, batch] are the total effects.

    With several receivers side by side they are [target, receiver, batch], NaN where no write of a
    target reaches a receiver. At each position in turn they are [target, position, batch], NaN
    where a prompt has no such position.

    Attributes:
        how: the kind of ablation, in words.
        metric: the metric, in words.
        joint: whether the targets were replaced together.
        positions: where, in words.
        baseline: the clean run's metric [batch].
        patched: the metric with the target replaced, the model run again; shaped as values.
        direct: the direct effect; shaped as values. For a path: the same change at its receivers,
            with every later write frozen.
        weights: tokens scored in each prompt [batch], where the metric is a mean over tokens.
        routes: how the variants were run; all give the same numbers.
        token_texts: the tokens of each prompt as text, to name positions; None where not known.
        path_to: the receivers of a path, a text for each alternative; None where the targets
            themselves were replaced.
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
    token_texts: tuple[tuple[str, ...], ...] | None = None
    path_to: tuple[str, ...] | None = None

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
        """The receivers of a path to several side by side; empty for anything else."""
        return tuple(map(str, self.axis("receiver").labels)) if self._has("receiver") else ()

    def receiver(self, label: str | Address) -> Effect:
        """One column of a path to several receivers side by side.

        Raises:
            KeyError: there is no such receiver.
        """
        return self._column("receiver", label, path_to=(str(label),))

    def reader(self, label: str | Address) -> Effect:
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
        return self._column("position", place, positions=f"position {int(place)}")

    def _column(self, name: str, label: str | int | Address, **changes: Any) -> Effect:
        place = self.axis(name).index(label)
        for field in ("values", "patched", "direct"):
            changes[field] = getattr(self, field)[:, place]
        changes["axes"] = tuple(axis for axis in self.axes if axis.name != name)
        return dataclasses.replace(self, **changes)

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

    @property
    def is_path(self) -> bool:
        """Whether only what targets send to chosen receivers was replaced."""
        return self.path_to is not None

    @property
    def is_path_to_logits(self) -> bool:
        """Whether the path ends at the logits, so that nothing follows it and direct = total."""
        return self.path_to == ("logits",)

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Effect:
        """Files written before 0.1.0 say in `how` alone where a path ends."""
        effect = cls(**fields)
        if "path_to" in fields or not effect.how.startswith("path to "):
            return effect
        together = effect.how.removeprefix("path to ").partition(", MLPs ")[0]
        return dataclasses.replace(effect, path_to=effect.receivers or (together,))

    def to_frame(self) -> pandas.DataFrame:
        """Long form: target, layer, head, prompt, baseline, patched, direct, indirect, value.

        Each receiver or position has a row of its own. Beside a position stands its token, where
        it is known.
        """
        frame = super().to_frame()
        columns = {
            "baseline": self.baseline.expand_as(self.values),
            "patched": self.patched,
            "direct": self.direct,
            "indirect": self.indirect,
        }
        insert_before_value(frame, columns)
        if "position" in frame and self.token_texts is not None:
            insert_tokens(frame, self.token_texts)
        return frame

    def table(self) -> pandas.DataFrame:
        """One row a target: target, baseline, patched, direct, indirect, (se,) value.

        The value is the total effect. All are means over prompts, or over tokens where the metric
        is one of tokens, and `se` is the standard error of the total. Each receiver or position has
        a row of its own: NaN where there is no path, or where not every prompt has the position.
        `to_frame` has each prompt's own numbers.
        """
        one = dataclasses.replace(
            self,
            values=self.mean(self.values)[..., None],
            patched=self.mean(self.patched)[..., None],
            direct=self.mean(self.direct)[..., None],
            baseline=self.mean(self.baseline)[None],
            axes=(*self.axes[:-1], Axis("batch", (0,))),
            token_texts=self.token_texts if len(set(self.token_texts or ())) == 1 else None,
        )
        frame = one.to_frame().drop(columns="prompt")
        if self.has_error:
            insert_before_value(frame, {"se": standard_error(self.total, self.weights)})
        if self.has_perplexity:
            frame[["perplexity", "ratio"]] = self.perplexity[["after", "ratio"]]
        return frame

    def headings(self) -> dict[str, str]:
        """Target, receiver or position, total, its standard error, direct and indirect."""
        columns = {"target": self._target_name}
        columns |= {name: name for name in ("receiver", "position") if self._has(name)}
        if self._has("position") and len(set(self.token_texts or ())) == 1:
            columns["token"] = "token"
        columns["value"] = "total"
        if self.has_error:
            columns["se"] = "se"
        if not self.is_path_to_logits and bool(self.direct.isfinite().any()):
            columns |= {"direct": "direct", "indirect": "indirect"}
        if self.has_perplexity:
            columns |= {"perplexity": "perplexity", "ratio": "ratio"}
        return columns

    @property
    def row_name(self) -> str:
        """Target, edge or sender; of several receivers a path, of positions in turn a cell."""
        if self.columns is not None:
            return "path" if self._has("receiver") else "cell"
        return self._target_name

    @property
    def _target_name(self) -> str:
        if any("->" in target for target in self.targets[:1]):
            return "edge"
        return "sender" if self.is_path else "target"

    @property
    def grid_name(self) -> str:
        """What the values of a grid are."""
        return "total effect"

    @property
    def why_absent(self) -> str:
        """A target that writes after a receiver reads has no path to it."""
        return "no path: it writes too late" if self.is_path else ""

    @property
    def why_no_value(self) -> str:
        """There is no path, or not every prompt has the position."""
        if not self.is_path:
            return super().why_no_value
        if self._has("receiver"):
            return f"do not exist ({self.why_absent})"
        return "have no path to the receiver: n/a"

    def _has(self, name: str) -> bool:
        return self.columns is not None and self.columns.name == name

    def facts(self) -> tuple[tuple[str, str], ...]:
        """Kind, positions, metric and baseline, above what every result says."""
        together = f" ({self._target_name}s together)" if self.joint else ""
        metric = self.metric.replace(
            "(one a prompt) - (one a prompt)", "of each prompt's answer - foil"
        )
        base = f"{metric}: {float(self.mean(self.baseline)):+.4f} {self.unit}"
        if self.has_perplexity:
            before = number_text("perplexity", float(self.perplexity["before"].iloc[0]))
            base += f", perplexity {before}"
        base += f" ({self.averaged})" if self.averaged else ""
        rows = (("kind", self.how + together), ("at", self.positions), ("baseline", base))
        return (*rows, *super().facts())

    def caveats(self) -> tuple[str, ...]:
        """How total and direct differ, and that a small effect does not make a part unneeded."""
        rest = "direct (not the total): later writes frozen; indirect: the rest."
        if self._target_name == "edge":
            rest = f"; {rest}" if bool(self.direct.isfinite().any()) else ""
            said = f"total: the receivers hear the edges replaced, all behind them run again{rest}"
            return said, "Effects of single edges don't add up to those of all."
        if not self.is_path:
            needed = "This shows what replacing a part does in this run, "
            needed += "not that it is unnecessary."
            return f"total: the model run again; {rest}", needed
        said = f"total: the receiver changed, all behind it run again; {rest}"
        if self.is_path_to_logits:
            said = "total: the logits with the path replaced; nothing follows, so direct = total."
        only = "Only the senders' messages to the receivers are replaced."
        return said, f"{only} A sender without a path has no number, which is not 0."

    def pictures(self) -> tuple[str, ...]:
        """The grid or the bars; beside a grid of heads its bars, beside receivers the diagram."""
        if self._has("receiver"):
            return ("show", "path_diagram")
        heads = [place_of(target)[1] is not None for target in self.targets]
        is_grid = len(heads) > 1 and all(heads) and self.columns is None
        return ("show", "effect_bars") if is_grid else ("show",)

    @property
    def averaged(self) -> str:
        """What `mean` is taken over, in words; empty where there is one prompt."""
        n = self.baseline.shape[0]
        if self.weights is not None:
            return f"mean over {int(self.weights.sum())} tokens of {n} prompt{'s' * (n != 1)}"
        return f"mean over {n} prompts" if n > 1 else ""

    def summary(self, k: int = 10, **asked: Any) -> Any:
        """Its facts, its first rows and its caveats as text.

        Args:
            k: how many rows, the largest by size.
            asked: arguments of the old name; `summary(seed=0)` is now `intervals(seed=0)`.
        """
        if asked:
            message = "Effect.summary(seed=...) is now Effect.intervals(seed=...)"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return self.intervals(**asked)
        return super().summary(k)

    def intervals(
        self, *, seed: int, confidence: float = 0.95, draws: int = 2000
    ) -> pandas.DataFrame:
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
        low, high = nan, nan
        if n > 1:
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randint(n, (draws, n), generator=generator, device="cpu")
            counts = total.new_zeros(draws, n)
            counts.scatter_add_(1, drawn, torch.ones_like(counts))
            means = total @ counts.T / n
            tail = (1 - confidence) / 2
            low, high = means.quantile(tail, 1), means.quantile(1 - tail, 1)

        names = [axis.name for axis in self.axes[:-1]]
        rows = itertools.product(*(axis.labels for axis in self.axes[:-1]))
        frame = pandas.DataFrame(rows, columns=names).assign(n=n)
        frame["total"], frame["se"] = flat(total.mean(-1)), flat(standard_error(total))
        frame["low"], frame["high"] = flat(low), flat(high)
        for name, values in (("direct", self.direct), ("indirect", self.indirect)):
            frame[name] = flat(values.detach().cpu().double().mean(-1))
        return frame

    def _require_one_column(self, wanted: str) -> None:
        if self.columns is not None:
            name = self.columns.name
            raise ValueError(f"choose one {name} first: effect.{name}(...).{wanted}")

    def grid(self, of: Literal["total", "direct", "indirect"] = "total") -> Result:
        """Heads as layer × head × batch; NaN where a head was no target of its own.

        Raises:
            ValueError: no target is a single head, or there are several receivers or positions.
        """
        self._require_one_column("grid()")
        places = {i: place_of(target) for i, target in enumerate(self.targets)}
        heads = {
            i: Head(layer, head)
            for i, (layer, head) in places.items()
            if layer is not None and head is not None
        }
        if not heads:
            raise ValueError(f"a grid shows heads; the targets are {', '.join(self.targets[:4])}")
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
            raise ValueError(f"perplexity needs metric=rp.loss(); this metric is {self.metric}")
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
