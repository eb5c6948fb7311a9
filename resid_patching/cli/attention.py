"""`resid-patching attention`: where chosen heads look, as a table, a picture, JSON and CSV."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from typing import Any

import resid_patching as rp
from resid_patching.cli.flags import PROMPTS
from resid_patching.cli.frame import Parser, command_parser, load_model
from resid_patching.cli.inputs import read_bare_prompts
from resid_patching.cli.output import body_of, deliver
from resid_patching.show.report import drawn, section, token_facts

_MOST_PICTURES = 4


def build_parser(prog: str) -> Parser:
    """The flags of `attention`."""
    heads = {"nargs": "+", "required": True, "metavar": "L.H", "help": "heads, such as 0.1 2.3"}
    return command_parser(
        prog,
        "Where chosen heads look from the last token of each prompt, and their whole attention "
        "patterns as pictures. A large weight says that a head reads from a token, not that what "
        "it reads matters: ablate the head to learn that.",
        {
            "--heads": heads,
            "--top N = 3": "keys shown for each head",
            "--query P = -1": "the position that looks, from 0, or from the end if negative",
            **PROMPTS,
        },
    )


def run(arguments: Namespace) -> None:
    """Reads the patterns and shows where each head looks."""
    prompts = read_bare_prompts(arguments)
    view = load_model(arguments)
    captured = rp.capture(view, prompts, prepend_bos=arguments.prepend_bos)
    patterns = rp.attention_patterns(captured, arguments.heads)
    names = patterns.headings()
    looks: Any = patterns.looks(arguments.top, query=arguments.query)
    frame = looks[list(names)].set_axis(list(names.values()), axis=1)
    shown = range(min(_MOST_PICTURES, len(prompts)))
    cut = f"Pictures of the first {_MOST_PICTURES} prompts."
    caveats = (cut,) if len(prompts) > _MOST_PICTURES else ()
    part = section(patterns, facts=token_facts(patterns.token_texts), caveats=caveats)
    table = dataclasses.replace(part.tables[0], frame=frame, bar="weight")
    draws = tuple(drawn("attention", patterns, batch=n) for n in shown)
    deliver(
        arguments,
        view,
        patterns.provenance,
        "Attention patterns",
        [dataclasses.replace(part, tables=(table,), draws=draws)],
        body_of(patterns, prompts=prompts),
        patterns.to_frame,
        prompts={"prompt": prompts},
    )
