"""What was found about a model, kept for as long as it stays as it was."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from resid_patching.models.view import ModelView

T = TypeVar("T")


class Memory(Generic[T]):
    """Findings about models, each kept while its model lives and is as it was found.

    Args:
        find: makes the finding for a model that is new or has changed.
    """

    def __init__(self, find: Callable[[ModelView], T]) -> None:
        self._find = find
        self._known: weakref.WeakKeyDictionary[Any, tuple[tuple[int, ...], T]] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, view: ModelView) -> T:
        """The finding for a model as it is now."""
        fingerprint = view.fingerprint()
        known = self._known.get(view.model)
        if known is None or known[0] != fingerprint:
            known = self._known[view.model] = (fingerprint, self._find(view))
        return known[1]
