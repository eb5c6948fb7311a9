"""The engine: run the model again from the first changed layer, many variants at a time."""

from resid_patching.rerun.edits import (
    Edit,
    Fill,
    Variant,
    clean_hook,
    require_site,
    site_value,
    stage,
)
from resid_patching.rerun.engine import Reading, Rerun, Route, rerun

__all__ = [
    "Edit",
    "Fill",
    "Reading",
    "Rerun",
    "Route",
    "Variant",
    "clean_hook",
    "require_site",
    "rerun",
    "site_value",
    "stage",
]
