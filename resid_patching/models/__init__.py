"""Loading models, reading them, and checking that they can be read."""

from resid_patching.models.guards import (
    READOUT_TOLERANCE,
    ProcessingState,
    Report,
    note_on_hooks,
    report,
    require,
)
from resid_patching.models.load import DEMO_FOLDER, load
from resid_patching.models.memory import Memory
from resid_patching.models.norm import Norm
from resid_patching.models.precision import (
    TOLERANCE,
    exact,
    float64_home,
    name_of,
    remedy,
    require_finite_at,
    uncast,
)
from resid_patching.models.view import (
    HookedModel,
    HookFunction,
    Model,
    ModelView,
    as_view,
    compute_dtype,
    take,
)

__all__ = [
    "DEMO_FOLDER",
    "READOUT_TOLERANCE",
    "TOLERANCE",
    "HookedModel",
    "Memory",
    "Model",
    "ModelView",
    "Norm",
    "ProcessingState",
    "HookFunction",
    "Report",
    "as_view",
    "compute_dtype",
    "exact",
    "float64_home",
    "note_on_hooks",
    "load",
    "name_of",
    "remedy",
    "report",
    "require",
    "require_finite_at",
    "take",
    "uncast",
]
