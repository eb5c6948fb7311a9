"""Which model a lens belongs to: hashes of everything that its readout is made of.

A lens is right for one model in one basis. Its width and depth say little, and the corners of the
unembedding not much more; so the whole of W_U, b_U and the final norm are hashed. Beside the
hashes stands a sketch of the readout that no exact weight processing changes:

    E[:, t] = fold(gamma * W_U[:, t]),   c[t] = beta . W_U[:, t] + b_U[t]
    both centred over the vocabulary (where there is no softcap), then times 8 fixed signs

Folding the final norm and centring the unembedding leave E and c as they are, up to rounding. So
two models with other hashes and the same sketch read a state alike, and a lens may be moved from
one to the other.

The layers before the readout have a sketch too, of what they compute: the stream's states of 64
fixed tokens, each as one number (its product with fixed signs). A layer's weights lie differently
in memory in HookedTransformer and TransformerBridge and are others after processing; its states
are the same up to rounding, less their mean where the final norm is a LayerNorm. A model with the
same readout and other layers, such as a fine-tune, has another sketch. It is not refused, because
such use is often wanted; it is said.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy
import torch
from jaxtyping import Float
from torch import Tensor

from resid_patching.address import Address, Stream, hook_name
from resid_patching.errors import LensBasisError, LensMismatchError
from resid_patching.models import (
    HookFunction,
    Memory,
    ModelView,
    compute_dtype,
    exact,
    name_of,
    report,
)

Basis = Literal["raw", "centred"]

SKETCH_TOLERANCE = 1e-3
_SIGNS = 8
_BLOCK = 64
_BODY_ROWS, _BODY_LENGTH = 2, 32
_BODY_TOLERANCE = {"float64": 1e-4, "float32": 1e-4, "float16": 1e-2}
_BODY_LOOSE = 5e-2  # bfloat16


@dataclass(frozen=True)
class Fingerprint:
    """The model of a lens. Hashes are None where a file of another package gave none.

    Attributes:
        model: the model's name.
        revision: the hub's commit of its weights, where known.
        d_model: width of the stream.
        n_layers: number of blocks.
        basis: `raw`, or `centred` where the weights that write to the stream are.
        norm: kind of the final norm: LN, RMS or none.
        dtype: dtype of the weights.
        W_U, b_U, final_norm: sha256 of the whole tensors, in float32 (float64 in float64 models).
        corners: the tuned-lens package's hash of W_U, which sees only its corners.
    """

    model: str
    revision: str | None
    d_model: int
    n_layers: int
    basis: Basis
    norm: str
    dtype: str
    W_U: str | None
    b_U: str | None
    final_norm: str | None
    corners: str | None = None

    @property
    def verified(self) -> bool:
        """Whether the readout's weights are known by hash."""
        return self.W_U is not None

    def as_dict(self) -> dict[str, Any]:
        """For a file."""
        return dataclasses.asdict(self)


def fingerprint(view: ModelView) -> Fingerprint:
    """The fingerprint of a model; remembered while the model is as it was."""
    return dataclasses.replace(_fingerprints.of(view)[0], revision=view.revision)


def readout_sketch(view: ModelView) -> Float[Tensor, "sign d_model_and_bias"]:
    """What exact weight processing leaves as it is, in float32; remembered likewise."""
    return _fingerprints.of(view)[1]


@exact()
def _find(view: ModelView) -> tuple[Fingerprint, Tensor]:
    norm = view.final_norm
    centred = report(view).processing.writes_centred
    return (
        Fingerprint(
            model=view.name,
            revision=view.revision,
            d_model=view.d_model,
            n_layers=view.n_layers,
            basis="centred" if centred else "raw",
            norm=norm.kind or "none",
            dtype=name_of(view.dtype),
            W_U=sha256(view.W_U),
            b_U=sha256(view.b_U),
            final_norm=sha256(torch.stack([norm.gain, norm.bias])),
            corners=corner_hash(view.W_U),
        ),
        _sketch(view),
    )


_fingerprints = Memory(_find)


def sha256(tensor: Tensor) -> str:
    """The hash of a tensor's shape and numbers, whatever its layout in memory."""
    tensor = tensor.detach()
    digest = hashlib.sha256(str(tuple(tensor.shape)).encode())
    for block in tensor.split(_BLOCK):
        numbers = block.to("cpu", compute_dtype(tensor.dtype)).contiguous().numpy()
        digest.update(numbers.astype(numbers.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """The hash of named tensors on the CPU: names, shapes, dtypes and every bit."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name}{tuple(tensors[name].shape)}{tensors[name].dtype}".encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def corner_hash(W_U: Tensor) -> str:
    """The tuned-lens package's hash: of what numpy prints of a large matrix, its corners."""
    d_model, d_vocab = W_U.shape
    # numpy prints three rows and columns at each end, so the middle need not be converted.
    if d_model * d_vocab > 1000 and d_model > 6 and d_vocab > 6:
        rows = torch.tensor([0, 1, 2, d_vocab - 3, d_vocab - 2, d_vocab - 1])
        columns = torch.tensor([0, 1, 2, d_model - 3, d_model - 2, d_model - 1])
        corner = W_U.detach().T[rows.to(W_U.device)][:, columns.to(W_U.device)]
        corner = corner.to("cpu", torch.float32)
        whole = torch.zeros(8, 8, dtype=torch.float32, device="cpu")
        keep = torch.tensor([0, 1, 2, 5, 6, 7], device="cpu")
        whole[keep[:, None], keep] = corner
        with numpy.printoptions(threshold=10):
            text = numpy.array_str(whole.numpy(), precision=1)
    else:
        text = numpy.array_str(W_U.detach().T.to("cpu", torch.float32).numpy(), precision=1)
    return hashlib.sha256(text.encode()).hexdigest()


def _sketch(view: ModelView) -> Tensor:
    norm, d_vocab = view.final_norm, view.W_U.shape[1]
    signs = _signs(d_vocab).to(view.device, view.compute_dtype)
    if view.softcap is None:
        signs = signs - signs.mean(0)  # as if the columns had been centred
    weight = view.W_U.detach()
    rows = [block.to(view.compute_dtype) @ signs for block in weight.split(_BLOCK)]
    direction = torch.cat(rows).T / d_vocab**0.5
    bias = direction @ norm.bias + view.b_U.detach().to(view.compute_dtype) @ signs / d_vocab**0.5
    return torch.cat([norm.fold(direction), bias[:, None]], 1).to("cpu", torch.float32)


def _signs(d_vocab: int) -> Tensor:
    """Signs [d_vocab, 8]."""
    return ((_mixed(d_vocab * _SIGNS) & 1) * 2 - 1).reshape(d_vocab, _SIGNS)


def _mixed(count: int) -> Tensor:
    """Whole numbers from a fixed mixing of bits, the same in every version of torch."""
    bits = torch.arange(1, count + 1, dtype=torch.int64, device="cpu")
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return bits


def body_sketch(view: ModelView) -> Float[Tensor, "state token"] | None:
    """What the layers make of fixed tokens, in float32; remembered likewise.

    Returns:
        A row for each state of the stream, from `resid_pre.0` on. None where hooks of the caller
        are on, which change it, where the model does not show its stream, or where it overflows.
    """
    return _bodies.of(view)


@exact()
def _find_body(view: ModelView) -> Tensor | None:
    if view.user_hooks() or "stream" in report(view).failures:
        return None
    length = min(_BODY_LENGTH, view.n_ctx)
    tokens = (_mixed(_BODY_ROWS * length) % view.d_vocab).reshape(_BODY_ROWS, length)
    signs = _signs(view.d_model)[:, 0].to(view.device, view.compute_dtype)
    if view.final_norm.kind == "LN":
        signs = signs - signs.mean()  # centred weights leave out the mean of every state
    found: dict[Address, Tensor] = {}

    def keeper(state: Address) -> HookFunction:
        def keep(activation: Tensor) -> None:
            # The first position holds states unlike any other's, beside which the rest is nothing.
            states = activation.detach()[:, 1:].to(view.device, view.compute_dtype)
            found[state] = (states @ signs).flatten().to("cpu", torch.float32)

        return keep

    states = [Stream(0, "pre"), *(Stream(layer, "post") for layer in range(view.n_layers))]
    functions = {hook_name(state): keeper(state) for state in states}
    view.forward_blocks(tokens.to(view.input_device), functions)
    sketch = torch.stack([found[state] for state in states])
    return sketch if bool(sketch.isfinite().all()) else None


_bodies = Memory(_find_body)


def first_difference(
    left: Float[Tensor, "state token"], right: Float[Tensor, "state token"], *dtypes: str
) -> str | None:
    """The first state in which two models' sketches of their layers differ, None for none.

    Args:
        left: one model's.
        right: the other's.
        dtypes: of the two models' weights; the coarser says how much is rounding.
    """
    if left.shape != right.shape:
        return "resid_pre.0"
    tolerance = max(_BODY_TOLERANCE.get(dtype, _BODY_LOOSE) for dtype in dtypes)
    same = (left - right).norm(dim=1) <= tolerance * left.norm(dim=1)
    if bool(same.all()):
        return None
    row = int((~same).long().argmax())
    return f"resid_post.{row - 1}" if row else "resid_pre.0"


def same_readout(left: Tensor, right: Tensor) -> bool:
    """Whether two sketches agree up to rounding."""
    if left.shape != right.shape:
        return False
    scale = left.abs().amax().clamp_min(1e-30)
    return bool((left - right).abs().max() <= SKETCH_TOLERANCE * scale)


def require_match(lens: Fingerprint, view: ModelView, *, names: bool = True) -> None:
    """Raises where a lens is not of this model, and names both sides.

    Args:
        lens: the lens's fingerprint.
        view: the model.
        names: also compare names and revisions.

    Raises:
        LensBasisError: the lens is of the other basis.
        LensMismatchError: another width, depth, model, revision, norm, or other weights.
    """
    found = fingerprint(view)
    require_same_shape(lens, found)
    if names:
        require_same_name(lens, found)
    if lens.basis != found.basis:
        raise LensBasisError(
            f"the lens is of {lens.basis} weights ({lens.model}), the model's ({found.model}) are "
            f"{found.basis}: its translators would be applied to other numbers than they were made "
            "for. tuned.rebase(model) converts where that is exact."
        )
    for what in ("norm", "final_norm", "b_U", "W_U"):
        ours, theirs = getattr(lens, what), getattr(found, what)
        if ours is not None and ours != theirs:
            raise LensMismatchError(
                f"the lens is of a model ({lens.model}, {lens.dtype}) whose {what} is "
                f"{_short_hash(ours)}, but the {what} of {found.model} ({found.dtype}, "
                f"{report(view).processing}) is {_short_hash(theirs)}. If the weights were only "
                "processed otherwise, tuned.rebase(model) moves the lens and checks that."
            )


def require_same_shape(lens: Fingerprint, found: Fingerprint) -> None:
    """Raises where width or depth differ."""
    for what, name in (("d_model", "width d_model"), ("n_layers", "number of layers")):
        ours, theirs = getattr(lens, what), getattr(found, what)
        if ours != theirs:
            raise LensMismatchError(
                f"the lens is of a model ({lens.model}) with {name} {ours}, but {found.model} has "
                f"{theirs}. Load the model that the lens was fitted on."
            )


def require_same_name(lens: Fingerprint, found: Fingerprint) -> None:
    """Raises where names differ, or revisions that are known on both sides."""
    if lens.model != found.model:
        raise LensMismatchError(
            f"the lens is of the model {lens.model!r}, but this is {found.model!r}. If they are "
            "one model under two names, tuned.rebase(model, renamed=True) says so."
        )
    if None not in (lens.revision, found.revision) and lens.revision != found.revision:
        raise LensMismatchError(
            f"the lens is of revision {lens.revision} of {lens.model}, but this is revision "
            f"{found.revision}. Load that revision, or fit a lens on this one."
        )


def _short_hash(value: str | None) -> str:
    return "unknown" if value is None else value if len(value) < 12 else f"sha256 {value[:12]}"
