"""The new values of targets under each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from resid_patching.ablation.kinds import Mean, Resample, Source, Zero
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
)
from resid_patching.errors import AblationError, NotFiniteError, PromptError
from resid_patching.models import ModelView, name_of, remedy, take
from resid_patching.rerun import Fill, clean_hook, site_value
from resid_patching.run import Run


class Fills:
    """The new values of every site under one kind."""

    def __init__(self, run: Run, kind: Source, sites: list[Address]) -> None:
        self.run, self.kind = run, kind
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
        if embeddings := [site for site in sites if isinstance(site, Embed | PosEmbed)]:
            _prefetch(run, embeddings)

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
        values = _require_finite_fill(_values(source, site), site, source.view)
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
            return (view.d_head(site.layer),)
        case _:
            return (view.d_model,)


def _require_finite_fill(values: Tensor, site: Address, view: ModelView) -> Tensor:
    """The values that a site is given, where they are numbers."""
    if not bool(values.isfinite().all()):
        raise NotFiniteError(
            f"the values that {site} is to be given are NaN or infinite in {name_of(view.dtype)}. "
            f"{remedy(view.dtype)}"
        )
    return values


def _values(run: Run, site: Address) -> Tensor:
    """A site's own values in a run [batch, pos, ...]."""
    if isinstance(site, Embed):
        start = run.fetched(Stream(0, "pre")).to(run.view.compute_dtype)
        return start - run.fetched(PosEmbed()) if run.view.has_pos_embed else start
    if isinstance(site, Stream) and site.place == "mid":
        return run.fetched(Stream(site.layer, "pre")) + run.fetched(Attn(site.layer))
    name = clean_hook(site)
    return site_value(run.view, site, None if name is None else run.fetched(site))


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
    other.view.require_unchanged()


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
        return torch.arange(len(ours), device="cpu")
    assert kind.seed is not None
    return _derangement(run, kind.source, kind.seed)


def _derangement(run: Run, source: Run, seed: int) -> Tensor:
    """A seeded draw of source rows: of the same length, and never a row's own prompt."""
    generator = torch.Generator().manual_seed(seed)
    ours, theirs = _rows_as_tuples(run), _rows_as_tuples(source)
    order = torch.randperm(len(theirs), generator=generator, device="cpu").tolist()
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
    return torch.tensor(chosen, device="cpu")


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
    return {
        site: _require_finite_fill(_mean_of(view, site, means, by_position), site, view)
        for site in sites
    }


def _mean_of(view: ModelView, site: Address, means: dict[str, Tensor], by_position: bool) -> Tensor:
    """A site's mean [pos, ...] or [...], from the means of hooks."""
    if isinstance(site, AttnBias | MLPBias):
        return site_value(view, site, None)[0, 0]
    if isinstance(site, Embed):
        start = means[hook_name(Stream(0, "pre"))].to(view.compute_dtype)
        return start - means[hook_name(PosEmbed())] if view.has_pos_embed else start
    if isinstance(site, Stream) and site.place == "mid":
        return means[hook_name(Stream(site.layer, "pre"))] + means[hook_name(Attn(site.layer))]
    mean = means[hook_name(site)]
    if isinstance(site, HeadNode) and site.which == "pattern":
        return mean[..., site.head, :]
    whole = mean[None] if by_position else mean[None, None]
    value = site_value(view, site, whole)
    return value[0] if by_position else value[0, 0]
