"""Run: a model, its prompts, and activations fetched when an analysis asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from resid_patching.address import (
    MLP,
    Address,
    Attn,
    Head,
    HeadInput,
    Neuron,
    PosEmbed,
    Stream,
    hook_name,
    is_by_position,
)
from resid_patching.continuation import Continuation, chooser
from resid_patching.errors import CacheMismatchError, PromptError
from resid_patching.models import (
    TOLERANCE,
    HookFunction,
    Model,
    ModelView,
    as_view,
    exact,
    require,
)
from resid_patching.prompts import PositionIndex, Positions, PromptLike, Prompts, prepare

RowReader = Callable[[Tensor, slice], None]
"""Called with an activation [rows, pos, ...] and which rows of the batch these are."""

DEFAULT_MAX_BYTES = 2**30


@runtime_checkable
class CacheLike(Protocol):
    """What is read of a caller's cache: a dict, or TransformerLens's ActivationCache."""

    def items(self) -> Iterable[tuple[str, Any]]:
        """Hook names and activations."""
        ...


@runtime_checkable
class Intervention(Protocol):
    """What is replaced whenever a run's model runs, as `rp.ablated` makes it."""

    @property
    def sites(self) -> tuple[Address, ...]:
        """What is replaced."""
        ...

    def __str__(self) -> str: ...

    def hooks(self, rows: slice, width: int | None = None) -> dict[str, HookFunction]:
        """The functions that replace it, by hook.

        Args:
            rows: which prompts of the batch run.
            width: tokens of each where they were continued beyond the prompts; else None.
        """
        ...

    def holds(self, site: Address, where: PositionIndex) -> Bool[Tensor, "batch n"]:
        """At which positions a site itself is replaced."""
        ...

    def digest(self) -> str:
        """A hash of what is replaced where, and with which values."""
        ...


@dataclass(frozen=True, eq=False)
class Run:
    """Prompts on a model at one moment.

    Everything is computed with the model as it was when the run was captured. If the model has
    changed since, a call that needs more of it raises ModelChangedError. Do not change the tensors
    that a Run returns: it keeps them.

    Attributes:
        view: the model.
        prompts: the prompts.
        max_bytes: bound on what one chunk of prompts holds at a time.
        cache: activations the caller already had, by hook name, in our row layout; else None.
        intervention: what is replaced in every pass, from `rp.ablated`; else None.
        held_readouts: rows whose logits, as we read them, were held to the model's own.
    """

    view: ModelView
    prompts: Prompts
    max_bytes: int = DEFAULT_MAX_BYTES
    cache: Mapping[str, Tensor] | None = None
    intervention: Intervention | None = None
    _kept: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _own: dict[str, Tensor] = field(default_factory=dict, repr=False)
    held_readouts: set[tuple[int, ...]] = field(default_factory=set, repr=False)

    def __repr__(self) -> str:
        under = "" if self.intervention is None else f", under {self.intervention}"
        return f"Run({self.view.name}, {self.view.kind}, {self.prompts!r}{under})"

    def __len__(self) -> int:
        return len(self.prompts)

    def sweep(
        self,
        readers: Mapping[str, RowReader],
        *,
        logits: RowReader | None = None,
        raw_logits: RowReader | None = None,
        at: PositionIndex | None = None,
    ) -> None:
        """Runs the prompts in chunks and hands each reader its activation as it appears.

        Nothing is kept but what the readers keep. Activations of a cache the caller gave are
        read from there; logits always come from the model.

        Args:
            readers: hook name -> called with ([rows, pos, ...], rows).
            logits: called with the model's logits [rows, n, d_vocab].
            raw_logits: the same before any output softcap.
            at: the positions of the logits; None for all.

        Raises:
            ModelChangedError: the model computes otherwise than when the run was captured.
            CacheMismatchError: the caller's cache lacks a hook that is needed, or is not the
                model's own on these prompts.
        """
        self.view.require_unchanged()
        if self.cache is not None:
            self._read_cache(readers)
            readers = {}
            if logits is None and raw_logits is None:
                return
        for rows in self.chunks():
            width = max(self.prompts.lengths[rows])
            tokens = self.prompts.tokens[rows, :width]
            bound = {name: _bind(reader, rows) for name, reader in readers.items()}
            bound = self.hooked(bound, rows)
            if logits is None and raw_logits is None:
                self.view.forward_blocks(tokens, bound)
                continue
            raw = None if raw_logits is None else _bind(raw_logits, rows)
            index = None if at is None else at.index[rows]
            output = self.view.forward(tokens, bound, logits=raw, at=index)
            if logits is not None:
                logits(output, rows)

    def hooked(
        self, functions: Mapping[str, HookFunction], rows: slice, width: int | None = None
    ) -> dict[str, HookFunction]:
        """Functions for a pass, each behind what the run's intervention does at its hook.

        Args:
            functions: hook name -> callable.
            rows: which prompts of the batch run.
            width: as in `Intervention.hooks`.
        """
        if self.intervention is None:
            return dict(functions)
        first = self.intervention.hooks(rows, width)
        behind = {name: _behind(first.get(name), last) for name, last in functions.items()}
        return first | behind

    def chunks(self) -> Iterator[slice]:
        """Slices of the batch whose forward pass stays within `max_bytes`."""
        view = self.view
        token_bytes = view.W_U.element_size() * (view.W_U.shape[1] + 16 * view.d_model)
        return self.prompts.chunks(self.max_bytes // token_bytes, view.length_class)

    def fetch(self, address: Address) -> Float[Tensor, "batch pos ..."]:
        """The activation at an address for all prompts, kept for the next time.

        Positions behind a row's last token hold zeros. Heads are the whole `hook_z`, neurons the
        whole `hook_post` of the layer, patterns [batch, head, query, key]. The tensor is the Run's
        own: clone before any change.
        """
        self.fetch_all([address])
        return self.fetched(address)

    def fetched(self, address: Address) -> Float[Tensor, "batch pos ..."]:
        """An activation that `fetch_all` has just fetched, without checking the model again."""
        return self._kept[hook_name(address)]

    def fetch_all(self, addresses: Iterable[Address]) -> None:
        """Fetches several activations in one pass; `fetch` then gives them.

        Raises:
            ModelChangedError: the model computes otherwise than when the run was captured.
        """
        if self._kept:
            self.view.require_unchanged(whole=True)
            if self.view.user_hooks():  # what they do may depend on anything
                self._kept.clear()
        names = {hook_name(address) for address in addresses} - set(self._kept)
        parts: dict[str, list[Tensor]] = {name: [] for name in names}

        def keeper(name: str) -> RowReader:
            return lambda tensor, rows: parts[name].append(tensor.detach().clone())

        if names:
            self.sweep({name: keeper(name) for name in names})
        for name in names:
            self._kept[name] = self._lay_out(parts[name], is_by_position(name))

    @property
    def own_final(self) -> Float[Tensor, "batch pos d_model"]:
        """The last stream state of a pass of the model itself, whatever the cache holds."""
        self.require_own_cache()
        return self._own[_last(self.view)]

    def require_own_cache(self) -> None:
        """Compares the caller's cache with a pass of the model, before its first use.

        Raises:
            CacheMismatchError: an activation is not the model's own on these prompts.
        """
        if self.cache is None or self._own:
            return
        own, last = Run(self.view, self.prompts, self.max_bytes), _last(self.view)
        kept: list[Tensor] = []

        def keep(tensor: Tensor, rows: slice) -> None:
            kept.append(tensor.detach().clone())

        held = [name for name in _readable(self.view) if name in self.cache]
        readers = {name: partial(self._compare_cache, name) for name in held}
        own.sweep({**readers, last: keep})
        self._own[last] = self._lay_out(kept, True)
        if last in readers:
            readers[last](self._own[last], slice(0, len(self)))

    def _compare_cache(self, name: str, tensor: Tensor, rows: slice) -> None:
        assert self.cache is not None
        theirs = self.cache[name] if len(self.cache[name]) == 1 else self.cache[name][rows]
        theirs = theirs[:, : tensor.shape[1]].to(tensor.device, tensor.dtype).expand_as(tensor)
        where = self.prompts.mask[rows, : tensor.shape[1]].to(tensor.device)
        tensor, theirs = (t[where[: len(t)]] for t in (tensor, theirs))
        error = (tensor - theirs).abs().amax()
        if not error <= TOLERANCE[tensor.dtype] * tensor.abs().amax():
            raise CacheMismatchError(
                f"the cache's {name} differs from the model's own by {float(error):.1e} in prompts "
                f"{rows.start} to {rows.stop - 1}: the cache was made from other prompts, or by "
                "another model or under other hooks. Make it anew, or capture without one."
            )

    def _lay_out(self, parts: list[Tensor], by_position: bool) -> Tensor:
        if len(parts[0]) == 1 and len(self) > 1 and len(parts) == 1:
            parts = [parts[0].expand(len(self), *parts[0].shape[1:])]
        width = self.prompts.tokens.shape[1]
        if not by_position:
            return self._lay_out_patterns(parts, width)
        full = parts[0].new_zeros(len(self), width, *parts[0].shape[2:])
        start = 0
        for part in parts:
            full[start : start + len(part), : part.shape[1]] = part
            start += len(part)
        full[~self.prompts.mask.to(full.device)] = 0
        return full

    def _lay_out_patterns(self, parts: list[Tensor], width: int) -> Tensor:
        full = parts[0].new_zeros(len(self), parts[0].shape[1], width, width)
        start = 0
        for part in parts:
            size = part.shape[-1]
            full[start : start + len(part), :, :size, :size] = part
            start += len(part)
        real = self.prompts.mask.to(full.device)
        return full * (real[:, None, :, None] & real[:, None, None, :])

    def logits_at(self, positions: Positions = -1) -> Float[Tensor, "batch n d_vocab"]:
        """The model's logits at chosen positions.

        Args:
            positions: one for all rows, one for each row, or None for all.

        Returns:
            [batch, n, d_vocab]; NaN where a row has no such position.

        Raises:
            PositionError: a row has no such position.
        """
        where = self.locate(positions)
        parts: list[Tensor] = []

        def keep(tensor: Tensor, rows: slice) -> None:
            parts.append(where.take(tensor, rows).clone())

        self.sweep({}, logits=keep)  # of the whole pass, so that they are the model's to the bit
        found = torch.cat(parts)
        found[~where.valid.to(found.device)] = torch.nan
        return found

    @exact()
    def generate(
        self, n: int, *, seed: int | None = None, temperature: float | None = None
    ) -> Continuation:
        """Writes on: what the model says behind each prompt, under the run's intervention.

        Each token comes from a whole pass of the prompt and what was written so far. Where an
        intervention is at all positions and puts the same value at each, as `Zero()` and a mean
        over batch and positions do, it acts on the new tokens too; any other acts on the prompt's
        own positions alone. Nothing stops early: a token that ends a text is one of the n.

        Args:
            n: tokens to write behind each prompt.
            seed: of the draws, one prompt after another; None takes the most probable token.
            temperature: divides the logits before a draw; None is 1. Needs a seed.

        Raises:
            PromptError: prompt and continuation are longer than the model's context.
            ModelChangedError: the model computes otherwise than when the run was captured.
            ValueError: n is no whole number from 1, or a temperature is not above 0 or has no seed.
        """
        choose = chooser(n, seed, temperature)
        view, prompts = self.view, self.prompts
        if (longest := max(prompts.lengths) + n) > view.n_ctx:
            raise PromptError(
                f"prompt and continuation have up to {longest} tokens, but {view.name} reads at "
                f"most {view.n_ctx}; write fewer"
            )
        view.require_unchanged()
        written = []
        for row, length in enumerate(prompts.lengths):
            tokens, rows = prompts.tokens[row : row + 1, :length], slice(row, row + 1)
            for width in range(length, length + n):
                last = torch.tensor([[width - 1]], device=tokens.device)
                logits = view.forward(tokens, self.hooked({}, rows, width), at=last)
                new = choose(logits[0, 0]).to(tokens.device)
                tokens = torch.cat([tokens, new.expand(1, 1)], 1)
            written.append(tokens[0, length:])
        under = "" if self.intervention is None else str(self.intervention)
        return Continuation.of(view.tokenizer, torch.stack(written), under)

    def locate(self, positions: Positions) -> PositionIndex:
        """Finds positions in every prompt; see `Prompts.locate`."""
        return self.prompts.locate(positions)

    def _read_cache(self, readers: Mapping[str, RowReader]) -> None:
        assert self.cache is not None
        if missing := [name for name in readers if name not in self.cache]:
            raise CacheMismatchError(
                f"the cache lacks {', '.join(missing[:4])}{' …' if len(missing) > 4 else ''}, "
                "which this analysis reads. Cache everything, or capture without a cache."
            )
        self.require_own_cache()
        for name, reader in readers.items():
            reader(self.cache[name], slice(0, len(self)))


def capture(
    model: Model,
    prompts: PromptLike | Prompts,
    *,
    prepend_bos: bool | None = None,
    mask: Tensor | None = None,
    cache: CacheLike | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Run:
    """Binds prompts to a model; activations are fetched when an analysis asks for them.

    Args:
        model: a HookedTransformer or TransformerBridge, raw or processed.
        prompts: a text, texts of any lengths, token ids (1-D or 2-D), or `rp.windows(...)`.
        prepend_bos: whether texts get the beginning-of-sequence token; None does what the
            model's own `to_tokens` does. Never put twice.
        mask: for a 2-D tensor of ids, 1 where a token is real. Without it, pad tokens at one end
            of a batch's rows are left out, with a warning.
        cache: what `model.run_with_cache(prompts)` gave for the same ids, to be read instead of
            running again. Its tensors are not changed.
        max_bytes: bound on what one chunk of prompts holds at a time.

    Raises:
        PromptError: empty, too long, ids outside the vocabulary, or pad tokens of which it cannot
            be known whether they are padding; before the model runs.
        TrainingModeError, StreamMismatchError, ReadoutMismatchError: the model cannot be read.
        CacheMismatchError: the cache belongs to other prompts or another model.
    """
    view = as_view(model)
    ready = prepare(view, prompts, prepend_bos=prepend_bos, mask=mask)
    require(view, "stream", "readout")
    laid_out = None if cache is None else _realign(view, ready, cache, prompts)
    return Run(view, ready, max_bytes, laid_out)


def _last(view: ModelView) -> str:
    return hook_name(Stream(view.n_layers - 1, "post"))


def _readable(view: ModelView) -> list[str]:
    """Names of the activations by position that any analysis reads."""
    found = [hook_name(PosEmbed())]
    for layer in range(view.n_layers):
        parts = (Attn(layer), MLP(layer), Head(layer, 0), Neuron(layer, 0))
        states = [Stream(layer, "pre"), Stream(layer, "mid"), Stream(layer, "post")]
        inputs = [HeadInput(layer, 0, "q"), HeadInput(layer, 0, "k"), HeadInput(layer, 0, "v")]
        found += [hook_name(address) for address in (*parts, *states, *inputs)]
    return found


def _bind(reader: RowReader, rows: slice) -> Callable[[Tensor], None]:
    return lambda tensor: reader(tensor.detach(), rows)


def _behind(first: HookFunction | None, last: HookFunction) -> HookFunction:
    """Both functions of one hook, in this order."""
    if first is None:
        return last

    def both(activation: Tensor) -> Tensor | None:
        put = first(activation)
        changed = last(activation if put is None else put)
        return put if changed is None else changed

    return both


def _realign(view: ModelView, prompts: Prompts, cache: CacheLike, given: Any) -> dict[str, Tensor]:
    """The caller's cache with each row moved to begin at position 0."""
    width = given.shape[-1] if isinstance(given, Tensor) else prompts.tokens.shape[1]
    has_batch = getattr(cache, "has_batch_dim", True)
    aligned: dict[str, Tensor] = {}
    for name, tensor in cache.items():
        if not isinstance(tensor, Tensor) or not is_by_position(name):
            continue
        if not has_batch:
            tensor = tensor[None]
        if tensor.ndim < 3:
            continue
        batch_fits = tensor.shape[0] in (1, len(prompts))
        if not batch_fits or tensor.shape[1] != width:
            raise _other_shape(name, tensor, prompts, width)
        if tensor.device != view.device and getattr(view.cfg, "n_devices", 1) == 1:
            tensor = tensor.to(view.device)
        aligned[name] = _shift(tensor, prompts.starts)
    found = _with_aliases(view, aligned)
    start = hook_name(Stream(0, "pre"))  # one row may stand for all in what no prompt changes
    if start in found and len(found[start]) != len(prompts):
        raise _other_shape(start, found[start], prompts, width)
    return found


def _other_shape(name: str, tensor: Tensor, prompts: Prompts, width: int) -> CacheMismatchError:
    return CacheMismatchError(
        f"the cache holds {name} as {tuple(tensor.shape)}, but the prompts are {len(prompts)} rows "
        f"of {width} tokens; pass the ids that the cache was made from, batch axis included"
    )


def _shift(tensor: Tensor, starts: tuple[int, ...]) -> Tensor:
    if not any(starts):
        return tensor
    if tensor.shape[0] == 1:
        tensor = tensor.expand(len(starts), *tensor.shape[1:])
    return torch.stack([row.roll(-start, 0) for row, start in zip(tensor, starts, strict=True)])


def _with_aliases(view: ModelView, cache: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adds the names that TransformerBridge caches under its own spelling."""
    points = view.hook_points
    by_point = {id(points[name]): tensor for name, tensor in cache.items() if name in points}
    aliases = {name: by_point[id(p)] for name, p in points.items() if id(p) in by_point}
    return {**aliases, **cache}
