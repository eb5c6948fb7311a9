"""Lenses in files: ours, and the tuned-lens package's.

Ours is a folder with two files:

    params.safetensors   resid_pre.0.weight [d_model d_model], resid_pre.0.bias, ..., sketch,
                         body; the configuration once more, as metadata
    config.json          format version, the model's fingerprint, site, how the lens was fitted,
                         validation KL by layer beside the logit lens's, sha256 of the parameters

Each is written to a temporary name and renamed, the parameters first. A process that is killed
between the two leaves new parameters beside an old config.json; the copy inside the parameters
then is the one that counts, so there is always a lens that loads. No base model inside.

Damage is noticed: the parameters are compared with their checksum, and the two copies of the
configuration to one another. Every file is data: pickled objects are refused.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from resid_patching.errors import LensFormatError, LensNotFoundError
from resid_patching.files import read_json, write_bytes, write_text
from resid_patching.lens import legacy, resume
from resid_patching.lens.fingerprint import Fingerprint, hash_tensors
from resid_patching.lens.legacy import require_numbers
from resid_patching.models import DEMO_FOLDER, ModelView
from resid_patching.version import __version__

if TYPE_CHECKING:
    from resid_patching.lens.tuned import TunedLens

LENS_VERSION = 2  # 1 knew nothing of the model's layers before its readout
PARAMS, CONFIG = "params.safetensors", "config.json"


@dataclass(frozen=True, eq=False)
class Stored:
    """What a file holds.

    Attributes:
        weight: A [layer, d_model, d_model].
        bias: b [layer, d_model].
        fingerprint: the model it belongs to.
        site: what it reads at each layer.
        sketch: of the model's readout, or None.
        body: of the model's layers, or None.
        record: how it was fitted.
    """

    weight: Tensor
    bias: Tensor
    fingerprint: Fingerprint
    site: str
    sketch: Tensor | None
    body: Tensor | None
    record: dict[str, Any]


def save(lens: TunedLens, folder: str | os.PathLike[str], format: str) -> None:
    """Writes a lens; see `TunedLens.save`.

    Raises:
        ValueError: an unknown format.
    """
    if format not in ("resid_patching", "tuned-lens"):
        raise ValueError(f"format is resid_patching or tuned-lens, got {format!r}")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    if format == "tuned-lens":
        legacy.save(lens, target)
        resume.remove_finished(target, lens.record)
        return
    tensors = _tensors(lens)
    config = {
        "format": "resid_patching.tuned_lens",
        "version": LENS_VERSION,
        "resid_patching": __version__,
        "site": lens.site,
        "dtype": str(lens.weight.dtype).removeprefix("torch."),
        "fingerprint": lens.fingerprint.as_dict(),
        "record": lens.record,
        "params_sha256": hash_tensors(tensors),
    }
    text = json.dumps(config, indent=1, ensure_ascii=False, allow_nan=False)
    metadata = {"config": text}
    write_bytes(target / PARAMS, safetensors.torch.save(tensors, metadata))
    write_text(target / CONFIG, text + "\n")
    resume.remove_finished(target, lens.record)


def _tensors(lens: TunedLens) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for label, weight, bias in zip(lens.labels, lens.weight, lens.bias, strict=True):
        tensors[f"{label}.weight"] = weight.detach().cpu().contiguous().clone()
        tensors[f"{label}.bias"] = bias.detach().cpu().contiguous().clone()
    for name in ("sketch", "body"):
        if (tensor := getattr(lens, name)) is not None:
            tensors[name] = tensor.cpu().contiguous()
    return tensors


def folder_of(name: str | os.PathLike[str]) -> Path:
    """The folder of a lens by its name; `demo` is the one shipped with the demo model."""
    return DEMO_FOLDER / "lens" if name == "demo" else Path(name)


def read(folder: str | os.PathLike[str], view: ModelView) -> Stored:
    """Reads a lens in either format; see `TunedLens.load`."""
    target = folder_of(folder)
    if target.is_file():
        raise LensFormatError(
            f"{target} is a file; a lens is a folder with {CONFIG} and {PARAMS} (or the "
            "tuned-lens package's params.pt)"
        )
    if not target.is_dir():
        raise LensNotFoundError(f"there is no lens at {target}: {_near(target)}")
    if (target / PARAMS).is_file():
        return _read_ours(target)
    if (target / legacy.PARAMS).is_file():
        found = legacy.read(target, view)
        mark, sketch = found.fingerprint, found.sketch
        return Stored(found.weight, found.bias, mark, "resid_pre", sketch, None, found.record)
    names = ", ".join(sorted(p.name for p in target.iterdir())[:8]) or "nothing"
    raise LensNotFoundError(
        f"{target} holds no lens: neither {PARAMS} nor {legacy.PARAMS}; it holds {names}"
    )


def _near(target: Path) -> str:
    parent = target.parent
    while not parent.is_dir():
        parent = parent.parent
    names = ", ".join(sorted(p.name for p in parent.iterdir() if p.is_dir())[:8])
    return f"{parent.resolve()} has the folders {names}" if names else f"{parent} has no folders"


def _read_ours(folder: Path) -> Stored:
    tensors, inside = _read_params(folder / PARAMS)
    digest = hash_tensors(tensors)
    copies = (_config_in(folder / CONFIG), inside)
    ours = [c for c in copies if c is not None and c.get("params_sha256") == digest]
    if not ours:
        raise LensFormatError(
            f"{folder / PARAMS} is damaged: its parameters are not those that were written"
        )
    if ours[0] != ours[-1]:
        raise LensFormatError(
            f"{folder / CONFIG} is not what was written: it differs from the copy in {PARAMS}"
        )
    return _checked_lens(folder, tensors, ours[0])


def _read_params(path: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    try:
        with safe_open(str(path), "pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            metadata = file.metadata() or {}
        found = read_json(metadata.get("config", "null"))
    except (SafetensorError, ValueError, OSError) as error:
        raise LensFormatError(f"{path} is no safetensors file that can be read: {error}") from error
    return tensors, found if isinstance(found, dict) else None


def _config_in(path: Path) -> dict[str, Any] | None:
    try:
        found = read_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise LensFormatError(f"{path} is no JSON: {error}") from error
    return found if isinstance(found, dict) else None


def _checked_lens(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Stored:
    if config.get("format") != "resid_patching.tuned_lens":
        raise LensFormatError(f"{folder} holds {config.get('format')!r}, which is no tuned lens")
    if config.get("version") not in (1, LENS_VERSION):
        raise LensFormatError(
            f"{folder} is of format version {config.get('version')}; this version of the package "
            f"reads 1 and {LENS_VERSION}"
        )
    try:
        fields = {f.name for f in dataclasses.fields(Fingerprint)}
        given = config["fingerprint"]
        mark = Fingerprint(**{name: given[name] for name in fields})
        names = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
        names.sort(key=lambda name: int(name.rpartition(".")[2]))
        if config["site"] == "resid_pre":  # its rows are resid_pre.0, resid_post.0, ...
            names.sort(key=lambda name: not name.startswith("resid_pre"))
        weight = torch.stack([tensors[f"{name}.weight"] for name in names])
        bias = torch.stack([tensors[f"{name}.bias"] for name in names])
        if weight.shape != (mark.n_layers, mark.d_model, mark.d_model):
            raise ValueError(f"{tuple(weight.shape)} parameters for {mark.n_layers} layers")
        require_numbers(weight, bias)
        sketch, body = tensors.get("sketch"), tensors.get("body")
        return Stored(weight, bias, mark, config["site"], sketch, body, dict(config["record"]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise LensFormatError(f"{folder} is incomplete or damaged: {error!r}") from error
