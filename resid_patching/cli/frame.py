"""What every command shares: flags, guarded running, output files, loading."""

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from resid_patching import processes
from resid_patching.cli.flags import add_flags
from resid_patching.errors import (
    HubUnreachableError,
    LostProcessError,
    ResidPatchingError,
    ResidPatchingWarning,
)
from resid_patching.markup import printable

BAD_INPUT, UNEXPECTED, INTERRUPTED = 2, 1, 130
_LONGEST_MESSAGE = 1000
_INPUT_FILES = ("prompts", "text", "validation", "reference", "source", "pairs")
_OUTPUT_FILES = ("json", "csv", "html", "png", "rows")


class Command(Protocol):
    """A command's module."""

    def build_parser(self, prog: str) -> argparse.ArgumentParser:
        """Its flags."""
        ...

    def run(self, arguments: argparse.Namespace) -> None:
        """Parses nothing, prints, and writes the files asked for."""
        ...


class UsageError(ResidPatchingError, ValueError):
    """A flag that cannot be followed."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Prints one line to stderr and exits with 2."""
        near = self._meant(message)
        meant = f"; did you mean {near}?" if near else ""
        _fail(self.prog, f"{message}{meant} (see {self.prog} --help)", BAD_INPUT)
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
        """The flag, command or choice that a mistyped one is near to; nothing where none is."""
        if message.startswith("unrecognized arguments: --"):
            typed = message.split()[2].partition("=")[0]
            near = difflib.get_close_matches(typed, self.flags(), 1)
            return near[0] if near else ""
        if chosen := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            choices = re.findall(r"[\w.,-]+", chosen[2].replace(", ", " "))
            near = difflib.get_close_matches(chosen[1], choices, 1)
            return near[0] if near else ""
        return ""

    def print_help(self, file: Any = None) -> None:
        """Prints the help; unlike argparse's own, it does not hide that this failed."""
        (file or sys.stdout).write(self.format_help())


def run_guarded(
    prog: str, command: Any, argv: Sequence[str], parser: argparse.ArgumentParser | None = None
) -> int:
    """Runs a command; errors become one line on stderr and an exit code.

    Args:
        prog: how messages call the command.
        command: the command's module, or None to parse alone.
        argv: its arguments.
        parser: the parser where there is no command.

    Returns:
        The exit code.
    """
    _prepare_streams()
    debug = "--debug" in argv
    arguments = argparse.Namespace()
    try:
        try:
            arguments = (parser or command.build_parser(prog)).parse_args(list(argv))
        except SystemExit as stop:
            sys.stdout.flush()
            return stop.code if isinstance(stop.code, int) else UNEXPECTED
        if command is None:
            return 0
        _require_file_names(arguments)
        _require_inputs_kept(arguments)
        with _quiet_libraries(debug), _ended_by_launcher():
            command.run(arguments)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt as stop:
        return _fail(prog, ": ".join(["interrupted", *map(str, stop.args)]), INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has gone; leave without a word, as `head` expects.
        _drop_unwritten()
        return 0
    except LostProcessError as error:
        return _fail(prog, str(error), UNEXPECTED)
    except (ResidPatchingError, OSError) as error:
        if debug:
            traceback.print_exc()
        lost = "standard output cannot be written: " if _drop_unwritten() else ""
        return _fail(prog, f"{lost}{error}{_stand_in(arguments)}", BAD_INPUT)
    except Exception as error:
        if debug:
            traceback.print_exc()
        told = f"{type(error).__name__}: {error} (--debug shows where)"
        return _fail(prog, f"{told}{_stand_in(arguments)}", UNEXPECTED)


def _stand_in(arguments: argparse.Namespace) -> str:
    """What an error says further where the shipped model stood in for the one that was meant."""
    note = getattr(arguments, "stand_in", None)
    return "" if note is None else f" ({note})"


def _drop_unwritten() -> bool:
    """Drops what stdout cannot take, which Python would try again at exit; whether there is any."""
    try:
        sys.stdout.flush()
        return False
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True


@contextlib.contextmanager
def _ended_by_launcher() -> Any:
    """A launcher tells the other processes to end when one has: an error like any other."""
    if not processes.launched():
        yield
        return

    def end(*_about: Any) -> None:
        ignore_launcher()
        raise LostProcessError(
            f"process {os.environ['RANK']} of {os.environ['WORLD_SIZE']} was told to end: another "
            "has ended, or the launcher was stopped. What was saved is whole."
        )

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        ignore_launcher()


def ignore_launcher() -> None:
    """What a process says as it ends is not cut off by a launcher that tells it to."""
    if processes.launched():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


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
    """Characters that a terminal or pipe cannot show become escapes instead of a crash.

    A stream that was closed before the start (`>&-`) swallows what is written to it.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


@contextlib.contextmanager
def _quiet_libraries(debug: bool) -> Any:
    """Our own warnings as one line each; those of libraries only with --debug."""

    def show(message: Any, category: type[Warning], *_rest: Any) -> None:
        ours = issubclass(category, ResidPatchingWarning) and os.environ.get("RANK", "0") == "0"
        if debug or ours:
            print(f"warning: {printable(' '.join(str(message).split()))}", file=sys.stderr)

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not debug:
        logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show
        try:
            with contextlib.nullcontext() if debug else _no_loading_bars():
                yield
        finally:
            logging.disable(logging.NOTSET)


@contextlib.contextmanager
def _no_loading_bars() -> Any:
    """Bars of a transformers that was imported before the environment could silence it."""
    transformers = sys.modules.get("transformers")
    bars = None if transformers is None else transformers.utils.logging
    if bars is None or not bars.is_progress_bar_enabled():
        yield
        return
    bars.disable_progress_bar()
    try:
        yield
    finally:
        bars.enable_progress_bar()


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say which model, where and in what state."""
    group = parser.add_argument_group("model")
    add_flags(
        group,
        {
            "--model NAME": "a hub name, a Hugging Face folder, or demo (unset: gpt2 where it can "
            "be loaded, else the shipped demo model)",
            "--device NAME = cpu": "where the model goes",
            "--dtype float32|float64|bfloat16|float16 = float32": "dtype of the weights",
            "--processing raw|folded = raw": "weights as they are, or with TransformerLens's "
            "folding and centring",
            "--backend auto|hooked|bridge = auto": "HookedTransformer or TransformerBridge; auto: "
            "the first that can",
        },
    )
    group.add_argument(
        "--no-bos",
        dest="prepend_bos",
        action="store_false",
        default=None,
        help="do not put a beginning-of-sequence token before the prompts",
    )


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for files and debugging."""
    add_flags(
        parser.add_argument_group("output"),
        {
            "--json FILE": "write the whole result as JSON",
            "--csv FILE": "write the whole result as CSV, long form",
            "--html FILE": "write one HTML page: pictures, and a table that sorts",
            "--png FILE": "write the main picture (needs kaleido)",
            "--debug": "show tracebacks and library warnings",
        },
    )


def require_writable(*paths: str | None) -> None:
    """Refuses output files that cannot be written, before anything is computed.

    Raises:
        UsageError: a folder is missing, a folder stands in the way, or it cannot be written.
    """
    given = [Path(path) for path in paths if path is not None]
    for path in given:
        if path.is_dir():
            raise UsageError(f"{path} is a folder; give the name of a file")
        if not path.parent.is_dir():
            raise UsageError(f"{path} cannot be written: there is no folder {path.parent}")
        if path.exists() and not os.access(path, os.W_OK):
            raise UsageError(f"{path} cannot be written: it is read-only")
        if not _is_special(path) and not os.access(path.parent, os.W_OK):
            raise UsageError(f"{path} cannot be written: no permission in {path.parent}")
    if len(set(map(os.path.realpath, given))) < len(given):
        raise UsageError(f"{given[0]} was given for two outputs; they need different names")


def _is_special(path: Path) -> bool:
    """Whether it is a pipe or a device, such as /dev/null: nothing is made beside it."""
    return path.exists() and not path.is_file()


def _require_file_names(arguments: argparse.Namespace) -> None:
    """Refuses names that no file has."""
    flags = vars(arguments)
    of_files = (*_INPUT_FILES, *_OUTPUT_FILES, "model", "lens", "out")
    for name, path in ((flag, path) for flag in of_files for path in _names(flags.get(flag))):
        if not path and name != "model":
            raise UsageError(f"--{name} was given an empty name; give that of a file")
        if "\0" in path:
            raise UsageError(f"--{name} {path!r} holds a NUL character; no file has such a name")
        try:
            os.fsencode(path)
        except UnicodeEncodeError:
            raise UsageError(f"--{name} {path!r} is not text that a file's name can be") from None


def _require_inputs_kept(arguments: argparse.Namespace) -> None:
    """Refuses to write a result over a file that the command reads."""
    flags = vars(arguments)
    read = {
        os.path.realpath(path): name
        for name in _INPUT_FILES
        for path in _names(flags.get(name))
        if Path(path).is_file()
    }
    for name in _OUTPUT_FILES:
        path = flags.get(name)
        if path is not None and (source := read.get(os.path.realpath(path))) is not None:
            raise UsageError(f"--{name} {path} is the file that --{source} reads; give another")


def _names(given: Any) -> list[str]:
    """The names of files that a flag gives; elsewhere one of its name may give a number."""
    several = given if isinstance(given, list) else [given]
    return [path for path in several if isinstance(path, str)]


def load_model(arguments: argparse.Namespace) -> tuple[Any, str | None]:
    """Loads the model that the flags ask for.

    Returns:
        The model, and a line that says so where the shipped model stands in for GPT-2.

    Raises:
        UsageError: an impossible device.
        ResidPatchingError: the model cannot be loaded.
    """
    import torch

    from resid_patching.models import load

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
        return load(arguments.model, **options), None
    try:
        return load("gpt2", **options), None
    except HubUnreachableError:
        note = (
            "no --model was given and gpt2 is neither cached nor reachable: this is the shipped "
            "demo model, trained on a toy language"
        )
        arguments.stand_in = note  # for errors that come later
        return load("demo", **options), note
