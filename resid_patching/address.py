"""Where in the model: senders, stream states, receivers and nodes, as values and as text.

The text is the papers' notation and `parse(str(a)) == a` for every address:

    senders   input  embed  pos_embed  attn.6  9.9  attn.9.bias  mlp.6  mlp.10.2214  mlp.10.bias
    constants ln_final.bias  unembed.bias
    states    resid_pre.6  resid_mid.6  resid_post.11
    receivers   10.0.q  10.0.k  10.0.v  mlp.10.in  logits
    nodes     9.9.z  9.9.pattern
    edges     9.9->10.0.q

TransformerLens's own spellings (`blocks.6.hook_attn_out`, `L9H9`) are read too. Text is parsed
once, at the edge of the API; inside the package there are only values. This is the only file
that knows the names of hooks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from resid_patching.errors import AddressError, CausalityError


def _require_index(value: int, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise AddressError(f"{what} must be a whole number from 0, got {value!r}")


@dataclass(frozen=True, order=True)
class Embed:
    """What the stream starts as: the token embedding, without any learned position."""

    def __str__(self) -> str:
        return "embed"


@dataclass(frozen=True, order=True)
class PosEmbed:
    """The learned position embedding, where the model adds one to the stream."""

    def __str__(self) -> str:
        return "pos_embed"


@dataclass(frozen=True, order=True)
class Input:
    """All that the stream starts as: the token embedding and any learned position embedding."""

    def __str__(self) -> str:
        return "input"


@dataclass(frozen=True, order=True)
class _InLayer:
    layer: int

    def __post_init__(self) -> None:
        _require_index(self.layer, "layer")


@dataclass(frozen=True, order=True)
class Attn(_InLayer):
    """The whole write of an attention layer: its heads and its output bias."""

    def __str__(self) -> str:
        return f"attn.{self.layer}"


@dataclass(frozen=True, order=True)
class AttnBias(_InLayer):
    """The output bias of an attention layer, a sender of its own."""

    def __str__(self) -> str:
        return f"attn.{self.layer}.bias"


@dataclass(frozen=True, order=True)
class MLP(_InLayer):
    """The whole write of an MLP: its neurons and its output bias."""

    def __str__(self) -> str:
        return f"mlp.{self.layer}"


@dataclass(frozen=True, order=True)
class MLPBias(_InLayer):
    """The output bias of an MLP, a sender of its own."""

    def __str__(self) -> str:
        return f"mlp.{self.layer}.bias"


@dataclass(frozen=True, order=True)
class Head(_InLayer):
    """The write of one attention head, without any share of the layer's bias."""

    head: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_index(self.head, "head")

    def __str__(self) -> str:
        return f"{self.layer}.{self.head}"


@dataclass(frozen=True, order=True)
class Neuron(_InLayer):
    """The write of one MLP neuron."""

    index: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_index(self.index, "neuron")

    def __str__(self) -> str:
        return f"mlp.{self.layer}.{self.index}"


@dataclass(frozen=True, order=True)
class FinalNormBias:
    """The constant that the final norm's bias adds to a logit."""

    def __str__(self) -> str:
        return "ln_final.bias"


@dataclass(frozen=True, order=True)
class UnembedBias:
    """The constant that the unembedding's bias adds to a logit."""

    def __str__(self) -> str:
        return "unembed.bias"


StatePlace: TypeAlias = Literal["pre", "mid", "post"]


@dataclass(frozen=True, order=True)
class Stream(_InLayer):
    """The running total itself: before, in the middle of, or after a layer."""

    place: StatePlace = "pre"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.place not in ("pre", "mid", "post"):
            raise AddressError(f"a stream state is pre, mid or post, got {self.place!r}")

    def __str__(self) -> str:
        return f"resid_{self.place}.{self.layer}"


Which: TypeAlias = Literal["q", "k", "v"]
QKV: tuple[Which, ...] = ("q", "k", "v")


@dataclass(frozen=True, order=True)
class HeadInput(_InLayer):
    """What a head's query, key or value reads (k, v: by key-value head)."""

    head: int
    which: Which

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_index(self.head, "head")
        if self.which not in QKV:
            raise AddressError(f"a head reads by q, k or v, got {self.which!r}")

    def __str__(self) -> str:
        return f"{self.layer}.{self.head}.{self.which}"


@dataclass(frozen=True, order=True)
class MLPIn(_InLayer):
    """What an MLP reads."""

    def __str__(self) -> str:
        return f"mlp.{self.layer}.in"


@dataclass(frozen=True, order=True)
class Logits:
    """The model's output, the last receiver of the stream."""

    def __str__(self) -> str:
        return "logits"


@dataclass(frozen=True, order=True)
class HeadNode(_InLayer):
    """A head's mixed values (z) or its attention pattern."""

    head: int
    which: Literal["z", "pattern"]

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_index(self.head, "head")
        if self.which not in ("z", "pattern"):
            raise AddressError(f"a head's nodes are z and pattern, got {self.which!r}")

    def __str__(self) -> str:
        return f"{self.layer}.{self.head}.{self.which}"


Sender: TypeAlias = Input | Embed | PosEmbed | Attn | AttnBias | MLP | MLPBias | Head | Neuron
Constant: TypeAlias = FinalNormBias | UnembedBias
Receiver: TypeAlias = HeadInput | MLPIn | Logits | Stream
Address: TypeAlias = Sender | Constant | Stream | HeadInput | MLPIn | Logits | HeadNode

SENDERS = (Input, Embed, PosEmbed, Attn, AttnBias, MLP, MLPBias, Head, Neuron)
RECEIVERS = (HeadInput, MLPIn, Logits, Stream)

# Stages inside a layer of sequential blocks; a write at stage s reaches a receiver at stage > s.
_WRITE_STAGE = {Attn: 1, AttnBias: 1, Head: 1, MLP: 3, MLPBias: 3, Neuron: 3}
_READ_STAGE = {"pre": 0, "attn": 0, "mid": 2, "mlp": 2, "post": 4}


def write_stage(sender: Sender) -> tuple[int, int]:
    """When a sender adds to the stream, as (layer, stage in the layer)."""
    if isinstance(sender, Input | Embed | PosEmbed):
        return (-1, 0)
    return (sender.layer, _WRITE_STAGE[type(sender)])


def read_stage(receiver: Receiver) -> tuple[int | float, int]:
    """When a receiver takes its input from the stream, as (layer, stage in the layer)."""
    if isinstance(receiver, Logits):
        return (float("inf"), 0)
    if isinstance(receiver, Stream):
        return (receiver.layer, _READ_STAGE[receiver.place])
    return (receiver.layer, _READ_STAGE["attn" if isinstance(receiver, HeadInput) else "mlp"])


@dataclass(frozen=True)
class Edge:
    """One route through the stream, from a sender to a receiver. Refuses to run back in time."""

    sender: Sender
    receiver: Receiver

    def __post_init__(self) -> None:
        _require_ends(self.sender, self.receiver)
        if not write_stage(self.sender) < read_stage(self.receiver):
            raise CausalityError(
                f"{self.sender} -> {self.receiver} runs back in time: the receiver acts before "
                "the sender writes. Choose a receiver of a later layer."
            )

    def __str__(self) -> str:
        return f"{self.sender}->{self.receiver}"


_RULES: list[tuple[re.Pattern[str], Callable[[re.Match[str]], Address]]] = [
    (re.compile(pattern), build)
    for pattern, build in (
        (r"input", lambda m: Input()),
        (r"embed|hook_embed", lambda m: Embed()),
        (r"pos_embed|hook_pos_embed", lambda m: PosEmbed()),
        (r"ln_final\.bias", lambda m: FinalNormBias()),
        (r"unembed\.bias", lambda m: UnembedBias()),
        (r"logits", lambda m: Logits()),
        (r"attn\.(\d+)|blocks\.(\d+)\.hook_attn_out", lambda m: Attn(_number(m))),
        (r"attn\.(\d+)\.bias", lambda m: AttnBias(int(m[1]))),
        (r"mlp\.(\d+)|blocks\.(\d+)\.hook_mlp_out", lambda m: MLP(_number(m))),
        (r"mlp\.(\d+)\.bias", lambda m: MLPBias(int(m[1]))),
        (r"mlp\.(\d+)\.in", lambda m: MLPIn(int(m[1]))),
        (r"mlp\.(\d+)\.(\d+)|L(\d+)N(\d+)", lambda m: Neuron(*_numbers(m))),
        (r"(\d+)\.(\d+)|L(\d+)H(\d+)", lambda m: Head(*_numbers(m))),
        (r"(\d+)\.(\d+)\.([qkv])", lambda m: HeadInput(int(m[1]), int(m[2]), m[3])),  # type: ignore[arg-type]
        (r"(\d+)\.(\d+)\.(z|pattern)", lambda m: HeadNode(int(m[1]), int(m[2]), m[3])),  # type: ignore[arg-type]
        (r"resid_(pre|mid|post)\.(\d+)", lambda m: Stream(int(m[2]), m[1])),  # type: ignore[arg-type]
        (
            r"blocks\.(\d+)\.hook_resid_(pre|mid|post)",
            lambda m: Stream(int(m[1]), m[2]),  # type: ignore[arg-type]
        ),
    )
]


def _numbers(match: re.Match[str]) -> list[int]:
    return [int(group) for group in match.groups() if group is not None]


def _number(match: re.Match[str]) -> int:
    return _numbers(match)[0]


def parse(text: str | Address) -> Address:
    """Reads one address.

    Args:
        text: an address as text (see the module's table), or an address, returned as it is.

    Returns:
        The address as a value; `parse(str(a)) == a`.

    Raises:
        AddressError: the text names no place in a transformer.
    """
    if not isinstance(text, str):
        if isinstance(text, (*SENDERS, *RECEIVERS, FinalNormBias, UnembedBias, HeadNode)):
            return text
        raise AddressError(f"an address is a text such as '9.9' or 'mlp.6', got {text!r}")
    stripped = text.strip()
    for pattern, build in _RULES:
        if match := pattern.fullmatch(stripped):
            return build(match)
    raise AddressError(
        f"{text!r} is no address. Known forms: input, embed, pos_embed, attn.6, 9.9, attn.9.bias, "
        "mlp.6, mlp.10.2214, resid_pre.6, resid_mid.6, resid_post.6, 10.0.q, mlp.10.in, logits, "
        "9.9.z"
    )


def parse_edge(text: str | Edge) -> Edge:
    """Reads an edge such as `9.9->10.0.q`.

    Raises:
        AddressError: no edge, or its ends are no sender and receiver.
        CausalityError: the receiver acts before the sender writes.
    """
    if isinstance(text, Edge):
        return text
    sender, arrow, receiver = text.partition("->")
    if not arrow:
        raise AddressError(f"{text!r} is no edge. An edge is written 9.9->10.0.q")
    ends = parse(sender), parse(receiver)
    _require_ends(*ends)
    return Edge(*ends)  # type: ignore[arg-type]


def _require_ends(sender: Address, receiver: Address) -> None:
    if not isinstance(sender, SENDERS):
        raise AddressError(f"an edge starts at a sender; {sender} is none")
    if not isinstance(receiver, RECEIVERS):
        raise AddressError(f"an edge ends at a receiver; {receiver} is none")


def hook_name(address: Address) -> str:
    """The TransformerLens hook at which an address is read and written.

    Heads are read at `hook_z` (before the output projection), neurons at the MLP's `hook_post`.

    Raises:
        AddressError: the address has no hook (a bias, a constant, the logits).
    """
    match address:
        case Embed():
            return "hook_embed"
        case PosEmbed():
            return "hook_pos_embed"
        case Attn(layer):
            return f"blocks.{layer}.hook_attn_out"
        case MLP(layer):
            return f"blocks.{layer}.hook_mlp_out"
        case Head(layer, _):
            return f"blocks.{layer}.attn.hook_z"
        case HeadNode(layer, _, which) | HeadInput(layer, _, which):
            return f"blocks.{layer}.attn.hook_{which}"
        case Neuron(layer, _):
            return f"blocks.{layer}.mlp.hook_post"
        case Input():
            return "blocks.0.hook_resid_pre"
        case Stream(layer, place):
            return f"blocks.{layer}.hook_resid_{place}"
        case _:
            raise AddressError(f"{address} has no hook of its own")


def is_by_position(name: str) -> bool:
    """Whether a hook's activation is laid out [batch, pos, ...] (attention patterns are not)."""
    if not name.startswith(("blocks.", "hook_")):
        return False
    return not name.endswith(("hook_pattern", "hook_attn_scores", "hook_rot_q", "hook_rot_k"))
