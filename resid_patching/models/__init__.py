"""Loading models, reading them, and checking that they can be read."""

from resid_patching.models.guards import Processing, Report, report, require
from resid_patching.models.load import DEMO_FOLDER, load
from resid_patching.models.memory import Memory
from resid_patching.models.norm import Norm
from resid_patching.models.precision import (
    exact,
    float64_home,
    name_of,
    remedy,
    require_finite_at,
    uncast,
)
from resid_patching.models.view import (
    HookedModel,
    ModelView,
    Reader,
    as_view,
    compute_dtype,
    take,
)

__all__ = [
    "DEMO_FOLDER",
    "HookedModel",
    "Memory",
    "ModelView",
    "Norm",
    "Processing",
    "Reader",
    "Report",
    "as_view",
    "compute_dtype",
    "exact",
    "float64_home",
    "load",
    "name_of",
    "remedy",
    "report",
    "require",
    "require_finite_at",
    "take",
    "uncast",
]
