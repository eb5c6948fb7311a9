"""States of the stream and the model's own logits, one chunk of prompts at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from resid_patching.address import Address, Stream, hook_name
from resid_patching.errors import CacheMismatchError, ReadoutMismatchError
from resid_patching.lens.unembed import Unembedding
from resid_patching.models import TOLERANCE, ModelView, exact, require_finite_at
from resid_patching.run import Run

_CHECKED = 4


@dataclass(frozen=True, eq=False)
class StateChunk:
    """What one forward pass gave.

    Attributes:
        rows: which prompts these are.
        states: one for each address [rows * width, d_model].
        final: the model's logits, as it returned them [rows * width, d_vocab].
        real: where in those rows the real tokens are, in order.
        width: positions of a row.
    """

    rows: slice
    states: tuple[Float[Tensor, "cells d_model"], ...]
    final: Float[Tensor, "cells d_vocab"]
    real: Int[Tensor, " real"]
    width: int

    @property
    def bytes(self) -> int:
        """What it takes to keep."""
        tensors = (*self.states, self.final)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def blocks(self, size: int) -> Iterator[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        """Blocks of real tokens: where they are, and what takes them out of a tensor of cells."""
        for where in self.real.split(size):
            yield where, _taker(where)


def _taker(where: Tensor) -> Callable[[Tensor], Tensor]:
    first, last = int(where[0]), int(where[-1])
    if last - first + 1 == len(where):
        return lambda cells: cells[first : last + 1]  # a view: the logits are large
    return lambda cells: cells[where.to(cells.device)]


def last_state(view: ModelView) -> Stream:
    """The stream after the last block."""
    return Stream(view.n_layers - 1, "post")


def chunks_of(run: Run, addresses: Sequence[Address]) -> Iterator[slice]:
    """Slices of the batch for which states and logits take a sixteenth of the run's bound."""
    view = run.view
    a_token = view.W_U.shape[1] + (16 + len(addresses)) * view.d_model
    limit = run.max_bytes // 16 // (a_token * view.W_U.element_size())
    return run.prompts.chunks(limit, view.length_class)


@exact()
def read_chunk(run: Run, addresses: Sequence[Address], rows: slice) -> StateChunk:
    """Runs some prompts and takes the states at the addresses and the model's logits.

    Raises:
        CacheMismatchError: the caller's cache lacks a hook that is needed.
        NotFiniteError: the model's last state or logits are NaN or infinite.
        ReadoutMismatchError: final norm and unembedding of the last state are not the model's
            logits, as with a hook that edits them.
    """
    view, prompts = run.view, run.prompts
    width = max(prompts.lengths[rows])
    wanted = list(dict.fromkeys([*addresses, last_state(view)]))
    held: dict[Address, Tensor] = {}
    readers = {hook_name(a): _keeper(held, a) for a in wanted} if run.cache is None else {}
    logits = view.forward(prompts.tokens[rows, :width], run.hooked(readers, rows))
    if run.cache is not None:
        run.require_own_cache()
        held = _from_cache(run, wanted, rows, width)
    count = len(prompts.lengths[rows])
    flat = {a: t.expand(count, *t.shape[1:]).flatten(0, 1) for a, t in held.items()}
    real = prompts.mask[rows, :width].flatten().nonzero().flatten().to(view.device)
    final = logits.flatten(0, 1)
    for what, cells in (("last state", flat[last_state(view)]), ("logits", final)):
        seen = cells.unflatten(0, (count, width))
        own = f"the model's own {what}"
        require_finite_at(seen, prompts.mask[rows, :width], view.dtype, own, first=rows.start)
    _require_readout(view, flat[last_state(view)], final, real)
    return StateChunk(rows, tuple(flat[a] for a in addresses), final, real, width)


def _keeper(held: dict[Address, Tensor], address: Address) -> Any:
    def keep(tensor: Tensor) -> None:
        # A copy: a caller's hook, or the model itself, may write into it later.
        held[address] = tensor.detach().clone()

    return keep


def _from_cache(
    run: Run, addresses: Sequence[Address], rows: slice, width: int
) -> dict[Address, Tensor]:
    assert run.cache is not None
    if missing := [str(a) for a in addresses if hook_name(a) not in run.cache]:
        raise CacheMismatchError(
            f"the cache lacks {', '.join(missing[:4])}{' …' if len(missing) > 4 else ''}, which "
            "this lens reads. Cache everything, or capture without a cache."
        )
    found = {a: run.cache[hook_name(a)] for a in addresses}
    return {a: (t if len(t) == 1 else t[rows])[:, :width].detach() for a, t in found.items()}


def _require_readout(view: ModelView, state: Tensor, final: Tensor, real: Tensor) -> None:
    """Our norm and unembedding give the model's logits at a few of the tokens."""
    where = real[:: max(1, len(real) // _CHECKED)][:_CHECKED]
    theirs = final[where.to(final.device)].to(view.compute_dtype)
    ours = Unembedding.of(view).logits(state[where.to(state.device)]).to(theirs.device)
    error = float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))
    if not error <= TOLERANCE[view.dtype]:
        raise ReadoutMismatchError(
            f"{view.name} ({view.kind}): final norm and unembedding of the last state differ from "
            f"the model's logits by {error:.1e} of their size (tolerance "
            f"{TOLERANCE[view.dtype]:.0e}), so the rows of a lens would not lead to its last. A "
            "cache of other prompts, or a hook that edits the logits, does this."
        )
