"""Run: a model, its prompts, and activations fetched when an analysis asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from resid_patching.address import Address, Stream, hook_name, is_by_position
from resid_patching.errors import CacheMismatchError
from resid_patching.models import ModelView, as_view, require
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


@dataclass(frozen=True, eq=False)
class Run:
    """Prompts on a model. What a Run fetched is never changed by anyone.

    Attributes:
        view: the model.
        prompts: the prompts.
        max_bytes: bound on what one chunk of prompts holds at a time.
        cache: activations the caller already had, by hook name, in our row layout; else None.
    """

    view: ModelView
    prompts: Prompts
    max_bytes: int = DEFAULT_MAX_BYTES
    cache: Mapping[str, Tensor] | None = None
    _kept: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _finals: dict[tuple[int, ...], Tensor] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        return f"Run({self.view.name}, {self.view.kind}, {self.prompts!r})"

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
            CacheMismatchError: the caller's cache lacks a hook that is needed.
        """
        if self.cache is not None:
            self._read_cache(readers)
            readers = {}
            if logits is None and raw_logits is None:
                return
        for rows in self.chunks():
            width = max(self.prompts.lengths[rows])
            tokens = self.prompts.tokens[rows, :width]
            bound = {name: _bind(reader, rows) for name, reader in readers.items()}
            if logits is None and raw_logits is None:
                self.view.forward_blocks(tokens, bound)
                continue
            raw = None if raw_logits is None else _bind(raw_logits, rows)
            index = None if at is None else at.index[rows]
            output = self.view.forward(tokens, bound, logits=raw, at=index)
            if logits is not None:
                logits(output, rows)

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
        return self._kept[hook_name(address)]

    def fetch_all(self, addresses: Iterable[Address]) -> None:
        """Fetches several activations in one pass; `fetch` then gives them."""
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
        """The last stream state of a pass of the model as it is now, whatever the cache holds."""
        mark = self.view.fingerprint()
        if mark not in self._finals:
            own = Run(self.view, self.prompts, self.max_bytes)
            self._finals.clear()
            self._finals[mark] = own.fetch(Stream(self.view.n_layers - 1, "post"))
        return self._finals[mark]

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
        for name, reader in readers.items():
            reader(self.cache[name], slice(0, len(self)))


def capture(
    model: Any,
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


def _bind(reader: RowReader, rows: slice) -> Callable[[Tensor], None]:
    return lambda tensor: reader(tensor.detach(), rows)


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
