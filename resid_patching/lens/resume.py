"""The state of a fit in one file, replaced as a whole, so that a killed fit can continue.

The file carries a checksum, and the name of the fit that wrote it: a fit that finds another's
state in its folder stops instead of writing over it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from resid_patching.errors import LensFormatError, LensMismatchError
from resid_patching.files import as_json, checksum, read_json, write_bytes
from resid_patching.lens.fingerprint import hash_tensors
from resid_patching.lens.loop import Layer

STATE = "fit_state.safetensors"
STATE_VERSION = 3  # 1 had no checksum; to 2, validation windows lay between the others


@dataclass(frozen=True, eq=False)
class FitState:
    """Where a fit is.

    Attributes:
        step: steps made.
        layers: the translators.
        table: validation KL of the logit lens and of ridge, and the penalties.
        looks: what was found at each look at the validation tokens.
    """

    step: int
    layers: list[Layer]
    table: dict[str, Any]
    looks: list[dict[str, Any]]


def save(folder: Path, state: FitState, identity: dict[str, Any], writer: str | None) -> None:
    """Writes the state.

    Args:
        folder: made where it does not exist.
        state: where the fit is.
        identity: what must be the same for the fit to continue: settings, data, model.
        writer: an id of this fit.

    Raises:
        LensMismatchError: the state in the folder is another fit's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    require_own(folder, writer)
    tensors: dict[str, Tensor] = {}
    numbers: list[Any] = []
    for index, layer in enumerate(state.layers):
        for name in ("weight", "bias", "best_weight", "best_bias"):
            tensors[f"{index}.{name}"] = getattr(layer, name).detach().cpu().clone()
        states = [
            _flat(o, f"{index}.optimizer.{n}", tensors) for n, o in enumerate(layer.optimizers)
        ]
        kept = {
            name: getattr(layer, name) for name in ("kl", "waited", "stopped", "scale", "label")
        }
        numbers.append({**kept, "optimizers": states})
    about = {
        "format": "resid_patching.fit_state",
        "version": STATE_VERSION,
        "writer": writer,
        "identity": identity,
        "step": state.step,
        "table": state.table,
        "looks": state.looks,
        "layers": numbers,
    }
    about["sha256"] = _checksum(about, tensors)
    content = safetensors.torch.save(tensors, {"about": json.dumps(about)})
    write_bytes(folder / STATE, content)


def require_own(folder: Path, writer: str | None) -> None:
    """Raises where the state in a folder was written by another fit.

    Raises:
        LensMismatchError: two fits write to one folder.
        LensFormatError: the file is damaged.
    """
    path = folder / STATE
    if not path.is_file():
        return
    with _errors_name(path), safe_open(str(path), "pt", device="cpu") as file:
        found = _about(file.metadata())
    if found.get("writer") != writer:
        raise LensMismatchError(
            f"another fit has written {path} (step {found.get('step')}) since this one began, and "
            "nothing of it was replaced. Give each fit a folder of its own."
        )


def _checksum(about: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """Of everything that the file says; JSON keeps its numbers to the last bit."""
    rest = {name: value for name, value in about.items() if name != "sha256"}
    return checksum({"about": rest, "tensors": hash_tensors(tensors)})


def _flat(optimizer: Any, prefix: str, tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    """An optimizer's state: its tensors go to the others, its numbers are returned."""
    numbers = []
    for place, state in optimizer.state_dict()["state"].items():
        plain = {}
        for name, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{prefix}.{place}.{name}"] = value.detach().cpu().contiguous().clone()
            else:
                plain[name] = value
        numbers.append({"place": place, "numbers": plain})
    return numbers


def put(about: dict[str, Any], tensors: dict[str, Tensor], layers: list[Layer]) -> FitState:
    """Puts a state that was read into layers that have their optimizers."""
    for index, (layer, numbers) in enumerate(zip(layers, about["layers"], strict=True)):
        for name in ("weight", "bias"):
            getattr(layer, name).copy_(tensors[f"{index}.{name}"])
        for name in ("best_weight", "best_bias"):
            setattr(layer, name, tensors[f"{index}.{name}"].to(layer.weight.device))
        layer.kl, layer.waited = float(numbers["kl"]), int(numbers["waited"])
        layer.stopped = bool(numbers["stopped"])
        for n, optimizer in enumerate(layer.optimizers):
            prefix = f"{index}.optimizer.{n}"
            optimizer.load_state_dict(
                {
                    "state": _unflat(numbers["optimizers"][n], prefix, tensors),
                    "param_groups": optimizer.state_dict()["param_groups"],
                }
            )
    return FitState(about["step"], layers, about["table"], about["looks"])


def _unflat(
    numbers: list[dict[str, Any]], prefix: str, tensors: dict[str, Tensor]
) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for entry in numbers:
        begin = f"{prefix}.{entry['place']}."
        state = {k.removeprefix(begin): t for k, t in tensors.items() if k.startswith(begin)}
        found[int(entry["place"])] = {**state, **entry["numbers"]}
    return found


def read(folder: Path) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """What the file holds: what it says of itself, and its tensors.

    Raises:
        LensFormatError: the file is damaged.
    """
    path = folder / STATE
    if not path.is_file():
        return None, {}
    with _errors_name(path):
        # Read once, which safe_open does not: the fit may put a newer state there meanwhile.
        content = path.read_bytes()
        tensors = safetensors.torch.load(content)
        header = content[8 : 8 + int.from_bytes(content[:8], "little")]
        about = _about(read_json(header.decode())["__metadata__"])
    if about["version"] != 1 and about.get("sha256") != _checksum(about, tensors):
        raise LensFormatError(f"{path} is damaged: its checksum does not match")
    return about, tensors


@contextlib.contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise LensFormatError(f"{path} cannot be read as the state of a fit: {error}") from error


def _about(metadata: dict[str, str] | None) -> dict[str, Any]:
    """What the file says of itself."""
    about = read_json((metadata or {})["about"])
    if about["format"] != "resid_patching.fit_state":
        raise ValueError(f"it is of the format {about['format']!r}")
    if about["version"] not in range(1, STATE_VERSION + 1):
        raise ValueError(
            f"it is of version {about['version']}, this package reads 1 to {STATE_VERSION}"
        )
    return about


def require_same(folder: Path, about: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raises where a state is of another fit.

    Raises:
        LensMismatchError: of one with other settings, data or of another model.
    """
    theirs, ours = about["identity"], as_json(identity)
    for name, left, right in differing_fields(theirs, ours):
        if name == "data" and about["version"] < STATE_VERSION:
            raise LensMismatchError(
                f"{folder / STATE} is of an earlier version of this package, whose validation "
                "windows lay between the training windows, or of other text. Start again in "
                "another folder."
            )
        raise LensMismatchError(
            f"{folder / STATE} is of a fit with {name} = {left!r}, but this one has {right!r}. Use "
            "the same settings to continue it, or another folder to start again."
        )


def differing_fields(left: dict[str, Any], right: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Entries that differ, inside entries too, by name."""
    for name in sorted(left.keys() | right.keys()):
        ours, theirs = left.get(name), right.get(name)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            for inner, *values in differing_fields(ours, theirs):
                yield f"{name} {inner}", *values
        elif ours != theirs:
            yield name, ours, theirs


def remove_finished(folder: Path, record: dict[str, Any]) -> None:
    """Takes away the state of the fit that a lens came from, now that the lens is written."""
    try:
        about, _ = read(folder)
    except LensFormatError:
        return
    fit = record.get("fit", {})
    ours = (record.get("data_sha256"), fit.get("steps_made"), fit.get("seed"))
    if about is not None:
        identity = about["identity"]
        if (identity.get("data"), about["step"], identity.get("seed")) == ours:
            (folder / STATE).unlink(missing_ok=True)


def best_translators(layers: list[Layer]) -> tuple[Tensor, Tensor]:
    """The best translators of all layers, A [layer, d_model, d_model] and b [layer, d_model]."""
    return (
        torch.stack([layer.best_weight for layer in layers]),
        torch.stack([layer.best_bias for layer in layers]),
    )
