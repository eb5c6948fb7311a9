"""What every command shares: its parser, guarded running, checks of files, and loading a model."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import logging
import os
import re
import signal
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from resid_patching import processes
from resid_patching.cli.flags import MODEL, OUTPUT, Flags, add_flags, file_name
from resid_patching.errors import (
    HubUnreachableError,
    LostProcessError,
    ResidPatchingError,
    ResidPatchingWarning,
)
from resid_patching.markup import printable

if TYPE_CHECKING:
    from resid_patching.models import ModelView

BAD_INPUT, UNEXPECTED, INTERRUPTED = 2, 1, 130
_LONGEST_MESSAGE = 1000
_INPUT_FILES = ("prompts", "text", "validation", "reference", "source", "pairs")
_OUTPUT_FILES = ("json", "csv", "html", "png", "rows")


class UsageError(ResidPatchingError, ValueError):
    """A flag that cannot be followed."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Prints one line to stderr and exits with 2."""
        _fail(self.prog, f"{message}{self._meant(message)} (see {self.prog} --help)", BAD_INPUT)
        self.exit(BAD_INPUT)

    def flags(self) -> list[str]:
        """Every flag of the parser and of its sub-commands."""
        found = dict.fromkeys(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    found |= dict.fromkeys(parser.flags())
        return list(found)

    def _meant(self, message: str) -> str:
        """The flag, command or choice that was probably meant; nothing where none is near."""
        typed, known = "", []
        if message.startswith("unrecognized arguments: --"):
            typed, known = message.split()[2].partition("=")[0], self.flags()
        elif chosen := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            typed = chosen[1]
            known = re.findall(r"[\w.,-]+", chosen[2].replace(", ", " "))
        near = difflib.get_close_matches(typed, known, 1)
        return f"; did you mean {near[0]}?" if near else ""

    def print_help(self, file: Any = None) -> None:
        """Prints the help; unlike argparse's own, it does not hide that this failed."""
        (file or sys.stdout).write(self.format_help())


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say which model, where and in what state."""
    add_flags(parser, {"model": MODEL}, model=file_name)


def add_command_flags(parser: argparse.ArgumentParser, own: Flags, **types: Any) -> None:
    """Adds a command's own flags, and those of the model and of output."""
    add_flags(parser, own, **types)
    add_model_flags(parser)
    add_flags(parser, {"output": OUTPUT})
    parser.set_defaults(command=parser.prog.removeprefix("resid-patching "))


def command_parser(
    prog: str, description: str, own: Flags, *, epilog: str | None = None, **types: Any
) -> Parser:
    """The parser of a command with flags of its own."""
    parser = Parser(prog=prog, description=description, epilog=epilog)
    add_command_flags(parser, own, **types)
    return parser


# Running


def run_guarded(prog: str, command: Any, argv: Sequence[str]) -> int:
    """Runs a command; errors become one line on stderr and an exit code.

    The command has `build_parser(prog)`, and `run(arguments)`, which prints and writes.
    """
    _prepare_streams()
    debug = "--debug" in argv
    arguments = Namespace()
    try:
        try:
            arguments = command.build_parser(prog).parse_args(list(argv))
        except SystemExit as stop:
            sys.stdout.flush()
            return stop.code if isinstance(stop.code, int) else UNEXPECTED
        _require_files(arguments)
        with _quiet_libraries(debug), _ended_by_launcher():
            command.run(arguments)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt as stop:
        return _fail(prog, ": ".join(["interrupted", *map(str, stop.args)]), INTERRUPTED)
    except BrokenPipeError:
        # Nobody reads our output any more; end silently, as `head` expects.
        _drop_unwritten()
        return 0
    except LostProcessError as error:
        return _fail(prog, str(error), UNEXPECTED)
    except Exception as error:
        if debug:
            traceback.print_exc()
        # A later error says so too where the shipped model stood in for the one that was meant.
        note = getattr(arguments, "stand_in", None)
        said = _told(error) + ("" if note is None else f" ({note})")
        expected = isinstance(error, ResidPatchingError | OSError)
        return _fail(prog, said, BAD_INPUT if expected else UNEXPECTED)


def _told(error: Exception) -> str:
    lost = "standard output cannot be written: " if _drop_unwritten() else ""
    match error:
        case OSError(filename=str(name), strerror=str(why)):
            return f"{lost}{name}: {why}"
        case ResidPatchingError() | OSError():
            return f"{lost}{error}"
    return f"{type(error).__name__}: {error} (--debug shows where)"


def _drop_unwritten() -> bool:
    """Drops what stdout cannot take, or Python would try again at exit; says whether it did."""
    try:
        sys.stdout.flush()
        return False
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True


@contextlib.contextmanager
def _ended_by_launcher() -> Iterator[None]:
    """A launcher ends the other processes when one has ended: that is an error like any other."""
    if not processes.launched():
        yield
        return

    def end(*_about: Any) -> None:
        ignore_launcher()
        raise LostProcessError(
            f"process {os.environ['RANK']} of {os.environ['WORLD_SIZE']} was told to end: another "
            "has ended, or the launcher was stopped. Files that were saved are complete."
        )

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        ignore_launcher()


def ignore_launcher() -> None:
    """From here on a launcher cannot end this process before it has said why it ends."""
    if processes.launched():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _fail(prog: str, message: str, code: int) -> int:
    """One line on stderr, from one process where several were launched; gives the exit code."""
    if not processes.speaks():
        return code
    line = printable(" ".join(message.split()))
    if len(line) > _LONGEST_MESSAGE:  # what to do stands at its end
        half = _LONGEST_MESSAGE // 2
        line = f"{line[:half]} ... {line[-half:]}"
    with contextlib.suppress(OSError):
        print(f"{prog}: error: {line}", file=sys.stderr)
    return code


def _prepare_streams() -> None:
    """Characters that a terminal or pipe cannot show become escapes instead of a crash."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed before the start: `>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        with contextlib.suppress(AttributeError, ValueError, OSError):
            getattr(sys, name).reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def _quiet_libraries(debug: bool) -> Iterator[None]:
    """Our own warnings as one line each; what libraries say only with --debug."""

    def show(message: Any, category: type[Warning], *_rest: Any) -> None:
        if debug or (issubclass(category, ResidPatchingWarning) and _is_first()):
            print(f"warning: {printable(' '.join(str(message).split()))}", file=sys.stderr)

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # A transformers that was imported earlier has not seen the environment.
    transformers = sys.modules.get("transformers")
    bars: Any = transformers.utils.logging if transformers and not debug else None
    hidden = bars is not None and bars.is_progress_bar_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show
        try:
            if bars is not None and hidden:
                bars.disable_progress_bar()
            if not debug:
                logging.disable(logging.WARNING)
            yield
        finally:
            logging.disable(logging.NOTSET)
            if bars is not None and hidden:
                bars.enable_progress_bar()


# Files


def require_writable(*paths: str | None) -> None:
    """Refuses output files that cannot be written, before anything is computed."""
    given = [Path(path) for path in paths if path is not None]
    for path in given:
        if path.is_dir():
            raise UsageError(f"{path} is a folder; give the name of a file")
        if not path.parent.is_dir():
            raise UsageError(f"{path} cannot be written: there is no folder {path.parent}")
        if path.exists() and not os.access(path, os.W_OK):
            raise UsageError(f"{path} cannot be written: it is read-only")
        is_special = path.exists() and not path.is_file()  # a pipe, or a device such as /dev/null
        if not is_special and not os.access(path.parent, os.W_OK):
            raise UsageError(f"{path} cannot be written: no permission in {path.parent}")
    if len(set(map(os.path.realpath, given))) < len(given):
        raise UsageError(f"{given[0]} was given for two outputs; they need different names")


def _require_files(arguments: Namespace) -> None:
    """Refuses outputs that cannot be written or drawn, or that would replace an input."""
    flags = vars(arguments)
    outputs = {name: path for name in _OUTPUT_FILES if (path := flags.get(name)) is not None}
    if not _is_first():
        return
    require_writable(*outputs.values())
    inputs = {}
    for name in _INPUT_FILES:
        given = flags.get(name)
        for path in given if isinstance(given, list) else [given]:
            if isinstance(path, str) and Path(path).is_file():  # in a script it may be a number
                inputs[os.path.realpath(path)] = name
    for name, path in outputs.items():
        if source := inputs.get(os.path.realpath(path)):
            raise UsageError(f"--{name} {path} is the file that --{source} reads; give another")
    if "png" in outputs:
        from resid_patching.plots import require_renderer

        require_renderer()


# The model


def load_model(arguments: Namespace) -> ModelView:
    """Loads the model that the flags ask for.

    Where the shipped model stands in for GPT-2, `arguments.stand_in` becomes the line that says so.
    """
    import torch

    from resid_patching.models import ModelView, load

    arguments.stand_in = None
    try:
        torch.empty(0, device=arguments.device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"device {arguments.device!r} cannot be used: {reason}") from None
    options = {
        "device": arguments.device,
        "dtype": getattr(torch, arguments.dtype),
        "processing": arguments.processing,
        "backend": arguments.backend,
    }
    if arguments.model is not None:
        return ModelView(load(arguments.model, **options))
    try:
        return ModelView(load("gpt2", **options))
    except HubUnreachableError:
        arguments.stand_in = (
            "no --model was given and gpt2 is neither cached nor reachable: this is the shipped "
            "demo model, trained on a toy language"
        )
        return ModelView(load("demo", **options))
