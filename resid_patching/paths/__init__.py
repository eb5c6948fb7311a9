"""Path patching: what one route through the stream carries, in closed form where it can be."""

from resid_patching.paths.closed import MLPs
from resid_patching.paths.patching import Patched, patch_paths
from resid_patching.paths.readers import (
    Readers,
    inputs,
    reader_set,
    readers,
    require_readers,
    require_senders,
    view_of,
)

__all__ = [
    "MLPs",
    "Patched",
    "Readers",
    "view_of",
    "inputs",
    "patch_paths",
    "reader_set",
    "readers",
    "require_readers",
    "require_senders",
]
