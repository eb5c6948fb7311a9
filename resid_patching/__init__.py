"""resid_patching: what did this part of the model do?

Analyses of the residual stream for TransformerLens models:

    import resid_patching as rp

    model = rp.load("gpt2")  # or "demo", a folder, or your own HookedTransformer / Bridge
    run = rp.capture(model, "When Mary and John went to the store, John gave a drink to")
    dla = rp.direct_logit_attribution(run, answer=" Mary", foil=" John", by="head")
    dla.top(5)
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from resid_patching import errors as errors
from resid_patching.version import __version__

if TYPE_CHECKING:
    from resid_patching.ablation import (
        Effect,
        Linearised,
        Mean,
        Path,
        Resample,
        Zero,
        ablate,
        ablated,
        attention,
        heads,
        linearised_paths,
        measure,
        neurons,
        streams,
        windows_of,
        writers,
    )
    from resid_patching.address import Edge, parse, parse_edge
    from resid_patching.attribution import Attribution, direct_logit_attribution
    from resid_patching.decomposition import Parts, decompose
    from resid_patching.errors import ResidPatchingError, ResidPatchingWarning
    from resid_patching.lens.fit import fit_tuned_lens
    from resid_patching.lens.logit import logit_lens
    from resid_patching.lens.readout import LensReadout
    from resid_patching.lens.tuned import TunedLens
    from resid_patching.metrics import (
        Metric,
        any_of,
        custom,
        kl,
        logit,
        logit_diff,
        loss,
        prob,
        top1_change,
    )
    from resid_patching.models import ModelView, load
    from resid_patching.paths import Receivers, edges, inputs, receivers
    from resid_patching.patterns import AttentionPatterns, attention_patterns
    from resid_patching.processes import Team, team
    from resid_patching.prompt_sets import (
        PromptPairs,
        differences,
        indirect_object_prompts,
        read_pairs,
    )
    from resid_patching.prompts import Prompts, windows
    from resid_patching.result import (
        Axis,
        Comparison,
        Provenance,
        Result,
        compare,
        load_result,
    )
    from resid_patching.run import Run, capture
    from resid_patching.stream import Overwrite, StreamReport, WriteScale, stream_report

# Imported when first used, so that `--help` and `import resid_patching` need no torch.
_HOME = {
    "Effect": "ablation",
    "Linearised": "ablation",
    "Mean": "ablation",
    "Path": "ablation",
    "Resample": "ablation",
    "Zero": "ablation",
    "ablate": "ablation",
    "ablated": "ablation",
    "attention": "ablation",
    "heads": "ablation",
    "linearised_paths": "ablation",
    "measure": "ablation",
    "neurons": "ablation",
    "streams": "ablation",
    "windows_of": "ablation",
    "writers": "ablation",
    "PromptPairs": "prompt_sets",
    "differences": "prompt_sets",
    "indirect_object_prompts": "prompt_sets",
    "read_pairs": "prompt_sets",
    "Receivers": "paths",
    "edges": "paths",
    "inputs": "paths",
    "receivers": "paths",
    "Metric": "metrics",
    "any_of": "metrics",
    "custom": "metrics",
    "kl": "metrics",
    "logit": "metrics",
    "logit_diff": "metrics",
    "loss": "metrics",
    "prob": "metrics",
    "top1_change": "metrics",
    "Edge": "address",
    "parse": "address",
    "parse_edge": "address",
    "AttentionPatterns": "patterns",
    "attention_patterns": "patterns",
    "Attribution": "attribution",
    "direct_logit_attribution": "attribution",
    "Parts": "decomposition",
    "decompose": "decomposition",
    "ResidPatchingError": "errors",
    "ResidPatchingWarning": "errors",
    "logit_lens": "lens.logit",
    "LensReadout": "lens.readout",
    "TunedLens": "lens.tuned",
    "fit_tuned_lens": "lens.fit",
    "ModelView": "models",
    "load": "models",
    "Team": "processes",
    "team": "processes",
    "Prompts": "prompts",
    "windows": "prompts",
    "Axis": "result",
    "Provenance": "result",
    "Comparison": "result",
    "Result": "result",
    "compare": "result",
    "load_result": "result",
    "Run": "run",
    "capture": "run",
    "Overwrite": "stream",
    "StreamReport": "stream",
    "WriteScale": "stream",
    "stream_report": "stream",
}

__all__ = [
    "__version__",
    "errors",
    "Effect",
    "Linearised",
    "Mean",
    "Path",
    "Resample",
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
    "PromptPairs",
    "differences",
    "indirect_object_prompts",
    "read_pairs",
    "Receivers",
    "edges",
    "inputs",
    "receivers",
    "Metric",
    "any_of",
    "custom",
    "kl",
    "logit",
    "logit_diff",
    "loss",
    "prob",
    "top1_change",
    "Edge",
    "parse",
    "parse_edge",
    "AttentionPatterns",
    "attention_patterns",
    "Attribution",
    "direct_logit_attribution",
    "Parts",
    "decompose",
    "ResidPatchingError",
    "ResidPatchingWarning",
    "logit_lens",
    "LensReadout",
    "TunedLens",
    "fit_tuned_lens",
    "ModelView",
    "load",
    "Team",
    "team",
    "Prompts",
    "windows",
    "Axis",
    "Provenance",
    "Comparison",
    "Result",
    "compare",
    "load_result",
    "Run",
    "capture",
    "Overwrite",
    "StreamReport",
    "WriteScale",
    "stream_report",
]


# Old names that work for one more version, each with its new name.
_RENAMED = {"readers": "receivers", "Readers": "Receivers"}


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        message = f"resid_patching.{name} is now resid_patching.{_RENAMED[name]}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return __getattr__(_RENAMED[name])
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_HOME[name]}")
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
