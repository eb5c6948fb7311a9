"""Path patching: what one route through the stream carries, in closed form where it can be."""

from resid_patching.paths.closed import MLPs
from resid_patching.paths.patching import Patched, patch_paths
from resid_patching.paths.readers import (
    Readers,
    as_view,
    inputs,
    reader_set,
    readers,
    require_readers,
    require_senders,
)

__all__ = [
    "MLPs",
    "Patched",
    "Readers",
    "as_view",
    "inputs",
    "patch_paths",
    "reader_set",
    "readers",
    "require_readers",
    "require_senders",
]
