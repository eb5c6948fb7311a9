"""Completion of commands and flags in bash and zsh, as a script to print and evaluate."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Iterator
from typing import Any

_SCRIPT = """# bash: eval "$(resid-patching --completion)"; in zsh after bashcompinit
_resid_patching() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" known=""
  case "${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}} $before" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$known" -- "$word"))
}}
complete -o default -F _resid_patching resid-patching
"""


def script(commands: Iterable[str]) -> str:
    """The script of all commands: what may follow each of them, and the choices of each flag."""
    from resid_patching.cli.frame import Parser

    cases: list[tuple[str, Iterable[str]]] = []
    for name in commands:
        module = importlib.import_module(f"resid_patching.cli.{name.replace('-', '_')}")
        parser: Parser = module.build_parser(f"resid-patching {name}")
        cases += [
            (f'*" {flag}"', choices) for flag, choices in _choices(parser) if flag.startswith("-")
        ]
        for sub, inner in _subcommands(parser):
            cases.append((f'"{name} {sub} "*', inner.flags()))
        cases.append((f'"{name} "*', [*dict(_subcommands(parser)), *parser.flags()]))
    unique = dict(reversed(cases))  # the first of equal ones stays
    flags_first = sorted(unique.items(), key=lambda case: not case[0].startswith("*"))
    flags_first.append(("*", [*commands, "--help", "--version", "--completion"]))
    lines = (f'    {pattern}) known="{" ".join(words)}" ;;' for pattern, words in flags_first)
    return _SCRIPT.format(cases="\n".join(lines))


def _subcommands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, Any]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _choices(parser: argparse.ArgumentParser) -> Iterator[tuple[str, Iterable[str]]]:
    """The flags that take one of a few words, with these words."""
    for one in [parser, *dict(_subcommands(parser)).values()]:
        for action in one._actions:
            if action.choices and action.option_strings:
                yield action.option_strings[-1], action.choices
