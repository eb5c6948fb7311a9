"""What is shown in a Jupyter notebook without being asked for: a progress bar."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


@contextlib.contextmanager
def bar(total: int | None, unit: str) -> Iterator[Callable[[int], object] | None]:
    """A bar while the block runs, in a notebook; nowhere else.

    Args:
        total: how many units there are, or about are; None for no bar.
        unit: what is counted.

    Yields:
        What to call with the number of units just done; None where there is no bar.
    """
    if total is None or not in_notebook():
        yield None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, unit=unit, delay=1, leave=False) as shown:
        yield shown.update
