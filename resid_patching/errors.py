"""One class for each way to fail.

Every error is a `ResidPatchingError` and also the built-in that fits, so that callers may catch
either. Messages say what was asked, what was found and what to do.
"""

from __future__ import annotations

import sys
import warnings


class ResidPatchingError(Exception):
    """Base of every error that this package raises on purpose."""


class AddressError(ResidPatchingError, ValueError):
    """A text that names no place in the model, or a place this model does not have."""


class CausalityError(AddressError):
    """An edge whose receiver reads before its sender writes."""


class ModelNotFoundError(ResidPatchingError, FileNotFoundError):
    """No such model: neither a folder, nor a name that can be resolved."""


class HubUnreachableError(ResidPatchingError, ConnectionError):
    """The model is not in the local cache and the hub does not answer."""


class UnsupportedModelError(ResidPatchingError, NotImplementedError):
    """An analysis that cannot be right for this model."""


class StreamMismatchError(UnsupportedModelError):
    """What the model calls its sublayer outputs is not what it adds to the stream."""


class ReadoutMismatchError(UnsupportedModelError):
    """Final norm and unembedding, as we read them, do not give the model's logits."""


class HeadMismatchError(UnsupportedModelError):
    """The heads and their bias do not sum to the attention layer's output."""


class NeuronMismatchError(UnsupportedModelError):
    """The neurons and their bias do not sum to the MLP's output."""


class NotFiniteError(UnsupportedModelError):
    """Weights, or states on the prompts given, that are NaN or infinite."""


class ModelChangedError(ResidPatchingError, RuntimeError):
    """The model has changed since the run was captured."""


class TrainingModeError(ResidPatchingError, RuntimeError):
    """The model is in training mode, where dropout makes two equal runs differ."""


class HookNotFiredError(ResidPatchingError, RuntimeError):
    """A hook that the analysis relies on was never called."""


class PromptError(ResidPatchingError, ValueError):
    """A prompt that the model cannot be run on."""


class PositionError(ResidPatchingError, IndexError):
    """A position that a prompt does not have."""


class TokenError(ResidPatchingError, ValueError):
    """An answer or foil that is not one token of the model's vocabulary."""


class CacheMismatchError(ResidPatchingError, ValueError):
    """A cache that does not belong to the prompts or the model it is used with."""


class GapError(ResidPatchingError, ArithmeticError):
    """The parts do not add up to what the model computed."""


class AblationError(ResidPatchingError, TypeError, ValueError):
    """An ablation whose kind is missing, or lacks what the kind needs."""


class MetricError(ResidPatchingError, ValueError):
    """A function used as a metric does not return one number for each prompt."""


class ResultFormatError(ResidPatchingError, ValueError):
    """A file that does not hold a result of this package."""


class LensMismatchError(ResidPatchingError, ValueError):
    """A lens and a model, or two readouts, that do not belong together."""


class LensBasisError(LensMismatchError):
    """A lens in another basis than the model's weights, or a conversion that is not exact."""


class LensFormatError(ResidPatchingError, ValueError):
    """A file that holds no lens, or one that is damaged or unsafe to read."""


class LensNotFoundError(ResidPatchingError, FileNotFoundError):
    """No lens at this path."""


class OutOfDataError(ResidPatchingError, EOFError):
    """The texts hold fewer tokens than were asked for."""


class DivergedError(ResidPatchingError, ArithmeticError):
    """A number in a fit is not finite; the message names the layer and the step."""


class LostProcessError(ResidPatchingError, RuntimeError):
    """One of several processes has ended, so the others stop."""


class UnequalProcessesError(ResidPatchingError, ValueError):
    """The processes were given different models, data or settings."""


class SweepMismatchError(ResidPatchingError, ValueError):
    """The file holds the rows of a different sweep."""


class MissingExtraError(ResidPatchingError, ImportError):
    """An optional package is needed and not installed; the message names the extra to install."""


class ResidPatchingWarning(UserWarning):
    """Base of every warning of this package."""


class AnswerWarning(ResidPatchingWarning):
    """An answer, or the last token of a prompt, is probably not the token you meant."""


class BosWarning(ResidPatchingWarning):
    """A beginning-of-sequence setting that overrides the tokenizer's own."""


class SpecialTokenWarning(ResidPatchingWarning):
    """A token that the tokenizer puts behind every text, where the prompt's last token is read."""


class PaddingWarning(ResidPatchingWarning):
    """Tokens that were taken for padding, or look like it."""


class BackendWarning(ResidPatchingWarning):
    """The first way to load the model failed, and a second one was used."""


class UnverifiedLensWarning(ResidPatchingWarning):
    """A lens from a file that cannot prove which model it belongs to."""


class IdleProcessWarning(ResidPatchingWarning):
    """Some processes stand idle, because there are fewer parts of the work than processes."""


class SmallDenominatorWarning(ResidPatchingWarning):
    """A ratio whose denominator is close to zero."""


class PathWarning(ResidPatchingWarning):
    """Receivers written together, of which one overrides what the others pass on."""


# This package, and what stands between its functions and their callers.
_NOT_THE_CALLER = ("resid_patching", "contextlib", "torch", "jaxtyping", "beartype")


def warn(message: str, category: type[Warning]) -> None:
    """Warns at the caller's own line, however many frames lie between.

    Args:
        message: what was seen and what to do.
        category: one of the warnings above.
    """
    level, frame = 1, sys._getframe()
    while frame is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _is_ours(module: str) -> bool:
    """Whether a module is of this package, or wraps its functions."""
    return module.partition(".")[0] in _NOT_THE_CALLER
