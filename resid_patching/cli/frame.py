"""What every command shares: flags, guarded running, output files, loading, printing."""

from __future__ import annotations

import argparse
import contextlib
import csv
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from resid_patching import processes
from resid_patching.errors import (
    HubUnreachableError,
    LostProcessError,
    ResidPatchingError,
    ResidPatchingWarning,
)
from resid_patching.markup import printable

if TYPE_CHECKING:
    from rich.console import Console

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
        _fail(self.prog, f"{message} (see {self.prog} --help)", BAD_INPUT)
        self.exit(BAD_INPUT)

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
        return _fail(prog, f"{lost}{error}", BAD_INPUT)
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _fail(prog, f"{type(error).__name__}: {error} (--debug shows where)", UNEXPECTED)


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
    group.add_argument(
        "--model",
        metavar="NAME",
        help="a hub name, a Hugging Face folder, or demo (unset: gpt2 where it can be loaded, "
        "else the shipped demo model)",
    )
    group.add_argument("--device", default="cpu", help="where the model goes (default: cpu)")
    group.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "float64", "bfloat16", "float16"),
        help="dtype of the weights (default: float32)",
    )
    group.add_argument(
        "--processing",
        default="raw",
        choices=("raw", "folded"),
        help="weights as they are, or with TransformerLens's folding and centring (default: raw)",
    )
    group.add_argument(
        "--backend",
        default="auto",
        choices=("auto", "hooked", "bridge"),
        help="HookedTransformer or TransformerBridge (default: the first that can)",
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
    group = parser.add_argument_group("output")
    group.add_argument("--json", metavar="FILE", help="write the whole result as JSON")
    group.add_argument("--csv", metavar="FILE", help="write the whole result as CSV, long form")
    group.add_argument(
        "--html", metavar="FILE", help="write one HTML page: pictures, and a table that sorts"
    )
    group.add_argument("--png", metavar="FILE", help="write the main picture (needs kaleido)")
    group.add_argument("--debug", action="store_true", help="show tracebacks and library warnings")


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
    for name in (*_INPUT_FILES, *_OUTPUT_FILES, "model", "lens", "out"):
        if isinstance(path := flags.get(name), str) and "\0" in path:
            raise UsageError(f"--{name} {path!r} holds a NUL character; no file has such a name")


def _require_inputs_kept(arguments: argparse.Namespace) -> None:
    """Refuses to write a result over a file that the command reads."""
    flags = vars(arguments)
    read = {
        os.path.realpath(path): name
        for name in _INPUT_FILES
        if isinstance(path := flags.get(name), str) and Path(path).is_file()
    }
    for name in _OUTPUT_FILES:
        path = flags.get(name)
        if path is not None and (reader := read.get(os.path.realpath(path))) is not None:
            raise UsageError(f"--{name} {path} is the file that --{reader} reads; give another")


def read_lines(path: str) -> list[str]:
    """The non-empty lines of a UTF-8 file.

    Raises:
        UsageError: missing, a folder, unreadable, not UTF-8, or empty.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        raise UsageError(f"{path} holds no text")
    return [line.removesuffix("\r") for line in lines]


def given_text(argument: str) -> str:
    """A text as it was typed, whatever the locale: arguments are UTF-8.

    Raises:
        argparse.ArgumentTypeError: they are not.
    """
    if not any("\ud800" <= character <= "\udfff" for character in argument):
        return argument
    try:  # Python keeps bytes that the locale cannot read as halves of characters.
        return os.fsencode(argument).decode("utf-8")
    except UnicodeError:
        raise argparse.ArgumentTypeError(f"{argument!r} is not UTF-8 text") from None


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that give prompts."""
    parser.add_argument(
        "--prompt",
        action="append",
        type=given_text,
        metavar="TEXT",
        help="a prompt; may be given several times",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="a UTF-8 file, one prompt a line, or prompt<TAB>answer<TAB>foil",
    )


def add_answer_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say which tokens a metric scores."""
    parser.add_argument(
        "--answer",
        action="append",
        type=given_text,
        metavar="TOKEN",
        help="the token scored, leading space included; once, or once for each prompt",
    )
    parser.add_argument(
        "--foil",
        action="append",
        type=given_text,
        metavar="TOKEN",
        help="the token it is scored against; once, or once for each prompt",
    )


def read_prompts(
    arguments: argparse.Namespace,
) -> tuple[list[str], list[str] | None, list[str] | None]:
    """The prompts that the flags give, with an answer and a foil for each where given.

    Raises:
        UsageError: no prompt, an unreadable file, or answers that do not match the prompts.
    """
    prompts, answers, foils = list(arguments.prompt or []), arguments.answer, arguments.foil
    if arguments.prompts is not None:
        rows = [line.split("\t") for line in read_lines(arguments.prompts)]
        columns = {len(row) for row in rows}
        if len(columns) > 1 or max(columns) > 3 or (max(columns) > 1 and prompts):
            raise UsageError(
                f"{arguments.prompts}: every line is a prompt, or prompt<TAB>answer, or "
                "prompt<TAB>answer<TAB>foil, all alike"
            )
        prompts += [row[0] for row in rows]
        if columns == {2} or columns == {3}:
            if answers or foils:
                raise UsageError(
                    f"{arguments.prompts} holds the answers; leave out --answer and --foil"
                )
            answers = [row[1] for row in rows]
            foils = [row[2] for row in rows] if columns == {3} else None
    if not prompts:
        raise UsageError('no prompt was given; use --prompt "..." or --prompts FILE')
    return prompts, spread("answer", answers, prompts), spread("foil", foils, prompts)


def spread(name: str, given: list[str] | None, prompts: list[str]) -> list[str] | None:
    """One token for each prompt, from a flag given once or once for each.

    Raises:
        UsageError: given another number of times.
    """
    if given is None or len(given) == len(prompts):
        return given
    if len(given) == 1:
        return given * len(prompts)
    raise UsageError(
        f"--{name} was given {len(given)} times for {len(prompts)} prompts; give it once, or "
        "once for each prompt"
    )


def count(text: str) -> int:
    """A whole number from 1, as a flag's value."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too few; give 1 or more")
    return value


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
        return load("demo", **options), note


def quoted(text: str) -> str:
    """A token in quotes, so that its leading space is seen."""
    return f'"{printable(text)}"'


def console() -> Console:
    """A console that prints literally: rich on a terminal, plain when redirected."""
    from rich.console import Console

    class LiteralConsole(Console):
        def on_broken_pipe(self) -> None:
            """Leaves a closed pipe to `run_guarded`; rich itself would exit with 1."""
            raise BrokenPipeError

        def render_str(self, text: str, **options: Any) -> Any:
            """Text with control characters as escapes, whatever file or model it names."""
            return super().render_str("\n".join(map(printable, text.split("\n"))), **options)

    width = None if sys.stdout.isatty() else 100
    return LiteralConsole(
        file=sys.stdout, markup=False, emoji=False, highlight=False, width=width, soft_wrap=False
    )


def fancy() -> bool:
    """Whether the output is a terminal that shows block characters."""
    if not sys.stdout.isatty():
        return False
    try:
        "█▏│".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def shades(out: Console) -> bool:
    """Whether cells are shaded: with few colours, text would vanish in its background."""
    return fancy() and not out.no_color and out.color_system in ("256", "truecolor")


def csv_text(frame: Any) -> str:
    """A frame as CSV.

    All texts are in quotes: pandas leaves a token with a carriage return bare, which ends a line.
    """
    return frame.to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC)


def bar(value: float, largest: float, width: int = 16) -> str:
    """A bar that grows left for negative values and right for positive ones."""
    block, axis = ("█", "│") if fancy() else ("#", "|")
    share = 0.0 if largest <= 0 else min(1.0, abs(value) / largest)
    filled = block * round(share * width)
    return f"{filled if value < 0 else '':>{width}}{axis}{filled if value > 0 else '':<{width}}"


def print_line(out: Console, name: str, *items: str, gap: str = "  ") -> None:
    """A named line of items, wrapped between them."""
    width, line = max(40, out.width), f"{name:<8} "
    for number, item in enumerate(items):
        if number and len(line) + len(item) > width:
            out.print(line.rstrip(), soft_wrap=True)
            line = " " * 9
        line += item + gap
    out.print(line.rstrip(), soft_wrap=True)


def print_model(out: Console, view: Any, origin: Any, stand_in: str | None) -> None:
    """The lines that say which model ran, and in what state."""
    if stand_in is not None:
        print_line(out, "note", *stand_in.split(": "))
    print_line(
        out,
        "model",
        f"{printable(origin.model)} ({origin.backend}, TransformerLens {origin.transformer_lens}),",
        f"{origin.processing}, {origin.dtype}, {view.n_layers} layers of {view.n_heads} heads",
        gap=" ",
    )


def print_tokens(out: Console, prompts: Any, *, rows: int = 4, tokens: int = 60) -> None:
    """The tokens of the first prompts, each with its position."""
    for texts in prompts.token_texts[:rows]:
        items = [f"{p} {quoted(text)}" for p, text in enumerate(texts[:tokens])]
        if len(texts) > tokens:
            items.append(f"... {len(texts) - tokens} more tokens")
        print_line(out, "tokens", *items)
    if len(prompts) > rows:
        print_line(out, "", f"... {len(prompts) - rows} more prompts")


def new_table(*columns: str) -> Any:
    """An empty table: the first column and unnamed ones to the left, numbers to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD if fancy() else box.ASCII2, pad_edge=False, show_edge=False)
    for number, name in enumerate(columns):
        left = number == 0 or not name
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    return table
