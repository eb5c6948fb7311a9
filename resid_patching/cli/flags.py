"""Flags as a table: what is typed on the left, what it means on the right.

add_flags(parser, {
"targets TARGET*": "attn.6, mlp.0, 9.9 (a head), ...",
"--prompt TEXT...": "a prompt; may be given several times",
"--by component|head|neuron = head": "the grain of the rows",
"--top N = 15": "rows shown",
"--mlps freeze|recompute !": "required",
"--joint": "a switch",
"--heads": {"nargs": "+"},           as argparse takes it
"model": {"--device NAME": "..."},   a group under its title; flags of "one of" exclude each other
})
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

Flags = Mapping[str, Any]

_SPEC = re.compile(r"(--)?([\w-]+)(?: ([^\s*.]+?))?(\.\.\.|\*)?(?: = (\S+))?( !)?")


def add_flags(
    parser: argparse._ActionsContainer, specs: Flags, **types: Callable[[str], Any]
) -> None:
    """Adds flags to a parser or a group of one.

    N is a whole number from 1, P a position. `types` give what reads other values, by the flag.
    """
    for spec, text in specs.items():
        if isinstance(text, str):
            _add_flag(parser, spec, text, types)
        elif spec.startswith("--"):
            parser.add_argument(spec, **text)
        elif spec == "one of":
            add_flags(parser.add_mutually_exclusive_group(), text, **types)
        else:
            add_flags(parser.add_argument_group(spec), text, **types)


def _add_flag(
    parser: argparse._ActionsContainer, spec: str, text: str, types: Mapping[str, Any]
) -> None:
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
    if reads is None and "|" in takes and takes.islower():
        return {"metavar": takes, "choices": tuple(takes.split("|"))}
    return {"metavar": takes, "type": reads or _READS.get(takes, str)}


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


def position_or(*names: str) -> Callable[[str], int | str]:
    """What reads a position, as a number or by a name."""

    def read(text: str) -> int | str:
        if text in names:
            return text
        try:
            return int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is neither a position nor {', '.join(names)}"
            ) from None

    return read


def positive(text: str) -> float:
    """A number above 0, as a flag's value."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def given_text(argument: str) -> str:
    """A text as it was typed, whatever the locale: arguments are UTF-8."""
    if not any("\ud800" <= character <= "\udfff" for character in argument):
        return argument
    try:  # Python keeps bytes that the locale cannot read as halves of characters.
        return os.fsencode(argument).decode("utf-8")
    except UnicodeError:
        raise argparse.ArgumentTypeError(f"{argument!r} is not UTF-8 text") from None


def file_name(name: str) -> str:
    """A name that a file can have."""
    if not name:
        raise argparse.ArgumentTypeError("this is an empty name; give the name of a file")
    if "\0" in name:
        raise argparse.ArgumentTypeError(f"{name!r} has a NUL character; no file has such a name")
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{name!r} cannot be a file's name") from None
    return name


_READS: dict[str, Callable[[str], Any]] = {
    "N": count,
    "P": int,
    "TEXT": given_text,
    "TOKEN": given_text,
    **dict.fromkeys(("FILE", "FOLDER", "FILE|DATASET"), file_name),
}

# Flags of several commands

PROMPTS = {
    "--prompt TEXT...": "a prompt; may be given several times",
    "--prompts FILE": "a UTF-8 file, one prompt a line, or prompt<TAB>answer<TAB>foil",
}
MODEL = {
    "--model NAME": "a hub name, a Hugging Face folder, or demo (unset: gpt2 where it can be "
    "loaded, else the shipped demo model)",
    "--device NAME = cpu": "the device that the model runs on",
    "--dtype float32|float64|bfloat16|float16 = float32": "dtype of the weights",
    "--processing raw|folded = raw": "weights as they are, or with TransformerLens's folding and "
    "centring",
    "--backend auto|hooked|bridge = auto": "HookedTransformer or TransformerBridge; auto: the "
    "first that can load the model",
    "--no-bos": {
        "dest": "prepend_bos",
        "action": "store_false",
        "default": None,
        "help": "do not put a beginning-of-sequence token before the prompts",
    },
}
DEBUG = {"--debug": "show tracebacks and library warnings"}
OUTPUT = {
    "--json FILE": "write the whole result as JSON",
    "--csv FILE": "write the whole result as CSV, long form",
    "--html FILE": "write one HTML page: pictures, and a table that sorts",
    "--png FILE": "write the main picture (needs kaleido)",
    **DEBUG,
}


def answer_flags(answer: str = "", foil: str = "") -> dict[str, str]:
    """The flags that say which tokens are scored, with what holds where each is unset."""
    each = "once, or once for each prompt"
    return {
        "--answer TOKEN...": f"the token scored, leading space included; {each}{answer}",
        "--foil TOKEN...": f"the token it is scored against; {each}{foil}",
    }
