"""`resid-patching attention`: where chosen heads look, as a table, a picture, JSON and CSV."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from resid_patching.cli.flags import add_flags
from resid_patching.cli.frame import (
    Parser,
    UsageError,
    add_model_flags,
    add_output_flags,
    load_model,
)
from resid_patching.cli.inputs import add_prompt_flags, read_prompts
from resid_patching.cli.output import body_of, deliver, model_text, require_files

_MOST_PICTURES = 4


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The flags of `attention`."""
    parser = Parser(
        prog=prog,
        description="Where chosen heads look from the last token of each prompt, and their whole "
        "attention patterns as pictures. A large weight says that a head reads from a token, not "
        "that what it reads matters: ablate the head to learn that.",
    )
    parser.add_argument(
        "--heads", nargs="+", required=True, metavar="L.H", help="heads, such as 0.1 2.3"
    )
    add_flags(
        parser,
        {
            "--top N = 3": "keys of each head",
            "--query P = -1": "the position that looks, from 0, or from the end if negative",
        },
    )
    add_prompt_flags(parser)
    add_model_flags(parser)
    add_output_flags(parser)
    parser.set_defaults(answer=None, foil=None)
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Reads the patterns and shows where each head looks."""
    prompts, answers, _ = read_prompts(arguments)
    if answers is not None:
        raise UsageError(f"{arguments.prompts}: attention reads no answers; give one prompt a line")
    require_files(arguments)
    model, stand_in = load_model(arguments)

    from resid_patching.patterns import attention_patterns
    from resid_patching.run import capture
    from resid_patching.show.html import texts_frame
    from resid_patching.show.report import Document, drawn, section, token_facts

    captured = capture(model, prompts, prepend_bos=arguments.prepend_bos)
    patterns = attention_patterns(captured, arguments.heads)
    names = patterns.headings()
    looks: Any = patterns.looks(arguments.top, query=arguments.query)
    shown = range(min(_MOST_PICTURES, len(prompts)))
    left = len(prompts) > _MOST_PICTURES
    part = section(
        patterns,
        facts=token_facts(patterns.token_texts),
        caveats=(f"Pictures of the first {_MOST_PICTURES} prompts.",) if left else (),
    )
    frame = looks[list(names)].set_axis(list(names.values()), axis=1)
    part = dataclasses.replace(
        part,
        tables=(dataclasses.replace(part.tables[0], frame=frame, bar="weight"),),
        draws=tuple(drawn("attention", patterns, batch=n) for n in shown),
    )
    report = Document(
        title=f"Attention patterns, {patterns.provenance.model}",
        origin=patterns.provenance,
        model=model_text(captured.view, patterns.provenance),
        sections=(part,),
        prompts=texts_frame({"prompt": prompts}),
        stand_in=stand_in,
    )
    body = body_of(patterns, command="attention", stand_in=stand_in, prompts=prompts)
    deliver(arguments, report, body=body, frame=patterns.to_frame)
