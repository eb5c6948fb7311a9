"""What was found out about a model, kept for as long as it stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from resid_patching.models.view import ModelView

T = TypeVar("T")


class Memory(Generic[T]):
    """Findings about models, each kept with the state of the model that it is about.

    Args:
        find: makes the finding for a state that it was not made for yet.
    """

    def __init__(self, find: Callable[[ModelView], T]) -> None:
        self._find = find

    def of(self, view: ModelView) -> T:
        """The finding about a model in the state that the view is of."""
        findings = view.state.findings
        if self not in findings:
            findings[self] = self._find(view)
        return findings[self]
