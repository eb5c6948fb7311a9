"""Checks, once per model, of the identities that every analysis here stands on.

On a short input of the model's own vocabulary:

    resid_pre + attn_out = resid_mid,  resid_mid + mlp_out = resid_post   (parallel: the one sum)
    resid_post of one layer = resid_pre of the next
    a later token changes nothing before it
    our final norm and unembedding of the last state = the model's logits
    sum of heads + b_O = attn_out,  sum of neurons + b_out = mlp_out

Weights that are NaN or infinite are refused before that. Where an identity fails, the analyses
that need it refuse the model by name; the others go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from resid_patching.address import MLP, Attn, Head, Neuron, Stream, hook_name
from resid_patching.errors import (
    AddressError,
    HeadMismatchError,
    HookNotFiredError,
    NeuronMismatchError,
    NotFiniteError,
    ReadoutMismatchError,
    StreamMismatchError,
    UnsupportedModelError,
)
from resid_patching.models.memory import Memory
from resid_patching.models.precision import exact, name_of, remedy
from resid_patching.models.view import ModelView
from resid_patching.models.weights import optional_weight

Capability = Literal["stream", "readout", "z", "heads", "neurons"]

_STREAM_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2}
READOUT_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2}
_LOOSE = 5e-2
_PROBE_LENGTH = 6


@dataclass(frozen=True)
class ProcessingState:
    """Which of TransformerLens's weight simplifications the weights show, as found in them."""

    norms_folded: bool
    writes_centred: bool
    unembed_centred: bool
    values_folded: bool

    def __str__(self) -> str:
        names = {
            "norms folded": self.norms_folded,
            "writing weights centred": self.writes_centred,
            "unembedding centred": self.unembed_centred,
            "value biases folded": self.values_folded,
        }
        found = [name for name, holds in names.items() if holds]
        return "processed: " + ", ".join(found) if found else "raw"


@dataclass
class Report:
    """What the guards found: an error for each capability that fails, and the weights' state."""

    processing: ProcessingState
    failures: dict[Capability, UnsupportedModelError] = field(default_factory=dict)


def require(view: ModelView, *capabilities: Capability) -> None:
    """Raises the named error of the first capability that this model fails.

    The checks run once for a model, and again after anything that it computes with has changed.

    Raises:
        ModelChangedError: the model is no longer what it was when the view was made.
        TrainingModeError: dropout is on.
        NotFiniteError: weights are NaN or infinite.
        StreamMismatchError, ReadoutMismatchError, HeadMismatchError, NeuronMismatchError: the
            identity that the analysis stands on does not hold.
    """
    view.require_eval()
    view.require_unchanged()
    failures = report(view).failures
    for capability in capabilities:
        if failure := failures.get(capability):
            # A new one: the traceback of the remembered one would keep the model alive.
            raise type(failure)(*failure.args)


def report(view: ModelView) -> Report:
    """The guards' findings for a model, from memory where nothing changed."""
    return _reports.of(view)


def _find_report(view: ModelView) -> Report:
    found = Report(find_processing(view))
    _examine(view, found)
    return found


_reports = Memory(_find_report)


def find_processing(view: ModelView) -> ProcessingState:
    """Reads off the weights which simplifications they carry."""
    norm = view.final_norm
    folded = norm.kind is not None and bool(
        torch.equal(norm.gain, torch.ones_like(norm.gain)) and not norm.bias.any()
    )
    attention = getattr(view.model.blocks[0], "attn", None)
    biases = {name: optional_weight(attention, name) for name in ("b_Q", "b_V", "b_O")}
    any_set = {name: bias is not None and bool(bias.any()) for name, bias in biases.items()}
    return ProcessingState(
        norms_folded=folded,
        writes_centred=_centred(optional_weight(attention, "W_O"), -1),
        unembed_centred=_centred(view.W_U, 1),
        # A model without any attention bias has nothing to fold.
        values_folded=biases["b_V"] is not None
        and not any_set["b_V"]
        and (any_set["b_Q"] or any_set["b_O"]),
    )


def _centred(weight: Tensor | None, dim: int) -> bool:
    if weight is None:
        return False
    weight = weight.detach().to(torch.float32)
    return bool(weight.mean(dim).abs().max() < 1e-4 * weight.pow(2).mean().sqrt())


def require_finite(model: torch.nn.Module, name: str) -> None:
    """Refuses a model some of whose parameters, where they can be read, are NaN or infinite.

    Args:
        model: the model.
        name: how the message calls it.

    Raises:
        NotFiniteError: the first such parameter is named.
    """
    found = [key for key, weights in model.named_parameters() if not _finite(weights.detach())]
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        first = found[0].replace("._original_component", "")  # as TransformerBridge keeps them
        raise NotFiniteError(
            f"{name} has weights that are NaN or infinite, in {first}{more}, so no number it "
            "gives could be trusted. Load it in float32 or bfloat16, or get its file again."
        )


def _finite(weights: Tensor) -> bool:
    # What is offloaded cannot be read now, and shows in the states; whole numbers are finite.
    if weights.is_meta or not weights.is_floating_point():
        return True
    if weights.element_size() < 2:  # for float8 nothing is implemented
        weights = weights.float()
    # The extremes are far quicker than isfinite; either is NaN where any entry is.
    return weights.numel() == 0 or bool(torch.stack(weights.aminmax()).isfinite().all())


def _examine(view: ModelView, found: Report) -> None:
    try:
        require_finite(view.model, view.name)
    except NotFiniteError as error:
        found.failures |= dict.fromkeys(get_args(Capability), error.with_traceback(None))
        return
    if getattr(view.cfg, "attention_dir", "causal") != "causal":
        found.failures["stream"] = StreamMismatchError(
            f"{view.name} attends in both directions (an encoder); the analyses here are for "
            "causal language models."
        )
        return
    try:
        states, logits, raw_logits = _probe(view)
    except (AddressError, HookNotFiredError) as error:
        found.failures["stream"] = StreamMismatchError(
            f"{view.name} ({view.kind}) does not show the residual stream at every layer: {error}"
        )
        return
    except Exception as error:
        if not view.user_hooks():
            raise
        found.failures["stream"] = StreamMismatchError(
            f"{view.name} ({view.kind}) cannot be run on the {_PROBE_LENGTH} tokens that it is "
            f"checked on ({type(error).__name__}: {error}). With this package hooks must take any "
            f"number of prompts of any length.{note_on_hooks(view)}"
        )
        return
    seen = {**states, "the unembedding's output": raw_logits}
    if overflowed := [name for name, values in seen.items() if not _finite(values)]:
        error = NotFiniteError(
            f"{view.name} ({view.kind}): {overflowed[0]} is NaN or infinite in "
            f"{name_of(view.dtype)} on a few tokens. {remedy(view.dtype)}"
        )
        found.failures |= dict.fromkeys(get_args(Capability), error)
        return
    with exact():
        checks: dict[Capability, Any] = {
            "stream": _check_stream,
            "z": _check_z,
            "heads": _check_heads,
            "neurons": _check_neurons,
        }
        for capability, check in checks.items():
            if failure := check(view, states):
                found.failures[capability] = failure
        if failure := _check_readout(view, states, logits, raw_logits):
            found.failures["readout"] = failure


def _probe(view: ModelView) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Activations and logits of two rows that differ in their last token alone."""
    length = min(_PROBE_LENGTH, view.n_ctx)
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(view.d_vocab, (length,), generator=generator, device="cpu")
    other = row.clone()
    other[-1] = (other[-1] + 1) % view.d_vocab
    tokens = torch.stack([row, other]).to(view.input_device)

    names = [hook_name(Stream(layer, place)) for layer in _layers(view) for place in _places(view)]
    names += [hook_name(Attn(layer)) for layer in _layers(view)]
    if not view.attn_only:
        names += [hook_name(MLP(layer)) for layer in _layers(view)]
    optional = [hook_name(Head(layer, 0)) for layer in _layers(view)]
    optional += [hook_name(Neuron(layer, 0)) for layer in _layers(view)]
    names += [name for name in optional if name in view.hook_points]

    states: dict[str, Tensor] = {}
    raw: list[Tensor] = []
    readers = {name: _keep(states, name, view.device) for name in names}
    fired = {name: reader for name, reader in readers.items() if name not in optional}
    quiet = {name: reader for name, reader in readers.items() if name in optional}
    with view.attached(quiet):
        logits = view.forward(tokens, fired, logits=lambda tensor: raw.append(tensor.detach()))
    if not raw:
        raise HookNotFiredError("its unembedding is not called as a module")
    return states, logits.to(view.device), raw[-1].to(view.device)


def _keep(states: dict[str, Tensor], name: str, device: torch.device) -> Any:
    def keep(tensor: Tensor) -> None:
        # The layers of a model that was split over devices lie on several.
        states[name] = tensor.detach().to(device, copy=True)

    return keep


def _layers(view: ModelView) -> range:
    return range(view.n_layers)


def _places(view: ModelView) -> Sequence[Literal["pre", "mid", "post"]]:
    return ("pre", "post") if view.parallel or view.attn_only else ("pre", "mid", "post")


def _difference(left: Tensor, right: Tensor, scale: Tensor | None = None) -> float:
    scale = right if scale is None else scale
    return float((left - right).abs().max() / scale.abs().max().clamp_min(1e-30))


def _check_stream(view: ModelView, states: dict[str, Tensor]) -> StreamMismatchError | None:
    tolerance = _STREAM_TOLERANCE.get(view.dtype, _LOOSE)
    for layer in _layers(view):
        for text, left, right in _stream_identities(view, states, layer):
            error = _difference(left, right)
            if not error <= tolerance:
                return StreamMismatchError(
                    f"{view.name} ({view.kind}), layer {layer}: {text} fails by {error:.1e} of "
                    f"the stream (tolerance {tolerance:.0e}). Its sublayer outputs are not what "
                    f"is added to the stream, so parts would not sum.{note_on_hooks(view)}"
                )
    last = states[hook_name(Stream(view.n_layers - 1, "post"))]
    error = _difference(last[0, :-1], last[1, :-1])
    if not error <= tolerance:
        return StreamMismatchError(
            f"{view.name}: a later token changes earlier positions by {error:.1e} of the stream; "
            "the analyses here are for causal language models."
        )
    return None


def _stream_identities(
    view: ModelView, states: dict[str, Tensor], layer: int
) -> list[tuple[str, Tensor, Tensor]]:
    pre = states[hook_name(Stream(layer, "pre"))]
    post = states[hook_name(Stream(layer, "post"))]
    attn = states[hook_name(Attn(layer))]
    found: list[tuple[str, Tensor, Tensor]] = []
    if view.attn_only:
        found.append(("resid_pre + attn_out = resid_post", pre + attn, post))
    elif view.parallel:
        both = pre + attn + states[hook_name(MLP(layer))]
        found.append(("resid_pre + attn_out + mlp_out = resid_post", both, post))
    else:
        mid = states[hook_name(Stream(layer, "mid"))]
        found.append(("resid_pre + attn_out = resid_mid", pre + attn, mid))
        summed = mid + states[hook_name(MLP(layer))]
        found.append(("resid_mid + mlp_out = resid_post", summed, post))
    if layer + 1 < view.n_layers:
        following = states[hook_name(Stream(layer + 1, "pre"))]
        found.append(("resid_post = resid_pre of the next layer", post, following))
    return found


def _check_readout(
    view: ModelView, states: dict[str, Tensor], logits: Tensor, raw: Tensor
) -> ReadoutMismatchError | None:
    tolerance = READOUT_TOLERANCE.get(view.dtype, _LOOSE)
    capped = raw if view.softcap is None else view.softcap * torch.tanh(raw / view.softcap)
    if not (error := _difference(capped, logits)) <= tolerance:
        return ReadoutMismatchError(
            f"{view.name} rescales its logits after the unembedding ({error:.1e} apart), which "
            "is not covered."
        )
    ours = view.readout(states[hook_name(Stream(view.n_layers - 1, "post"))])
    if not (error := _difference(ours, raw)) <= tolerance:
        return ReadoutMismatchError(
            f"{view.name} ({view.kind}): final norm and unembedding of the last stream state "
            f"differ from the model's logits by {error:.1e} of their size (tolerance "
            f"{tolerance:.0e}).{note_on_hooks(view)}"
        )
    return None


def _check_z(view: ModelView, states: dict[str, Tensor]) -> HeadMismatchError | None:
    """Z shows one vector for each head, where it shows anything."""
    for layer in _layers(view):
        z = states.get(name := hook_name(Head(layer, 0)))
        if z is not None and (z.ndim != 4 or z.shape[2] != view.n_heads):
            return HeadMismatchError(
                f"{name} of {view.name} ({view.kind}) is laid out as {list(z.shape)}, not with one "
                f"vector for each of the {view.n_heads} heads, as where heads mix values of "
                "another width than their queries and keys (multi-head latent attention), so its "
                f"heads cannot be told apart. Use by='component', or the whole attn.{layer}."
            )
    return None


def _check_heads(view: ModelView, states: dict[str, Tensor]) -> HeadMismatchError | None:
    return _check_z(view, states) or _check_parts(
        view, states, "heads + b_O = attn_out", Head, Attn, HeadMismatchError, _sum_of_heads
    )


def _check_neurons(view: ModelView, states: dict[str, Tensor]) -> NeuronMismatchError | None:
    if view.attn_only:
        return None
    return _check_parts(
        view, states, "neurons + b_out = mlp_out", Neuron, MLP, NeuronMismatchError, _sum_of_neurons
    )


def _check_parts(
    view: ModelView,
    states: dict[str, Tensor],
    text: str,
    part: Any,
    whole: Any,
    error_type: Any,
    summed: Any,
) -> Any:
    tolerance = _STREAM_TOLERANCE.get(view.dtype, _LOOSE)
    for layer in _layers(view):
        activation = states.get(hook_name(part(layer, 0)))
        if activation is None:
            return error_type(
                f"{view.name} ({view.kind}) has no hook {hook_name(part(layer, 0))}; {text} "
                "cannot be read. Use by='component'."
            )
        try:
            total = summed(view, layer, activation)
        except (HeadMismatchError, NeuronMismatchError) as unread:
            return unread.with_traceback(None)
        except (RuntimeError, AttributeError) as problem:
            return error_type(
                f"{view.name} ({view.kind}), layer {layer}: {text} cannot be formed "
                f"({problem}). Use by='component'."
            )
        error = _difference(total, states[hook_name(whole(layer))])
        if not error <= tolerance:
            return error_type(
                f"{view.name} ({view.kind}), layer {layer}: {text} fails by {error:.1e} "
                f"(tolerance {tolerance:.0e}), as with a norm after the sublayer, so its parts "
                f"cannot be told apart exactly. Use by='component'.{note_on_hooks(view)}"
            )
    return None


def _sum_of_heads(view: ModelView, layer: int, z: Tensor) -> Tensor:
    return torch.einsum("bphd,hdm->bpm", z, view.W_O(layer)) + view.b_O(layer)


def _sum_of_neurons(view: ModelView, layer: int, post: Tensor) -> Tensor:
    return torch.einsum("bpn,nm->bpm", post, view.W_out(layer)) + view.b_out(layer)


def note_on_hooks(view: ModelView) -> str:
    """A sentence that names the caller's hooks, where there are any."""
    hooks = view.user_hooks()
    if not hooks:
        return ""
    shown = ", ".join(hooks[:3]) + (" and more" if len(hooks) > 3 else "")
    return f" Hooks or functions of yours are on at {shown}."
