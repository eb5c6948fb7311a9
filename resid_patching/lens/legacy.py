"""The tuned-lens package's files.

    config.json   {base_model_name_or_path, d_model, num_hidden_layers, bias,
                   base_model_revision, unembed_hash, lens_type: "linear_tuned_lens"}
    params.pt     a state dict: "0.weight" [d_model d_model] (A), "0.bias", ..., one for each layer

Older files spell `unemebd_hash`. Those before 0.0.6 hold the whole lens, the model's final norm
and unembedding included: `input_translator.*` is translator 0, `layer_translators.i.*` is i + 1.

The hash sees the corners of W_U alone, so such a lens is read with a warning that it is
unverified, except where the file holds the unembedding itself, which then is compared.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from resid_patching.errors import (
    LensFormatError,
    LensMismatchError,
    UnverifiedLensWarning,
    warn,
)
from resid_patching.files import read_json, write_bytes, write_text
from resid_patching.lens.fingerprint import Fingerprint, fingerprint, readout_sketch
from resid_patching.models import ModelView

if TYPE_CHECKING:
    from resid_patching.lens.tuned import TunedLens

PARAMS, CONFIG = "params.pt", "config.json"
_NEW = re.compile(r"(\d+)\.(weight|bias)")
_OLD = re.compile(r"(?:input_translator|layer_translators\.(\d+))\.(weight|bias)")


@dataclass(frozen=True, eq=False)
class Legacy:
    """What such a file holds; see `checkpoint.Stored`."""

    weight: Tensor
    bias: Tensor
    fingerprint: Fingerprint
    sketch: Tensor | None
    record: dict[str, Any]


def save(lens: TunedLens, folder: Path) -> None:
    """Writes a lens that the tuned-lens package loads.

    Raises:
        LensFormatError: a lens on another site or of centred weights, which it cannot hold.
    """
    mark = lens.fingerprint
    if lens.site != "resid_pre":
        raise LensFormatError(
            f"the tuned-lens package reads the stream before each layer; a lens on {lens.site} "
            "cannot be written for it"
        )
    if mark.basis != "raw":
        raise LensFormatError(
            "the tuned-lens package reads raw weights, and this lens is of centred ones; write "
            "tuned.to_raw(), which is exact"
        )
    config = {
        "base_model_name_or_path": mark.model,
        "d_model": mark.d_model,
        "num_hidden_layers": mark.n_layers,
        "bias": True,
        "base_model_revision": mark.revision,
        "unembed_hash": mark.corners,
        "lens_type": "linear_tuned_lens",
    }
    state = {}
    for number, (weight, bias) in enumerate(zip(lens.weight, lens.bias, strict=True)):
        state[f"{number}.weight"] = weight.detach().cpu().clone()
        state[f"{number}.bias"] = bias.detach().cpu().clone()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_bytes(folder / PARAMS, buffer.getvalue())
    write_text(folder / CONFIG, json.dumps(config, indent=1) + "\n")


def read(folder: Path, view: ModelView) -> Legacy:
    """Reads a lens of the tuned-lens package for a model.

    Raises:
        LensFormatError: damaged, of another kind, or with pickled objects in it.
        LensMismatchError: it is of another model.

    Warns:
        UnverifiedLensWarning: the file cannot prove which model it belongs to.
    """
    config = _read_config(folder / CONFIG)
    state = _read_state(folder / PARAMS)
    numbered, others = _sort_keys(state, folder / PARAMS)
    weight, bias = _stack(numbered, folder / PARAMS)
    _require_complete(config, weight, folder)
    found = fingerprint(view)
    mark = Fingerprint(
        model=_model_name(config, found),
        revision=_text_entry(config, "base_model_revision") or _text_entry(config, "revision"),
        d_model=weight.shape[-1],
        n_layers=len(weight),
        basis="raw",
        norm=found.norm,
        dtype=str(weight.dtype).removeprefix("torch."),
        W_U=None,
        b_U=None,
        final_norm=None,
        corners=_text_entry(config, "unembed_hash") or _text_entry(config, "unemebd_hash"),
    )
    _require_corners(mark, found)
    record = {"from": "tuned-lens", "config": config}
    if _proves(others, view, mark):
        mark = replace(mark, W_U=found.W_U, b_U=found.b_U, final_norm=found.final_norm)
        return Legacy(weight, bias, mark, readout_sketch(view), record)
    warn(
        f"the lens at {folder} (for {mark.model}) is unverified: its file knows its model by name "
        "and by the corners of the unembedding alone. Compare its KL with the logit lens's on a "
        "text before trusting it.",
        UnverifiedLensWarning,
    )
    return Legacy(weight, bias, mark, None, record)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = read_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LensFormatError(f"{path.parent} has {PARAMS} but no {CONFIG}") from None
    except ValueError as error:
        raise LensFormatError(f"{path} is no JSON: {error}") from error
    kind = config.get("lens_type", "linear_tuned_lens") if isinstance(config, dict) else None
    if kind != "linear_tuned_lens":
        raise LensFormatError(f"{path} describes {kind!r}; a linear_tuned_lens was expected")
    return config


def _read_state(path: Path) -> dict[str, Tensor]:
    try:
        _require_sums(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise LensFormatError(
            f"{path} holds pickled objects, which can run code when they are read, and is refused"
        ) from error
    except Exception as error:
        raise LensFormatError(f"{path} is no file of parameters: {error}") from error
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise LensFormatError(f"{path} holds a {type(state).__name__}, not a lens's parameters")
    return state


def _require_sums(path: Path) -> None:
    """The archive's own checksums, which torch writes but does not compare.

    Raises:
        ValueError: an entry is not what was written.
    """
    if not zipfile.is_zipfile(path):  # torch's format before 1.6 has none
        return
    with zipfile.ZipFile(path) as archive:
        if (name := archive.testzip()) is not None:
            raise ValueError(f"{name} is not what was written (its checksum differs)")


def _sort_keys(
    state: dict[str, Tensor], path: Path
) -> tuple[dict[tuple[int, str], Tensor], dict[str, Tensor]]:
    """The translators by (number, weight or bias), and what else an old file holds."""
    numbered: dict[tuple[int, str], Tensor] = {}
    others: dict[str, Tensor] = {}
    for key, tensor in state.items():
        if match := _NEW.fullmatch(key):
            numbered[int(match[1]), match[2]] = tensor
        elif match := _OLD.fullmatch(key):
            numbered[0 if match[1] is None else int(match[1]) + 1, match[2]] = tensor
        elif key.startswith(("unembedding.", "layer_norm.")):
            others[key] = tensor
        else:
            raise LensFormatError(
                f"{path} holds {key!r}, which is no part of a linear tuned lens"
                + (" (extra layers are not covered)" if key.startswith("extra_layers") else "")
            )
    return numbered, others


def _stack(numbered: dict[tuple[int, str], Tensor], path: Path) -> tuple[Tensor, Tensor]:
    weights = {number: t for (number, kind), t in numbered.items() if kind == "weight"}
    if not weights or sorted(weights) != list(range(len(weights))):
        raise LensFormatError(f"{path} holds the translators {sorted(weights)}, not 0, 1, ...")
    try:
        weight = torch.stack([weights[number] for number in range(len(weights))])
        d_model = weight.shape[-1]
        if weight.ndim != 3 or weight.shape[1] != d_model:
            raise RuntimeError(f"translators of shape {tuple(weight.shape[1:])} are not square")
        zero = weight.new_zeros(d_model)
        bias = torch.stack([numbered.get((number, "bias"), zero) for number in range(len(weight))])
        require_numbers(weight, bias)
    except (RuntimeError, ValueError) as error:
        raise LensFormatError(f"{path}: {error}") from error
    if weight.dtype in (torch.float16, torch.bfloat16):
        weight, bias = weight.float(), bias.float()
    return weight, bias


def require_numbers(weight: Tensor, bias: Tensor) -> None:
    """Raises where the stacked translators are no finite numbers, one bias entry for each row.

    Raises:
        ValueError: they are not.
    """
    if tuple(bias.shape) != tuple(weight.shape[:2]):
        raise ValueError(f"biases {tuple(bias.shape)} for translators {tuple(weight.shape)}")
    if not weight.is_floating_point() or bias.dtype != weight.dtype:
        raise ValueError(f"translators of {weight.dtype} with biases of {bias.dtype}")
    for what, tensor in (("translators", weight), ("biases", bias)):
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"the {what} hold numbers that are not finite")


def _require_complete(config: dict[str, Any], weight: Tensor, folder: Path) -> None:
    n_layers = config.get("num_hidden_layers", config.get("num_layers", len(weight)))
    d_model = config.get("d_model", weight.shape[-1])
    if (n_layers, d_model) != (len(weight), weight.shape[-1]):
        raise LensFormatError(
            f"{folder}: the configuration says {n_layers} layers of width {d_model}, but the "
            f"parameters are {len(weight)} translators of width {weight.shape[-1]}"
        )


def _text_entry(config: dict[str, Any], name: str) -> str | None:
    value = config.get(name)
    return value if isinstance(value, str) else None


def _model_name(config: dict[str, Any], found: Fingerprint) -> str:
    """The file's name of the model; one with an organisation before it is the same name."""
    given = str(config.get("base_model_name_or_path") or config.get("base_model") or found.model)
    same = given.rstrip("/").rpartition("/")[2].lower() == found.model.rpartition("/")[2].lower()
    return found.model if same else given


def _require_corners(mark: Fingerprint, found: Fingerprint) -> None:
    same_model = (mark.model, mark.d_model) == (found.model, found.d_model)
    if same_model and mark.corners and found.basis == "raw" and mark.corners != found.corners:
        raise LensMismatchError(
            f"the lens is of an unembedding with the hash {mark.corners[:12]}, but that of "
            f"{found.model} ({found.dtype}) has {str(found.corners)[:12]}. It is another model, or "
            "its weights were processed; load the model raw."
        )


def _proves(others: dict[str, Tensor], view: ModelView, mark: Fingerprint) -> bool:
    """Whether an old file's own unembedding is the model's; raises where it is another."""
    theirs = others.get("unembedding.weight")
    if theirs is None:
        return False
    ours = view.W_U.detach().T
    if theirs.shape == ours.shape:
        same = torch.equal(theirs.to(view.device, ours.dtype), ours)
        gain, bias = others.get("layer_norm.weight"), others.get("layer_norm.bias")
        norm = view.final_norm
        for one, other in ((gain, norm.gain), (bias, norm.bias)):
            same = same and (one is None or torch.equal(one.to(other), other))
        if same:
            return True
    raise LensMismatchError(
        f"the lens's file holds the final norm and unembedding of its model ({mark.model}, "
        f"{tuple(theirs.shape)}), and those of {view.name} ({tuple(ours.shape)}) are others"
    )
