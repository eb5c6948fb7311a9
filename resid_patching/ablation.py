"""One ablation API: zero, mean, resample, each named; total beside direct effect.

    effect = ablate(run, heads(model), Zero(), metric=logit_diff(" Mary", " John"))
    effect.baseline, effect.patched, effect.total, effect.direct, effect.indirect

    total    = metric(model run again with the target replaced) - baseline
    direct   = metric(the same change of the stream carried to the last state, every later
               write frozen, final norm live) - baseline
    indirect = total - direct: what the rest of the model made of the change

The kind has no default: "head X does Y" means nothing without what X was replaced with.

    Zero()                                     the target writes nothing
    Mean(reference, over=("batch",))           its mean over other prompts; over is required
    Resample(source, pairing="rowwise")        its value on other prompts

An ablation shows what removing a part does in *this* run. It does not show that the part is
unnecessary: others may have taken over, and the kinds disagree where the model relies on a
part's average. Sign: a negative total on a logit difference means the target pushed the answer up.

Source: Wang et al. 2022 (arXiv 2211.00593) on mean ablation; Chan et al. 2022, "Causal
Scrubbing", on resampling; McGrath et al. 2023 (arXiv 2307.15771) on later layers that repair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from resid_patching.address import (
    Address,
    Attn,
    AttnBias,
    Embed,
    Head,
    HeadInput,
    HeadNode,
    MLPBias,
    Neuron,
    PosEmbed,
    Stream,
    hook_name,
    parse,
)
from resid_patching.decomposition import writers_of
from resid_patching.errors import AblationError, AddressError, PromptError
from resid_patching.metrics import Metric, as_metric
from resid_patching.models import ModelView, require
from resid_patching.prompts import PositionIndex, Positions, take
from resid_patching.rerun import (
    Edit,
    Fill,
    Route,
    Variant,
    clean_hook,
    require_site,
    rerun,
    site_value,
)
from resid_patching.result import Axis, Result, provenance
from resid_patching.run import Run

if TYPE_CHECKING:
    import pandas

_KINDS = """the kinds are
  Zero()                                                the target writes nothing
  Mean(reference, over=("batch",))                      its mean over the runs of `reference`
  Resample(source, pairing="rowwise")                   its value in the run `source`
  Path(to="logits", using=Zero(), mlps="recompute")     only one route (not in this version yet)"""


def _refusal(message: str) -> AblationError:
    """An error that shows the kinds."""
    return AblationError(f"{message}; {_KINDS}")


@dataclass(frozen=True)
class Zero:
    """The target writes nothing: its activation is replaced by zeros.

    On a head this leaves the layer's output bias in place, a writer of its own (`attn.6.bias`);
    on `attn.6` heads and bias go together.
    """

    def __str__(self) -> str:
        return "zero"


@dataclass(frozen=True, eq=False)
class Mean:
    """The target's activation is replaced by its mean over a reference run.

    Attributes:
        reference: a run over the same model; its pads are left out.
        over: the averaged axes, required: ("batch",) keeps position and needs prompts of one
            length, ("batch", "pos") is one mean for all positions.
        at: positions of the reference that are averaged (one, or one for each of its prompts)
            instead of all; the mean is then used at every edited position, which aligns prompts
            of unequal length by a named position.
    """

    reference: Any = None
    over: Any = None
    at: Positions = None

    def __post_init__(self) -> None:
        _require_run("Mean", "reference", self.reference)
        over = (self.over,) if isinstance(self.over, str) else self.over
        names = tuple(sorted(over)) if isinstance(over, tuple | list) else None
        if names not in (("batch",), ("batch", "pos")):
            raise _refusal(
                "Mean: over is ('batch',), which keeps position, or ('batch', 'pos'), which does "
                f"not, and has no default; got {self.over!r}"
            )
        object.__setattr__(self, "over", names)

    def __str__(self) -> str:
        where = "" if self.at is None else " at named positions"
        axes = " and ".join(self.over)
        return (
            f"mean over {axes}{where} of {len(self.reference)} prompts "
            f"({self.reference.prompts.hash[:8]})"
        )


@dataclass(frozen=True, eq=False)
class Resample:
    """The target's activation is replaced by its value on other prompts, at the same positions.

    Attributes:
        source: a run over the same model.
        pairing: `rowwise` pairs row i with row i; `shuffle` draws rows of the source with a seed,
            never a row's own.
        seed: required by `shuffle`, refused by `rowwise`.
    """

    source: Any = None
    pairing: Any = "rowwise"
    seed: Any = None

    def __post_init__(self) -> None:
        _require_run("Resample", "source", self.source)
        if self.pairing not in ("rowwise", "shuffle"):
            raise _refusal(f"Resample: pairing is 'rowwise' or 'shuffle', got {self.pairing!r}")
        is_number = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        if self.pairing == "shuffle" and not is_number:
            raise _refusal(f"Resample: a shuffle needs a seed, such as seed=0; got {self.seed!r}")
        if self.pairing == "rowwise" and self.seed is not None:
            raise _refusal("Resample: pairing='rowwise' draws nothing; leave out the seed")

    def __str__(self) -> str:
        seed = "" if self.seed is None else f", seed {self.seed}"
        return (
            f"resample {self.pairing} from {len(self.source)} prompts "
            f"({self.source.prompts.hash[:8]}){seed}"
        )


Kind: TypeAlias = Zero | Mean | Resample


@dataclass(frozen=True, eq=False, repr=False)
class Effect(Result):
    """What replacing targets did to a metric: values [target, batch] are the total effects.

    Attributes:
        how: the kind of ablation, in words.
        metric: the metric, in words.
        joint: whether the targets were replaced together.
        positions: where, in words.
        baseline: the clean run's metric [batch].
        patched: the metric with the target replaced, the model run again [target, batch].
        direct: the direct effect [target, batch].
        weights: tokens scored in each prompt [batch], where the metric is a mean over tokens.
        routes: how the variants were run; all give the same numbers.
    """

    kind: ClassVar[str] = "effect"

    how: str
    metric: str
    joint: bool
    positions: str
    baseline: Float[Tensor, " batch"]
    patched: Float[Tensor, "target batch"]
    direct: Float[Tensor, "target batch"]
    weights: Tensor | None
    routes: tuple[str, ...]

    @property
    def total(self) -> Float[Tensor, "target batch"]:
        """Patched - baseline: what the whole model did without the target's own value."""
        return self.values

    @property
    def indirect(self) -> Float[Tensor, "target batch"]:
        """Total - direct: what later layers and the final norm made of the change."""
        return self.total - self.direct

    @property
    def targets(self) -> tuple[str, ...]:
        """The rows' addresses, as text."""
        return tuple(map(str, self.axis("target").labels))

    def to_frame(self) -> pandas.DataFrame:
        """Long form: target, batch, baseline, patched, direct, indirect, value (the total)."""
        frame = super().to_frame()
        n_targets = self.values.shape[0]

        def flat(tensor: Tensor) -> Any:
            return tensor.detach().to("cpu", torch.float64).flatten().numpy()

        frame.insert(2, "baseline", flat(self.baseline.expand(n_targets, -1)))
        frame.insert(3, "patched", flat(self.patched))
        frame.insert(4, "direct", flat(self.direct))
        frame.insert(5, "indirect", flat(self.indirect))
        return frame

    def summary(self, *, seed: int, confidence: float = 0.95, draws: int = 2000) -> Any:
        """Mean over prompts with standard error and bootstrap interval, one row a target.

        Args:
            seed: seed of the bootstrap, which draws prompts with replacement.
            confidence: coverage of the interval.
            draws: number of resamples.

        Returns:
            A data frame: target, n, total, se, low, high, direct, indirect. With one prompt the
            spread is undefined, and NaN.
        """
        import pandas

        total = self.total.detach().to("cpu", torch.float64)
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
        return pandas.DataFrame(
            {
                "target": self.targets,
                "n": n,
                "total": total.mean(1).numpy(),
                "se": se.numpy(),
                "low": low.numpy(),
                "high": high.numpy(),
                "direct": self.direct.detach().cpu().double().mean(1).numpy(),
                "indirect": self.indirect.detach().cpu().double().mean(1).numpy(),
            }
        )

    def grid(self, of: Literal["total", "direct", "indirect"] = "total") -> Result:
        """Heads as layer × head × batch; NaN where a head was no target.

        Raises:
            ValueError: no target is a head.
        """
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
            ValueError: the metric is not the loss.
        """
        import pandas

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


Targets: TypeAlias = str | Address | Sequence[str | Address]


def ablate(
    run: Run,
    targets: Targets,
    how: Any = None,
    *,
    metric: Any,
    positions: Positions = None,
    joint: bool = False,
    routes: Sequence[Route] = ("plain", "replay", "full"),
    progress: Callable[[int], None] | None = None,
) -> Effect:
    """Replaces targets and measures what that does.

    Args:
        run: the run that is changed; it is the base, and what the metric is read from.
        targets: addresses or their texts: writers, stream states, and a head's q, k, v, z and
            pattern (k and v by key-value head).
        how: `Zero()`, `Mean(...)` or `Resample(...)`. There is no default.
        metric: `rp.logit_diff(...)` or another of `metrics`, or a function of logits.
        positions: None for all, one position of every prompt, or one for each prompt. For a
            pattern these are the rows that attend.
        joint: replace all targets together, in one row; else one at a time, one row each.
        routes: how the engine may run the variants; all give the same numbers.
        progress: called with the number of variants just done, for each group of prompts.

    Returns:
        An `Effect` [target, batch] whose text names the kind.

    Raises:
        AblationError: the kind is missing, a text, a class, or lacks what it needs.
        AddressError: a target this model does not have.
        PositionError: a prompt has no such position.
        PromptError: prompts of unequal length where a kind needs equal ones.
    """
    kind = _require_kind(how)
    sites = _sites(run.view, targets)
    chosen = as_metric(metric)
    require(run.view, "stream", "readout")
    reading = chosen.bind(run)
    where = run.locate(positions)
    fills = _Fills(run, kind, where, sites)
    edits = [Edit(site, where, fills.fill(site)) for site in sites]
    variants: list[Variant] = [tuple(edits)] if joint else [(edit,) for edit in edits]
    found = rerun(run, variants, reading, routes=routes, progress=progress)
    labels = (" + ".join(map(str, sites)) or "nothing",) if joint else tuple(map(str, sites))
    return _effect(run, kind, chosen, positions, joint, labels, found)


def _effect(
    run: Run,
    kind: Kind,
    metric: Metric,
    positions: Positions,
    joint: bool,
    labels: tuple[str, ...],
    found: Any,
) -> Effect:
    where = _positions_text(positions)
    plan = f"{kind} ablation{' (joint)' if joint else ''} at {where}, effect on {metric}"
    axes = (Axis("target", labels), Axis("batch", tuple(range(len(run)))))
    weights = getattr(metric, "weights", None)
    return Effect(
        values=found.patched - found.baseline,
        axes=axes,
        unit=metric.unit,
        provenance=provenance(run.view, run.prompts, plan),
        how=str(kind),
        metric=str(metric),
        joint=joint,
        positions=where,
        baseline=found.baseline,
        patched=found.patched,
        direct=found.direct - found.baseline,
        weights=None if weights is None else weights(run),
        routes=found.routes,
    )


def _positions_text(positions: Positions) -> str:
    if positions is None:
        return "all positions"
    return f"position {positions}" if isinstance(positions, int) else "one position a prompt"


def heads(model: Any) -> list[Head]:
    """Every head of a model, in order of layers."""
    view = _view(model)
    return [Head(layer, h) for layer in range(view.n_layers) for h in range(view.n_heads)]


def writers(model: Any) -> list[Address]:
    """Every component that writes to the stream: embeddings, attention layers, MLPs."""
    return list(writers_of(_view(model), "component"))


def streams(model: Any) -> list[Stream]:
    """Every state of the stream between layers, and in their middle where there is one."""
    view = _view(model)
    has_mid = not (view.parallel or view.attn_only)
    places = ("pre", "mid") if has_mid else ("pre",)
    found = [Stream(layer, place) for layer in range(view.n_layers) for place in places]
    return [*found, Stream(view.n_layers - 1, "post")]


def neurons(model: Any, layer: int) -> list[Neuron]:
    """Every neuron of one layer.

    Raises:
        AddressError: no such layer.
    """
    view = _view(model)
    if not 0 <= layer < view.n_layers:
        raise AddressError(f"{view.name} has layers 0 to {view.n_layers - 1}, not {layer}")
    return [Neuron(layer, index) for index in range(view.n_neurons(layer))]


def _view(model: Any) -> ModelView:
    if isinstance(model, Run):
        return model.view
    return model if isinstance(model, ModelView) else ModelView(model)


def _require_kind(how: Any) -> Kind:
    if isinstance(how, Zero | Mean | Resample):
        return how
    if how is None:
        asked = "ablate needs a kind, and there is no default"
    elif isinstance(how, type):
        asked = f"ablate was given the class {how.__name__}; make one, such as {how.__name__}(...)"
    else:
        asked = f"ablate was given {how!r}, which is no kind of ablation"
    raise _refusal(asked)


def _require_run(kind: str, name: str, value: Any) -> None:
    if not isinstance(value, Run):
        raise _refusal(
            f"{kind}: {name} is a run over the same model, rp.capture(model, prompts); got "
            f"{type(value).__name__}"
        )


def _sites(view: ModelView, targets: Targets) -> list[Address]:
    if isinstance(targets, str) or not isinstance(targets, Iterable):
        targets = [targets]
    sites = [parse(target) for target in targets]
    for site in sites:
        require_site(view, site)
    seen: dict[Address, Address] = {}
    for site in sites:
        place = _place(site)
        if place in seen:
            other = "" if seen[place] == site else f" (once as {seen[place]})"
            raise AddressError(f"{site} was given twice{other}")
        seen[place] = site
    return sites


def _place(site: Address) -> Address:
    """What a site replaces: a head is replaced by its z."""
    if isinstance(site, HeadNode) and site.which == "z":
        return Head(site.layer, site.head)
    return site


class _Fills:
    """The new values of every site under one kind."""

    def __init__(self, run: Run, kind: Kind, where: PositionIndex, sites: list[Address]) -> None:
        self.run, self.kind, self.where = run, kind, where
        self.partner: Tensor | None = None
        self.means: dict[Address, Tensor] = {}
        if isinstance(kind, Mean):
            _require_same_model(run, kind.reference, "reference")
            self._require_alignment(kind, sites)
            self.means = _means(kind, sites)
        if isinstance(kind, Resample):
            _require_same_model(run, kind.source, "source")
            self.partner = _partners(run, kind)
            _prefetch(kind.source, sites)
        if any(isinstance(site, Embed) for site in sites):
            _prefetch(run, [Embed()])

    def _require_alignment(self, kind: Mean, sites: list[Address]) -> None:
        """A mean that keeps position needs prompts whose positions mean the same."""
        patterns = [s for s in sites if isinstance(s, HeadNode) and s.which == "pattern"]
        keeps = kind.over == ("batch",) and kind.at is None
        lengths = set(self.run.prompts.lengths) | set(kind.reference.prompts.lengths)
        if len(lengths) > 1 and (keeps or patterns):
            ours, theirs = (
                sorted(set(self.run.prompts.lengths)),
                sorted(set(kind.reference.prompts.lengths)),
            )
            raise PromptError(
                f"a mean that keeps position needs prompts of one length; the run has {ours} "
                f"tokens, the reference {theirs}. Use over=('batch', 'pos'), or name the "
                "reference's positions with at=."
            )
        if patterns and "pos" in kind.over:
            raise AblationError(
                f"{patterns[0]}: a pattern's rows attend to different numbers of positions, so "
                "their mean over positions means nothing; use over=('batch',)"
            )

    def fill(self, site: Address) -> Fill:
        """The function that gives a site's new values."""
        match self.kind:
            case Zero():
                new = self._zeros(site)
            case Mean():
                new = self._mean(site)
            case Resample():
                new = self._resampled(site)
        return self._as_change(site, new) if isinstance(site, Embed | PosEmbed) else new

    def _as_change(self, site: Address, new: Fill) -> Fill:
        """Embeddings are replaced in the sum they start: the engine is given new - old."""
        own = _values(self.run, site)

        def change(rows: slice, index: Tensor) -> Tensor:
            return new(rows, index) - take(own[rows].to(index.device), index)

        return change

    def _zeros(self, site: Address) -> Fill:
        view = self.run.view
        shape = _shape(view, site)

        def zeros(rows: slice, index: Tensor) -> Tensor:
            size = (index.shape[0], index.shape[1], *shape)
            if isinstance(site, HeadNode) and site.which == "pattern":
                width = max(self.run.prompts.lengths[rows])
                size = (index.shape[0], index.shape[1], width)
            return torch.zeros(size, dtype=view.dtype, device=index.device)

        return zeros

    def _mean(self, site: Address) -> Fill:
        mean = self.means[site]
        by_position = isinstance(self.kind, Mean) and self.kind.over == ("batch",)
        by_position = by_position and isinstance(self.kind, Mean) and self.kind.at is None

        def fill(rows: slice, index: Tensor) -> Tensor:
            value = mean.to(index.device)
            if isinstance(site, AttnBias | MLPBias):
                return value.expand(*index.shape, -1)
            if by_position:
                return value[index.clamp_min(0)]
            return value.expand(*index.shape, *value.shape)

        return fill

    def _resampled(self, site: Address) -> Fill:
        assert isinstance(self.kind, Resample) and self.partner is not None
        source, partner = self.kind.source, self.partner
        values = _values(source, site)
        is_pattern = isinstance(site, HeadNode) and site.which == "pattern"

        def fill(rows: slice, index: Tensor) -> Tensor:
            if isinstance(site, AttnBias | MLPBias):
                return values[0].to(index.device).expand(*index.shape, -1)
            found = take(values[partner[rows].to(values.device)].to(index.device), index)
            return found[..., : max(self.run.prompts.lengths[rows])] if is_pattern else found

        return fill


def _shape(view: ModelView, site: Address) -> tuple[int, ...]:
    match site:
        case Neuron():
            return ()
        case Head() | HeadInput() | HeadNode():
            return (view.W_O(site.layer).shape[1],)
        case _:
            return (view.d_model,)


def _values(run: Run, site: Address) -> Tensor:
    """A site's own values in a run [batch, pos, ...]."""
    if isinstance(site, Embed):
        start = run.fetch(Stream(0, "pre"))
        return start - run.fetch(PosEmbed()) if run.view.has_pos_embed else start
    if isinstance(site, Stream) and site.place == "mid":
        return run.fetch(Stream(site.layer, "pre")) + run.fetch(Attn(site.layer))
    name = clean_hook(site)
    return site_value(run.view, site, None if name is None else run.fetch(site))


def _fetched_sites(view: ModelView, sites: Iterable[Address]) -> list[Address]:
    found: list[Address] = []
    for site in sites:
        if isinstance(site, Embed):
            found.append(Stream(0, "pre"))
            found += [PosEmbed()] if view.has_pos_embed else []
        elif isinstance(site, Stream) and site.place == "mid":
            found += [Stream(site.layer, "pre"), Attn(site.layer)]
        elif clean_hook(site) is not None:
            found.append(site)
    return found


def _prefetch(run: Run, sites: Iterable[Address]) -> None:
    run.fetch_all(_fetched_sites(run.view, sites))


def _require_same_model(run: Run, other: Run, name: str) -> None:
    if other.view.model is not run.view.model:
        raise AblationError(
            f"the {name} is a run of {other.view.name} ({other.view.kind}), another model object "
            f"than the run's {run.view.name} ({run.view.kind}); capture both on the same model"
        )


def _partners(run: Run, kind: Resample) -> Tensor:
    """For each row of the run, the row of the source it takes its values from."""
    ours, theirs = run.prompts.lengths, kind.source.prompts.lengths
    if kind.pairing == "rowwise":
        if len(ours) != len(theirs):
            raise PromptError(
                f"pairing='rowwise' needs as many prompts in the source ({len(theirs)}) as in the "
                f"run ({len(ours)})"
            )
        for row, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if a != b:
                raise PromptError(
                    f"prompt {row} has {a} tokens, its source {b}; resampling pairs positions, so "
                    "both need the same length"
                )
        return torch.arange(len(ours))
    assert kind.seed is not None
    return _derangement(run, kind.source, kind.seed)


def _derangement(run: Run, source: Run, seed: int) -> Tensor:
    """A seeded draw of source rows: of the same length, and never a row's own prompt."""
    generator = torch.Generator().manual_seed(seed)
    ours, theirs = _rows_as_tuples(run), _rows_as_tuples(source)
    order = torch.randperm(len(theirs), generator=generator).tolist()
    used = dict.fromkeys(range(len(theirs)), 0)
    chosen = []
    for row, tokens in enumerate(ours):
        fits = [
            other
            for other in order
            if len(theirs[other]) == len(tokens)
            and theirs[other] != tokens
            and not (source is run and other == row)
        ]
        if not fits:
            lengths = sorted({len(other) for other in theirs})
            raise PromptError(
                f"prompt {row} ({len(tokens)} tokens) has no other prompt of its length in the "
                f"source (lengths {lengths}) to be resampled from"
            )
        pick = min(fits, key=lambda other: used[other])
        used[pick] += 1
        chosen.append(pick)
    return torch.tensor(chosen)


def _rows_as_tuples(run: Run) -> list[tuple[int, ...]]:
    prompts = run.prompts
    rows = zip(prompts.tokens.tolist(), prompts.lengths, strict=True)
    return [tuple(row[:length]) for row, length in rows]


def _means(kind: Mean, sites: list[Address]) -> dict[Address, Tensor]:
    """The mean of every site over the reference, streamed: nothing of it is kept."""
    run, view = kind.reference, kind.reference.view
    where = run.locate(kind.at)
    by_position = kind.over == ("batch",) and kind.at is None
    sums: dict[str, Tensor] = {}
    counts = where.valid.sum(0) if by_position else where.valid.sum()

    def adder(name: str) -> Callable[[Tensor, slice], None]:
        is_pattern = any(
            isinstance(s, HeadNode) and s.which == "pattern" and hook_name(s) == name for s in sites
        )

        def add(activation: Tensor, rows: slice) -> None:
            if is_pattern:  # [rows, head, query, key] -> [rows, query, head, key]
                activation = activation.transpose(1, 2)
            taken = where.take(activation.to(view.compute_dtype), rows)
            real = where.valid[rows].to(taken.device)
            taken = taken * real.reshape(*real.shape, *[1] * (taken.ndim - 2))
            part = taken.sum(0) if by_position else taken.sum((0, 1))
            sums[name] = sums[name] + part if name in sums else part

        return add

    names = {hook_name(site) for site in _fetched_sites(view, sites)}
    if names:
        run.sweep({name: adder(name) for name in names})
    divide = counts.clamp_min(1)
    means = {}
    for name, total in sums.items():
        shape = (-1, *[1] * (total.ndim - 1)) if by_position else ()
        means[name] = (total / divide.reshape(shape).to(total.device)).to(view.dtype)
    return {site: _mean_of(view, site, means, by_position) for site in sites}


def _mean_of(view: ModelView, site: Address, means: dict[str, Tensor], by_position: bool) -> Tensor:
    """A site's mean [pos, ...] or [...], from the means of hooks."""
    if isinstance(site, AttnBias | MLPBias):
        return site_value(view, site, None)[0, 0]
    if isinstance(site, Embed):
        start = means[hook_name(Stream(0, "pre"))]
        return start - means[hook_name(PosEmbed())] if view.has_pos_embed else start
    if isinstance(site, Stream) and site.place == "mid":
        return means[hook_name(Stream(site.layer, "pre"))] + means[hook_name(Attn(site.layer))]
    mean = means[hook_name(site)]
    if isinstance(site, HeadNode) and site.which == "pattern":
        return mean[..., site.head, :]
    whole = mean[None] if by_position else mean[None, None]
    value = site_value(view, site, whole)
    return value[0] if by_position else value[0, 0]
