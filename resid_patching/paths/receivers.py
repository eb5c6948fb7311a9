"""Receivers: where a path ends, one, several together, or alternatives side by side.

    "logits"                            one receiver
    ["9.9.q", "9.6.q", "10.0.q"]        several, written together
    receivers("10.0.q", "10.1.q")         alternatives, one column each

A write reaches a receiver when it is made before the receiver reads:

    q, k, v of a head       read the state before its layer
    mlp.6.in                reads the state in the middle of its layer (parallel blocks: before it)
    resid_pre|mid|post.6    that state
    logits                  read the last state
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from resid_patching.address import (
    MLP,
    RECEIVERS,
    SENDERS,
    Address,
    HeadInput,
    Logits,
    MLPIn,
    Receiver,
    Stream,
    parse,
    read_stage,
    write_stage,
)
from resid_patching.errors import AddressError, PathWarning, warn
from resid_patching.models import Model, ModelView, as_view
from resid_patching.rerun import Variant, require_site
from resid_patching.run import Run

ReceiverSet: TypeAlias = tuple[Receiver, ...]
Site: TypeAlias = HeadInput | MLP | Stream
"""Where what a receiver reads is put."""


@dataclass(frozen=True)
class Receivers:
    """Alternative ends of a path.

    Attributes:
        sets: the receivers of each alternative; those of one are written together.
    """

    sets: tuple[ReceiverSet, ...]

    def __str__(self) -> str:
        if len(self.sets) <= 3:
            return " | ".join(self.labels)
        return f"{self.labels[0]} | ... | {self.labels[-1]} ({len(self.sets)} alternatives)"

    @property
    def labels(self) -> tuple[str, ...]:
        """Each alternative as text."""
        return tuple(" + ".join(map(str, receivers)) for receivers in self.sets)

    @property
    def all(self) -> tuple[Receiver, ...]:
        """Every receiver once."""
        return tuple(dict.fromkeys(receiver for receivers in self.sets for receiver in receivers))


def receivers(*alternatives: Any) -> Receivers:
    """Alternatives for the end of a path: a sweep over them gives a sender × receiver grid.

    Args:
        alternatives: a receiver as text or address, or a list of receivers written together.

    Raises:
        AddressError: no receiver, or none was given.
    """
    if not alternatives:
        raise AddressError("receivers() needs at least one receiver, such as 'logits' or '10.0.q'")
    return Receivers(tuple(receiver_set(alternative) for alternative in alternatives))


def receiver_set(given: Any) -> ReceiverSet:
    """One receiver or several that are written together.

    Raises:
        AddressError: what is given is no receiver, or nothing.
    """
    many = isinstance(given, Sequence) and not isinstance(given, str)
    found = tuple(_receiver(item) for item in (given if many else [given]))
    if not found:
        raise AddressError(
            "an empty list names no receiver; give one, such as 'logits' or '10.0.q'"
        )
    return found


def _receiver(given: Any) -> Receiver:
    address = parse(given)
    if not isinstance(address, RECEIVERS):
        raise AddressError(
            f"{address} does not read the stream, so no path ends there. Receivers are logits, "
            "10.0.q (or k, v), mlp.10.in and resid_pre.10 (or mid, post)"
        )
    return address


def inputs(
    model: Model | Run, which: Literal["q", "k", "v", "mlp"]
) -> list[HeadInput] | list[MLPIn]:
    """Every receiver of one kind, in order of layers.

    Args:
        model: a model or a run.
        which: `q`, `k` or `v` (these two by key-value head), or `mlp`.

    Raises:
        ValueError: another kind.
    """
    view = view_of(model)
    if which not in ("q", "k", "v", "mlp"):
        raise ValueError(f"which is 'q', 'k', 'v' or 'mlp', got {which!r}")
    layers = range(view.n_layers)
    if which == "mlp":
        return [] if view.attn_only else [MLPIn(layer) for layer in layers]
    n_heads = view.n_heads if which == "q" else view.n_kv_heads
    return [HeadInput(layer, head, which) for layer in layers for head in range(n_heads)]


def view_of(model: Model | Run) -> ModelView:
    """The view of a model or of a run."""
    return model.view if isinstance(model, Run) else as_view(model)


def require_receivers(view: ModelView, ends: Receivers) -> None:
    """Raises AddressError where this model lacks a receiver, or a set writes a place twice."""
    for receivers in ends.sets:
        seen: dict[Site, Receiver] = {}
        for receiver in receivers:
            site = site_of(view, receiver)
            require_site(view, site)
            if site in seen:
                other = "" if seen[site] == receiver else f" (once as {seen[site]})"
                raise AddressError(f"{receiver} was given twice{other}")
            seen[site] = receiver
        if len(receivers) > 1 and (last := seen.get(Stream(view.n_layers - 1, "post"))):
            warn(
                f"{last} is written together with other receivers and is the last of them: at the "
                "senders' positions it overrides whatever they pass on. Give alternatives, "
                "rp.receivers(...), to see each alone",
                PathWarning,
            )


def require_senders(senders: Sequence[Address]) -> None:
    """Raises AddressError where a path cannot start: nowhere, or at no sender."""
    if not senders:
        raise AddressError("a path needs a sender, such as the head 9.9")
    for sender in senders:
        if not isinstance(sender, SENDERS):
            raise AddressError(
                f"{sender} writes nothing to the stream, so no path starts there. Senders are "
                "heads such as 9.9, attn.9, mlp.9, mlp.9.2214, embed, pos_embed and the biases"
            )


def site_of(view: ModelView, receiver: Receiver) -> Site:
    """Where a receiver's value is written: an MLP's input as what the MLP makes of it."""
    match receiver:
        case Logits():
            return Stream(view.n_layers - 1, "post")
        case MLPIn(layer):
            return MLP(layer)
        case _:
            return receiver


def read_at_stage(view: ModelView, receiver: Receiver) -> tuple[int | float, int]:
    """When a receiver reads, as (layer, stage); writes of an earlier stage reach it."""
    if isinstance(receiver, MLPIn) and view.parallel:
        return (receiver.layer, 0)
    return read_stage(receiver)


def starts_at_stage(sender: Variant) -> tuple[int, int]:
    """When the first sender of a sender writes, as (layer, stage)."""
    return min(write_stage(edit.site) for edit in sender)  # type: ignore[arg-type]
