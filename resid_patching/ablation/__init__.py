"""Ablation: what replacing a part of the model does, the kind named by the caller."""

from resid_patching.ablation.ablating import ablate, measure
from resid_patching.ablation.attending import attention
from resid_patching.ablation.effect import Effect
from resid_patching.ablation.held import ablated
from resid_patching.ablation.kinds import Kind, Mean, Path, Resample, Zero
from resid_patching.ablation.linearised import Linearised, linearised_paths
from resid_patching.ablation.sharing import Rows
from resid_patching.ablation.targets import (
    Targets,
    heads,
    neurons,
    streams,
    windows_of,
    writers,
)
from resid_patching.rerun import Route

__all__ = [
    "Effect",
    "Kind",
    "Linearised",
    "Mean",
    "Path",
    "Resample",
    "Route",
    "Rows",
    "Targets",
    "Zero",
    "ablate",
    "ablated",
    "attention",
    "heads",
    "linearised_paths",
    "measure",
    "neurons",
    "streams",
    "windows_of",
    "writers",
]
