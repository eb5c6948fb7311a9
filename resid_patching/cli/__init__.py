"""The command line: `resid-patching COMMAND`, one file a command.

Nothing here imports torch until a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import SimpleNamespace

from resid_patching.cli import completion
from resid_patching.cli.frame import Parser, run_guarded
from resid_patching.version import __version__

COMMANDS = {
    "dla": "direct logit attribution: what each component wrote towards a token",
    "ablate": "ablation: what replacing a part of the model does to a metric",
    "path-patch": "path patching: what a part of the model tells another, and nothing else",
    "logit-lens": "the logit lens: what each layer would say next, read as the last one is",
    "tuned-lens": "the tuned lens: fit, eval, show, convert",
    "attention": "attention patterns: where chosen heads look, with their tokens",
    "stream": "the running total: write norms and shares, survival of the start, exactness",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the arguments; None for the process's own.

    Returns:
        The exit code: 0, or 2 for bad input, 1 for an unexpected error, 130 when interrupted.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in COMMANDS:
        command = importlib.import_module(f"resid_patching.cli.{argv[0].replace('-', '_')}")
        return run_guarded(f"resid-patching {argv[0]}", command, argv[1:])
    if argv == ["--completion"]:
        sys.stdout.write(completion.script(COMMANDS))
        return 0
    alone = SimpleNamespace(build_parser=_build_parser, run=lambda _: None)
    return run_guarded("resid-patching", alone, argv)


def _build_parser(prog: str) -> Parser:
    parser = Parser(
        prog=prog,
        description="What did this part of the model do? Analyses of the residual stream.",
        epilog="Each command explains itself: resid-patching COMMAND --help",
    )
    names = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        names.add_parser(name, help=text)
    parser.add_argument(
        "--completion", action="store_true", help="print a script that completes in bash and zsh"
    )
    parser.add_argument("--version", action="version", version=f"resid-patching {__version__}")
    return parser
