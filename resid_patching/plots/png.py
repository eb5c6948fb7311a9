"""Pictures as PNG files, where a renderer is installed."""

from __future__ import annotations

import importlib
from typing import Any

from resid_patching.errors import MissingExtraError


def require_renderer() -> None:
    """Refuses where nothing can draw a PNG.

    Raises:
        MissingExtraError: plotly, or the package kaleido that draws its figures, is missing.
    """
    for name in ("plotly", "kaleido"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise MissingExtraError(
                f"a PNG is drawn by plotly and kaleido, and {name} is not installed; "
                "pip install plotly kaleido, or write an HTML page instead"
            ) from error


def png(figure: Any, *, scale: float = 2.0) -> bytes:
    """A figure as the bytes of a PNG file.

    Args:
        figure: a plotly figure.
        scale: pixels of the file for each pixel of the figure.

    Raises:
        MissingExtraError: there is no renderer, or it cannot run.
    """
    require_renderer()
    try:
        return figure.to_image(format="png", scale=scale)
    except (RuntimeError, ValueError, OSError) as error:  # kaleido needs a browser
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise MissingExtraError(
            f"kaleido could not draw the picture: {reason} (it needs Chrome or Chromium)"
        ) from error
