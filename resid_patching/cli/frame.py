"""What every command shares: flags, guarded running, output files, loading, printing."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from resid_patching.errors import HubUnreachableError, ResidPatchingError, ResidPatchingWarning

if TYPE_CHECKING:
    from rich.console import Console

BAD_INPUT, UNEXPECTED, INTERRUPTED = 2, 1, 130


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
        self.exit(BAD_INPUT, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


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
        arguments = (parser or command.build_parser(prog)).parse_args(list(argv))
        if command is None:
            return 0
        with _quiet_libraries(debug):
            command.run(arguments)
        sys.stdout.flush()
        return 0
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else UNEXPECTED
    except KeyboardInterrupt:
        return _fail(prog, "interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has gone; leave without a word, as `head` expects.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ResidPatchingError, OSError) as error:
        if debug:
            traceback.print_exc()
        return _fail(prog, str(error), BAD_INPUT)
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _fail(prog, f"{type(error).__name__}: {error} (--debug shows where)", UNEXPECTED)


def _fail(prog: str, message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"{prog}: error: {printable(line)}", file=sys.stderr)
    return code


def _prepare_streams() -> None:
    """Characters that a terminal or pipe cannot show become escapes instead of a crash."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


@contextlib.contextmanager
def _quiet_libraries(debug: bool) -> Any:
    """Our own warnings as one line each; those of libraries only with --debug."""

    def show(message: Any, category: type[Warning], *_rest: Any) -> None:
        if debug or issubclass(category, ResidPatchingWarning):
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
        if not os.access(path.parent, os.W_OK):
            raise UsageError(f"{path} cannot be written: no permission in {path.parent}")
    if len(set(map(Path.absolute, given))) < len(given):
        raise UsageError(f"{given[0]} was given for two outputs; they need different names")


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


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that give prompts."""
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times"
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
        metavar="TOKEN",
        help="the token scored, leading space included; once, or once for each prompt",
    )
    parser.add_argument(
        "--foil",
        action="append",
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


def printable(text: str) -> str:
    """Text with every control character, line end and unprintable character as an escape."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


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
