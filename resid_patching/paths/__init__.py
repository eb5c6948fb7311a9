"""Path patching: what one route through the stream carries, in closed form where it can be."""

from resid_patching.paths.closed import MLPs
from resid_patching.paths.edges import EdgeSet, edges, find_edges, is_edge
from resid_patching.paths.patching import Patched, patch_paths
from resid_patching.paths.receivers import (
    Receivers,
    inputs,
    receiver_set,
    receivers,
    require_receivers,
    require_senders,
    view_of,
)
from resid_patching.paths.together import patch_together

__all__ = [
    "EdgeSet",
    "MLPs",
    "Patched",
    "Receivers",
    "edges",
    "find_edges",
    "is_edge",
    "view_of",
    "inputs",
    "patch_paths",
    "patch_together",
    "receiver_set",
    "receivers",
    "require_receivers",
    "require_senders",
]
