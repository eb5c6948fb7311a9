"""Sweeps that several processes share, and whose rows a file keeps."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resid_patching import processes
from resid_patching.cli.frame import UsageError

if TYPE_CHECKING:
    from resid_patching.rows import RowFile


def add_rows_flag(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that keeps a sweep's rows."""
    parser.add_argument(
        "--rows",
        metavar="FILE",
        help="keep each row in this file as it comes; where it holds rows of this sweep already, "
        "go on with them",
    )


@dataclass(frozen=True)
class Sharing:
    """Who works the sweep, and where its rows go.

    Attributes:
        team: the processes of this launch.
        file: the rows' file, in the first process; None in others, or where none was asked for.
    """

    team: processes.Team
    file: RowFile | None

    def options(self, part: int = 0) -> dict[str, Any]:
        """What `ablate` is told of it.

        Args:
            part: the sweep's number among those of the command.
        """
        from resid_patching.ablation import Rows

        rows = None if self.file is None else Rows(self.file, part)
        return {"team": self.team, "rows": rows}


def join(arguments: argparse.Namespace) -> Sharing:
    """Joins the launch, and reads the rows that are there, before a model is loaded.

    Raises:
        UsageError: the file of rows cannot be read.
        ResultFormatError: it is damaged, or no file of rows.
        LostProcessError: the other processes did not come.
    """
    team = processes.team()
    opened: list[RowFile] = []

    def read() -> None:
        from resid_patching.rows import RowFile

        if arguments.rows is None:
            return
        try:
            opened.append(RowFile(arguments.rows))
        except OSError as error:
            why = error.strerror or error
            raise UsageError(f"{arguments.rows} cannot be read: {why}") from None

    team.first(read)
    return Sharing(team, opened[0] if opened else None)
