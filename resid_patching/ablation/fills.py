"""The new values of targets under each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from resid_patching.ablation.attending import Attention, between
from resid_patching.ablation.kinds import Mean, Resample, Source, Zero
from resid_patching.ablation.targets import Target, site_of
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
from resid_patching.errors import AblationError, NotFiniteError, PositionError, PromptError
from resid_patching.models import ModelView, name_of, remedy, take
from resid_patching.prompts import PositionIndex
from resid_patching.rerun import Fill, clean_hook, site_value
from resid_patching.run import Run


class Fills:
    """The new values of every target under one kind.

    Args:
        run: the run that is changed.
        kind: what targets are replaced with.
        targets: all of them.
        replaced: the positions that are replaced, which `at=` pairs with others.
    """

    def __init__(
        self, run: Run, kind: Source, targets: Sequence[Target], replaced: PositionIndex
    ) -> None:
        self.run, self.kind = run, kind
        self.partner: Tensor | None = None
        self.means: dict[Address, Tensor] = {}
        # What stands for each position of the run [batch, pos]: a position of the source, or an
        # element of the mean. None where positions stand for themselves.
        self.paired: Tensor | None = None
        sites = list(dict.fromkeys(map(site_of, targets)))
        self.patterns = [s for s in sites if isinstance(s, HeadNode) and s.which == "pattern"]
        if isinstance(kind, Mean):
            _require_same_model(run, kind.reference, "reference")
            self._require_alignment(kind)
            self.means = _means(kind, sites)
            if kind.at is not None:
                _require_no_pattern([t for t in targets if isinstance(t, Attention)])
            if kind.at is not None and keeps_position(kind):
                self.paired = _paired(run, replaced, _elements(run, kind))
        if isinstance(kind, Resample):
            _require_same_model(run, kind.source, "source")
            self.partner = _partners(run, kind)
            if kind.at is not None:
                _require_no_pattern(self.patterns)
                self.paired = _paired(run, replaced, kind.source.prompts.locate_spans(kind.at))
            _prefetch(kind.source, sites)
        own = [site for site in sites if isinstance(site, Embed | PosEmbed)]
        _prefetch(run, [*own, *(t.node for t in targets if isinstance(t, Attention))])

    def _require_alignment(self, kind: Mean) -> None:
        """A mean that keeps position needs prompts whose positions mean the same."""
        keeps = kind.over == ("batch",) and kind.at is None
        lengths = set(self.run.prompts.lengths) | set(kind.reference.prompts.lengths)
        if len(lengths) > 1 and (keeps or self.patterns):
            ours, theirs = (
                sorted(set(self.run.prompts.lengths)),
                sorted(set(kind.reference.prompts.lengths)),
            )
            raise PromptError(
                f"a mean that keeps position needs prompts of one length; the run has {ours} "
                f"tokens, the reference {theirs}. Use over=('batch', 'pos'), or name the "
                "reference's positions with at=."
            )
        if self.patterns and "pos" in kind.over:
            raise AblationError(
                f"{self.patterns[0]}: a pattern's rows attend to different numbers of positions, "
                "so their mean over positions means nothing; use over=('batch',)"
            )

    def fill(self, target: Target) -> Fill:
        """The function that gives a target's new values; of embeddings, new - old."""
        if isinstance(target, Attention):
            return between(self.run, target, self.fill(target.node))
        new = self.value(target)
        return self._as_change(target, new) if isinstance(target, Embed | PosEmbed) else new

    def value(self, site: Address) -> Fill:
        """The function that gives a site's new values."""
        match self.kind:
            case Zero():
                return self._zeros(site)
            case Mean():
                return self._mean(site)
            case Resample():
                return self._resampled(site)

    def _places(self, rows: slice, index: Tensor) -> Tensor:
        """Where what stands for some positions is found, in the source or among a mean's."""
        index = index.clamp_min(0)
        return index if self.paired is None else self.paired[rows].to(index).gather(1, index)

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
        assert isinstance(self.kind, Mean)
        mean, by_place = self.means[site], keeps_position(self.kind)

        def fill(rows: slice, index: Tensor) -> Tensor:
            value = mean.to(index.device)
            if isinstance(site, AttnBias | MLPBias):
                return value.expand(*index.shape, -1)
            if by_place:
                return value[self._places(rows, index)]
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
            places = self._places(rows, index)
            found = take(values[partner[rows].to(values.device)].to(index.device), places)
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
            if a != b and kind.at is None:
                raise PromptError(
                    f"prompt {row} has {a} tokens, its source {b}; resampling pairs positions, so "
                    "both need the same length, or name the source's positions with at="
                )
        return torch.arange(len(ours), device="cpu")
    assert kind.seed is not None
    return _derangement(run, kind.source, kind.seed)


def _require_no_pattern(patterns: Sequence[Target]) -> None:
    """Raises AblationError where rows of a pattern would come from other positions."""
    if patterns:
        raise AblationError(
            f"{patterns[0]}: a query weighs the positions of its own prompt, so what other queries "
            "weigh cannot take its place; leave out at="
        )


def keeps_position(kind: Mean) -> bool:
    """Whether there is a mean for each position, or for each element of the named spans."""
    if kind.over != ("batch",):
        return False
    return kind.at is None or kind.reference.prompts.locate_spans(kind.at).index.shape[1] > 1


def _elements(run: Run, kind: Mean) -> PositionIndex:
    """The elements of a mean over spans of one length, for each prompt of the run."""
    where = kind.reference.prompts.locate_spans(kind.at)
    if not bool(where.valid.all()):
        sizes = where.valid.sum(1)
        raise PositionError(
            f"Mean: the spans of the reference hold {int(sizes.min())} to {int(sizes.max())} "
            "positions; a mean for each of them, over=('batch',), needs spans of one length. Use "
            "over=('batch', 'pos') for one mean of all"
        )
    n = torch.arange(where.index.shape[1], device=where.index.device)
    return PositionIndex(n.expand(len(run), -1))


def _paired(run: Run, replaced: PositionIndex, other: PositionIndex) -> Tensor:
    """For each replaced position [batch, pos], what stands for it.

    Raises:
        PositionError: there are not as many of these as of those.
    """
    counts = zip(replaced.valid.sum(1).tolist(), other.valid.sum(1).tolist(), strict=True)
    for prompt, (n, m) in enumerate(counts):
        if n != m:
            raise PositionError(
                f"prompt {prompt}: {n} positions are replaced, but at= names {m} in their place; "
                "name one for each, in the same order"
            )
    table = torch.zeros(
        len(run), max(run.prompts.lengths), dtype=torch.long, device=replaced.index.device
    )
    prompt, column = replaced.valid.nonzero(as_tuple=True)
    table[prompt, replaced.index[prompt, column]] = other.index[prompt, column].to(table)
    return table


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
    where = run.prompts.locate_spans(kind.at)
    by_position = keeps_position(kind)
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
