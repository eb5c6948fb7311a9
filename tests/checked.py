"""The checker of annotations, for pytest's --jaxtyping-packages."""

from __future__ import annotations

from typing import Any

from beartype import beartype


def checked(function: Any) -> Any:
    """Let beartype check every call, but not those of functions that are made inside functions.

    A check is compiled when a function is made. For these that is at every call of the function
    around them, which took half the time of all tests.
    """
    return function if "<locals>" in function.__qualname__ else beartype(function)
