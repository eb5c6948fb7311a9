"""Long sweeps: their progress bar, the processes that share them, and the file of their rows."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import resid_patching as rp

if TYPE_CHECKING:
    from resid_patching.rows import RowFile

ROWS = {
    "--rows FILE": "keep each row in this file as it comes; where it holds rows of this sweep "
    "already, continue from them"
}


class Progress:
    """A bar on stderr over (target, prompt) pairs; off when stderr is no terminal.

    Args:
        shown: whether it is this process that shows it.
    """

    def __init__(self, *, shown: bool = True) -> None:
        self.shown = shown
        self.bar: Any = None
        self.n_prompts = 0

    def __enter__(self) -> Progress:
        from tqdm import tqdm

        # Short work ends before the bar would appear.
        off = None if self.shown else True
        self.bar = tqdm(file=sys.stderr, disable=off, delay=2, unit="run", leave=False)
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def expect(self, n_prompts: int) -> None:
        """Sets how many prompts there are, or about are, in all."""
        self.n_prompts = n_prompts

    def ticker(self, run: rp.Run, n_variants: int) -> Callable[[int], None]:
        """What an ablation of a run's prompts calls when variants of a chunk are done."""
        from resid_patching.rerun.engine import prompt_chunks

        self.bar.total = max(self.n_prompts, len(run)) * n_variants
        chunks = [rows.stop - rows.start for rows in prompt_chunks(run, 0)]
        seen = 0

        def tick(n: int) -> None:
            nonlocal seen
            chunk = min(seen // max(1, n_variants), len(chunks) - 1)
            seen += n
            self.bar.update(n * chunks[chunk])

        return tick


def join(arguments: argparse.Namespace) -> tuple[rp.Team, RowFile | None]:
    """Joins the launch, and reads the rows that are there, before a model is loaded.

    Returns:
        The processes of this launch; and the file of --rows, in the first of them alone.

    Raises:
        OSError, ResultFormatError: the file cannot be read, is damaged, or holds no rows.
        LostProcessError: the other processes did not come.
    """
    team, opened = rp.team(), []

    def read() -> None:
        from resid_patching.rows import RowFile

        if arguments.rows is not None:
            opened.append(RowFile(arguments.rows))

    team.first(read)
    return team, opened[0] if opened else None
