"""What a target is replaced with: zero, mean, resample, and along a path alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from resid_patching.address import Address
from resid_patching.errors import AblationError
from resid_patching.paths import MLPs, Receivers, receiver_set
from resid_patching.prompts import Spans
from resid_patching.run import Run

_KINDS_TEXT = (
    'the kinds are Zero(), Mean(reference, over=("batch",)), Resample(source) and '
    'Path(to="logits", using=Zero(), mlps="recompute")'
)
_MLPS_TEXT = (
    'it is "recompute" (the MLPs between sender and receiver answer the change, as in Wang et al. '
    '2022) or "freeze" (only the one residual edge carries it)'
)

Over: TypeAlias = Literal["batch"] | tuple[Literal["batch", "pos"], ...]
Pairing: TypeAlias = Literal["rowwise", "shuffle"]
Ends: TypeAlias = str | Address | Sequence[str | Address] | Receivers


def refusal(message: str) -> AblationError:
    """An error that shows the kinds."""
    return AblationError(f"{message}; {_KINDS_TEXT}")


@dataclass(frozen=True)
class Zero:
    """The target writes nothing: its activation is replaced by zeros.

    On a head this leaves the layer's output bias in place, a sender of its own (`attn.6.bias`);
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
        at: positions of the reference that are averaged instead of all, which aligns prompts of
            unequal length by named positions. One of each prompt: the mean is used at every
            replaced position. Several of each prompt: with ("batch", "pos") likewise; with
            ("batch",) the mean of the first takes the place of the first replaced position, and
            so on, so all spans are of one length.
    """

    reference: Run
    over: Over
    at: Spans = None

    def __post_init__(self) -> None:
        _require_run("Mean", "reference", self.reference)
        over = (self.over,) if isinstance(self.over, str) else self.over
        names = tuple(sorted(over)) if isinstance(over, tuple | list) else None
        if names not in (("batch",), ("batch", "pos")):
            raise refusal(
                "Mean: over is ('batch',), which keeps position, or ('batch', 'pos'), which does "
                f"not, and has no default; got {self.over!r}"
            )
        object.__setattr__(self, "over", names)

    def __str__(self) -> str:
        where = "" if self.at is None else " at named positions"
        axes = " and ".join(self.over)
        return f"mean over {axes}{where} of {count_prompts(self.reference)}"


@dataclass(frozen=True, eq=False)
class Resample:
    """The target's activation is replaced by its value on other prompts, at the same positions.

        Resample(source)                            prompts of equal length
        Resample(source, at=[[4, 5, 6], [3, 4]])    for positions=[[2, 3, 4], [2, 3]]

    Attributes:
        source: a run over the same model.
        pairing: `rowwise` pairs row i with row i; `shuffle` draws rows of the source with a seed,
            never a row's own.
        seed: required by `shuffle`, refused by `rowwise`.
        at: the positions of the source that stand for the replaced ones, element by element, so
            that base and source may be of unequal length: one of every prompt, one for each, or a
            list for each. None for the same positions. With `rowwise` alone.
    """

    source: Run
    pairing: Pairing = "rowwise"
    seed: int | None = None
    at: Spans = None

    def __post_init__(self) -> None:
        _require_run("Resample", "source", self.source)
        if self.pairing not in ("rowwise", "shuffle"):
            raise refusal(f"Resample: pairing is 'rowwise' or 'shuffle', got {self.pairing!r}")
        is_number = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        if self.pairing == "shuffle" and not is_number:
            raise refusal(f"Resample: a shuffle needs a seed, such as seed=0; got {self.seed!r}")
        if self.pairing == "rowwise" and self.seed is not None:
            raise refusal("Resample: pairing='rowwise' draws nothing; leave out the seed")
        if self.pairing == "shuffle" and self.at is not None:
            raise refusal("Resample: at= pairs positions row by row; leave it out with a shuffle")

    def __str__(self) -> str:
        seed = "" if self.seed is None else f", seed {self.seed}"
        where = "" if self.at is None else " at named positions"
        return f"resample {self.pairing}{where} from {count_prompts(self.source)}{seed}"


@dataclass(frozen=True, eq=False)
class Path:
    """Only what the target sends to chosen receivers is replaced; everything else it does stays.

        Path(to="logits", using=Resample(source), mlps="recompute")
        Path(to=["9.9.q", "9.6.q", "10.0.q"], using=Zero(), mlps="freeze")    written together
        Path(to=rp.receivers("9.9.q", "9.6.q"), using=..., mlps=...)            side by side

    Other heads keep their clean values between sender and receivers. Several receivers each take
    the value they have with the others frozen, and are then written together.

    Attributes:
        to: the receiver or receivers.
        using: what the target's value is replaced with: Zero, Mean or Resample.
        mlps: `recompute` or `freeze`.

    Source: Wang et al. 2022 (arXiv 2211.00593), section 3.1 and appendix B.
    """

    to: Ends
    using: Source
    mlps: MLPs
    ends: Receivers = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.to is None:
            raise refusal(
                "Path: `to` says where the path ends, such as 'logits' or '10.0.q'; got None"
            )
        ends = self.to if isinstance(self.to, Receivers) else Receivers((receiver_set(self.to),))
        object.__setattr__(self, "ends", ends)
        if not isinstance(self.using, Zero | Mean | Resample):
            raise refusal(
                "Path: `using` says what the message is replaced with, Zero(), Mean(...) or "
                f"Resample(...), and has no default; got {_class_or_repr(self.using)}"
            )
        if self.mlps not in ("recompute", "freeze"):
            raise AblationError(f"Path: mlps was {self.mlps!r}, but {_MLPS_TEXT}")

    @property
    def is_sweep(self) -> bool:
        """Whether several alternatives were asked for, side by side."""
        return isinstance(self.to, Receivers)

    def __str__(self) -> str:
        mlps = "recomputed" if self.mlps == "recompute" else "frozen"
        return f"path to {self.ends}, MLPs {mlps}, using {self.using}"


Source: TypeAlias = Zero | Mean | Resample
Kind: TypeAlias = Source | Path


def require_kind(how: Any) -> Kind:
    """A kind, or the error that lists them."""
    if isinstance(how, Zero | Mean | Resample | Path):
        return how
    if isinstance(how, type):
        asked = f"ablate was given the class {how.__name__}; make one, such as {how.__name__}(...)"
    else:
        asked = f"ablate was given {how!r}, which is no kind of ablation"
    raise refusal(asked)


def _require_run(kind: str, name: str, value: Any) -> None:
    if not isinstance(value, Run):
        raise refusal(
            f"{kind}: {name} is a run over the same model, rp.capture(model, prompts); got "
            f"{type(value).__name__}"
        )


def _class_or_repr(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else repr(value)


def count_prompts(run: Run) -> str:
    """How many prompts a run has, and which they are."""
    under = "" if run.intervention is None else f" under {run.intervention}"
    return f"{len(run)} prompt{'s' * (len(run) != 1)} ({run.prompts.hash[:8]}){under}"
