"""Long sweeps: their progress bar, the processes that share them, and the file of their rows."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import resid_patching as rp

ROWS = {
    "--rows FILE": "save each row to this file as soon as it is found; if the file already holds "
    "rows of this sweep, continue from them"
}


class Progress:
    """A bar on stderr over (target, prompt) pairs; off when stderr is no terminal."""

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


def join(arguments: Namespace) -> tuple[rp.Team, Callable[[int], Any]]:
    """The processes of this launch, and what tells `ablate` where the rows of a part are kept.

    The first process alone keeps rows. Those that are there are read before a model is loaded.
    """
    from resid_patching.ablation import Rows
    from resid_patching.rows import RowFile

    team, opened = rp.team(), []

    def read() -> None:
        if arguments.rows is not None:
            opened.append(RowFile(arguments.rows))

    team.first(read)
    return team, lambda part: Rows(opened[0], part) if opened else None
