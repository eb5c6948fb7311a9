"""Flags as a table: what is typed on the left, what it means on the right.

add_flags(parser, {
"targets TARGET*": "attn.6, mlp.0, 9.9 (a head), ...",
"--prompt TEXT...": "a prompt; may be given several times",
"--by component|head|neuron = head": "the grain of the rows",
"--top N = 15": "rows shown",
"--mlps freeze|recompute !": "required",
"--joint": "a switch",
})
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

_SPEC = re.compile(r"(--)?([\w-]+)(?: ([^\s*.]+?))?(\.\.\.|\*)?(?: = (\S+))?( !)?")


def add_flags(
    parser: argparse._ActionsContainer, specs: Mapping[str, str], **types: Callable[[str], Any]
) -> None:
    """Adds flags.

    Args:
        parser: a parser or a group of one.
        specs: each flag and its help; see the module. N is a whole number from 1, P a position.
        types: what reads a flag's value, by the flag's name.
    """
    for spec, text in specs.items():
        match = _SPEC.fullmatch(spec)
        assert match is not None, spec
        dashes, name, takes, many, default, required = match.groups()
        options: dict[str, Any] = {"help": text}
        if required:
            options["required"] = True
        if takes is None:
            options["action"] = "store_true"
        else:
            options |= _value_of(takes, types.get(name.replace("-", "_")))
        if default is not None:
            options["default"] = options.get("type", str)(default)
            options["help"] = f"{text} (default: {default})"
        if many:
            options |= {"nargs": "*"} if many == "*" else {"action": "append"}
        parser.add_argument(f"{dashes or ''}{name}", **options)


def _value_of(takes: str, reads: Callable[[str], Any] | None) -> dict[str, Any]:
    known = {"N": count, "P": int, "TEXT": given_text, "TOKEN": given_text}
    if reads is None and "|" in takes and takes.islower():
        return {"metavar": takes, "choices": tuple(takes.split("|"))}
    return {"metavar": takes, "type": reads or known.get(takes, str)}


# What reads a value


def count(text: str) -> int:
    """A whole number from 1, as a flag's value."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too few; give 1 or more")
    return value


def whole(text: str) -> int:
    """A whole number from 0, as a flag's value."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value


def positive(text: str) -> float:
    """A number above 0, as a flag's value."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return value


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
