"""Prompts, answers and numbers as flags and files give them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resid_patching.cli.flags import add_flags
from resid_patching.cli.frame import UsageError

if TYPE_CHECKING:
    from resid_patching.models import ModelView


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
    add_flags(
        parser,
        {
            "--prompt TEXT...": "a prompt; may be given several times",
            "--prompts FILE": "a UTF-8 file, one prompt a line, or prompt<TAB>answer<TAB>foil",
        },
    )


def add_answer_flags(parser: argparse.ArgumentParser, answer: str = "", foil: str = "") -> None:
    """Adds the flags that say which tokens are scored.

    Args:
        parser: where.
        answer: what holds where it is unset.
        foil: likewise.
    """
    what = {
        "--answer TOKEN...": ("the token scored, leading space included", answer),
        "--foil TOKEN...": ("the token it is scored against", foil),
    }
    texts = {
        spec: f"{text}; once, or once for each prompt" + (f" ({unset})" if unset else "")
        for spec, (text, unset) in what.items()
    }
    add_flags(parser, texts)


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


def with_swept(view: ModelView, named: list[Any], sweep: str | None) -> list[Any]:
    """The parts that were named, then those of --sweep that were not."""
    from resid_patching.ablation import heads, streams, writers
    from resid_patching.address import MLP, Attn

    match sweep:
        case "heads":
            swept: list[Any] = list(heads(view))
        case "layers":
            swept = [writer for writer in writers(view) if isinstance(writer, Attn | MLP)]
        case "streams":
            swept = list(streams(view))
        case _:
            swept = []
    return named + [site for site in swept if site not in named]
