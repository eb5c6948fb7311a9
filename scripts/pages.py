"""Runs what the README and the docs show, and writes the outputs that they show.

    python scripts/pages.py

A page is run from its first block to its last, in a folder that holds docs/examples: Python blocks
in one process, and each line of a bash block. Behind `<!-- output -->` stands what the block before
it printed. `<!-- not run: REASON -->` in front of a block leaves it out.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resid_patching.cli import main as command_line

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLES = Path("docs", "examples")
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]

_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+?) -->\n)?"
    r"```(?P<kind>python|bash)\n(?P<source>.*?)^```$"
    r"(?:\n+<!-- output -->\n```text\n(?P<output>.*?)^```$)?",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """A block of a page.

    Attributes:
        page: the file.
        line: its first line, from 0.
        kind: python or bash.
        source: what stands in it.
        output: what it prints, where the page shows that.
        reason: why it is not run, if it is not.
        span: where its output stands in the page's text.
    """

    page: Path
    line: int
    kind: str
    source: str
    output: str | None
    reason: str | None
    span: tuple[int, int]

    def run(self, names: dict[str, Any]) -> str:
        """What the block prints.

        Args:
            names: those of the Python blocks before it, and then also its own.
        """
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if self.kind == "python":
                lines = "\n" * self.line + self.source
                exec(compile(lines, str(self.page), "exec"), names)
            else:
                for line in self.source.replace("\\\n", " ").splitlines():
                    self._run_line(line)
        return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())

    def _run_line(self, line: str) -> None:
        program, *arguments = shlex.split(line, comments=True)
        if program == "python":
            script = [sys.executable, str(REPOSITORY / arguments[0]), *arguments[1:]]
            print(subprocess.run(script, check=True, stdout=subprocess.PIPE, text=True).stdout)
        elif program != "resid-patching" or command_line(arguments):
            raise RuntimeError(f"{self.page}: {line}")


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of a page, in turn."""
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        line = text[: found.start("source")].count("\n")
        kind, source, output, reason = found.group("kind", "source", "output", "reason")
        yield Block(page, line, kind, source, output, reason, found.span("output"))


@contextlib.contextmanager
def folder_of_examples() -> Iterator[None]:
    """A folder for what blocks write, with the files that they read, is the current one."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        shutil.copytree(REPOSITORY / EXAMPLES, EXAMPLES)
        yield


def outputs_of(page: Path) -> Iterator[tuple[Block, str]]:
    """Runs a page; yields each block that is run with what it printed."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with folder_of_examples():
        for block in blocks_of(page):
            if block.reason is None:
                yield block, block.run(names)


def main() -> None:
    """Writes the outputs of the pages that show any."""
    os.environ["TQDM_DISABLE"] = "1"
    for page in PAGES:
        if any(block.output is not None for block in blocks_of(page)):
            text = page.read_text(encoding="utf-8")
            for block, printed in reversed(list(outputs_of(page))):
                if block.output is not None:
                    text = text[: block.span[0]] + printed + text[block.span[1] :]
            page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
