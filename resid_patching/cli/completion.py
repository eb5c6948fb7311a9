"""Completion of commands and flags in bash and zsh, as a script to print and evaluate."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable
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
    choices: dict[str, Iterable[str]] = {}
    known: dict[str, Iterable[str]] = {}
    for name in commands:
        module = importlib.import_module(f"resid_patching.cli.{name.replace('-', '_')}")
        parser = module.build_parser(f"resid-patching {name}")
        inner = _subcommands(parser)
        for one in (parser, *inner.values()):
            for action in one._actions:
                if action.choices and action.option_strings:
                    choices.setdefault(f'*" {action.option_strings[-1]}"', action.choices)
        known |= {f'"{name} {sub} "*': one.flags() for sub, one in inner.items()}
        known[f'"{name} "*'] = [*inner, *parser.flags()]
    known["*"] = [*commands, "--help", "--version", "--completion"]
    cases = {**choices, **known}  # a flag's choices before what else may stand there
    lines = (f'    {pattern}) known="{" ".join(words)}" ;;' for pattern, words in cases.items())
    return _SCRIPT.format(cases="\n".join(lines))


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, Any]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}
