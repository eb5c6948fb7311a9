"""Edges: single routes through the stream, each from one sender to one receiver."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from resid_patching.address import (
    MLP,
    Edge,
    Head,
    Input,
    Logits,
    Receiver,
    Sender,
    parse,
    parse_edge,
    write_stage,
)
from resid_patching.errors import AddressError, CausalityError
from resid_patching.models import Model, ModelView
from resid_patching.paths.receivers import (
    Receivers,
    inputs,
    read_at_stage,
    require_receivers,
    require_senders,
    view_of,
)
from resid_patching.rerun import require_site
from resid_patching.run import Run


def edges(
    model: Model | Run,
    *,
    senders: Sequence[str | Sender] | None = None,
    receivers: Sequence[str | Receiver] | None = None,
) -> list[Edge]:
    """Every edge from some senders to some receivers, receiver by receiver.

    Args:
        model: a model or a run.
        senders: where they start; None for the input, every head and every MLP. The constants that
            layers add, their biases, are left out.
        receivers: where they end; None for every head's q, k and v (these two by key-value head),
            every MLP's input and the logits.

    Returns:
        The edges whose sender writes before the receiver reads.

    Raises:
        AddressError: no sender or receiver of this model.
    """
    view = view_of(model)
    if senders is None:
        layers = range(view.n_layers)
        starts: list[Sender] = [Input()]
        for layer in layers:
            starts += [Head(layer, head) for head in range(view.n_heads)]
            starts += [] if view.attn_only else [MLP(layer)]
    else:
        starts = [parse(sender) for sender in senders]  # type: ignore[misc]
        require_senders(starts)
    if receivers is None:
        parts = [inputs(view, which) for which in ("q", "k", "v", "mlp")]
        ends: list[Receiver] = [receiver for part in parts for receiver in part]
        ends.sort(key=lambda end: (read_at_stage(view, end), str(type(end))))
        ends.append(Logits())
    else:
        ends = list(Receivers(tuple((parse(end),) for end in receivers)).all)  # type: ignore[misc]
    for sender in starts:
        require_site(view, sender)
    require_receivers(view, Receivers(tuple((end,) for end in ends)))
    return [
        Edge(sender, end)
        for end in ends
        for sender in starts
        if write_stage(sender) < read_at_stage(view, end)
    ]


def is_edge(target: object) -> bool:
    """Whether a target is an edge, or reads as one."""
    return isinstance(target, Edge) or isinstance(target, str) and "->" in target


def find_edges(view: ModelView, targets: Sequence[object]) -> list[Edge]:
    """Targets as edges of this model, each once.

    Raises:
        AddressError: no edge of this model; the same edge twice; or a target that is no edge.
        CausalityError: the receiver reads before the sender writes.
    """
    found: list[Edge] = []
    for target in targets:
        if not is_edge(target):
            raise AddressError(
                f"{target} is no edge: give edges in one call and whole targets in another"
            )
        edge = parse_edge(target)  # type: ignore[arg-type]
        require_site(view, edge.sender)
        if not write_stage(edge.sender) < read_at_stage(view, edge.receiver):
            raise CausalityError(
                f"{edge} runs back in time in {view.name}, whose attention and MLP read the same "
                "state: the MLP does not see what attention of its own layer writes"
            )
        found.append(edge)
    require_receivers(view, Receivers(tuple({(edge.receiver,): None for edge in found})))
    if len(set(found)) < len(found):
        twice = next(edge for edge in found if found.count(edge) > 1)
        raise AddressError(f"{twice} was given twice")
    return found


class EdgeSet:
    """Edges as pairs of a sender and a receiver.

    Attributes:
        edges: the edges.
        senders: each sender once.
        ends: each receiver once, as an alternative of its own.
        cells: for each edge the numbers of its sender and its receiver.
    """

    def __init__(self, edges: Sequence[Edge]) -> None:
        self.edges = edges
        self.senders = list(dict.fromkeys(edge.sender for edge in edges))
        receivers = list(dict.fromkeys(edge.receiver for edge in edges))
        self.ends = Receivers(tuple((receiver,) for receiver in receivers))
        rows = {sender: number for number, sender in enumerate(self.senders)}
        columns = {receiver: number for number, receiver in enumerate(receivers)}
        self.cells = [(rows[edge.sender], columns[edge.receiver]) for edge in edges]

    @property
    def heard(self) -> dict[Receiver, tuple[Sender, ...]]:
        """The senders that each receiver hears replaced."""
        found: dict[Receiver, list[Sender]] = defaultdict(list)
        for edge in self.edges:
            found[edge.receiver].append(edge.sender)
        return {receiver: tuple(senders) for receiver, senders in found.items()}

    @property
    def names(self) -> list[list[tuple[str, str | int | None] | None]]:
        """What the cells are called in rows; None where a pair is no edge that is asked for."""
        asked = set(self.cells)
        return [
            [
                (str(sender), label) if (row, column) in asked else None
                for column, label in enumerate(self.ends.labels)
            ]
            for row, sender in enumerate(self.senders)
        ]

    def labels(self, joint: bool) -> tuple[str, ...]:
        """What the rows are called: each edge alone, or all of them together."""
        names = tuple(map(str, self.edges))
        if not joint:
            return names
        if len(names) <= 8:
            return (" + ".join(names),)
        return (f"{names[0]} + ... + {names[-1]} ({len(names)} edges)",)
