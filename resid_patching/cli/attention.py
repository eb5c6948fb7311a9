"""`resid-patching attention`: where chosen heads look, as a table, a picture, JSON and CSV."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from resid_patching.cli.frame import (
    Parser,
    UsageError,
    add_model_flags,
    add_output_flags,
    load_model,
)
from resid_patching.cli.inputs import add_prompt_flags, count, read_prompts
from resid_patching.cli.page import Page, asked, require_files, write_page
from resid_patching.cli.pages import plain, prompts_of
from resid_patching.cli.screen import (
    bar,
    console,
    csv_text,
    new_table,
    print_model,
    print_tokens,
    quoted,
)

if TYPE_CHECKING:
    from resid_patching.attention import AttentionPatterns


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
    parser.add_argument(
        "--top", type=count, default=3, metavar="K", help="keys of each head (default: 3)"
    )
    parser.add_argument(
        "--query",
        type=int,
        default=-1,
        metavar="P",
        help="the position that looks, from 0, or from the end if negative (default: -1)",
    )
    add_prompt_flags(parser)
    add_model_flags(parser)
    add_output_flags(parser)
    parser.set_defaults(answer=None, foil=None)
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Reads the patterns and prints where each head looks."""
    prompts, answers, _ = read_prompts(arguments)
    if answers is not None:
        raise UsageError(f"{arguments.prompts}: attention reads no answers; give one prompt a line")
    require_files(arguments)
    model, stand_in = load_model(arguments)

    from resid_patching.attention import attention_patterns
    from resid_patching.files import write_text
    from resid_patching.run import capture

    captured = capture(model, prompts, prepend_bos=arguments.prepend_bos)
    patterns = attention_patterns(captured, arguments.heads)
    looks = patterns.looks(arguments.top, query=arguments.query)
    if arguments.json is not None:
        about = {"command": "attention", "stand_in": stand_in, "prompts": prompts}
        body = {**json.loads(patterns.to_json()), **about}
        text = json.dumps(body, ensure_ascii=False, indent=1, allow_nan=False)
        write_text(arguments.json, text + "\n")
    if arguments.csv is not None:
        write_text(arguments.csv, csv_text(patterns.to_frame()))
    flags = asked(arguments)
    write_page(arguments, lambda: _page(patterns, looks, prompts, stand_in, flags))
    out = console()
    print_model(out, captured.view, patterns.provenance, stand_in)
    out.print()
    print_tokens(out, captured.prompts)
    _print_looks(out, patterns, looks)


def _print_looks(out: Any, patterns: AttentionPatterns, looks: Any) -> None:
    out.print()
    out.print(patterns.provenance.plan)
    table = new_table("head", "prompt", "looks from", "to", "weight", "")
    for row in looks.to_dict("records"):
        table.add_row(
            row["head"],
            str(row["prompt"]),
            f"{row['query']} {quoted(row['query_token'])}",
            f"{row['key']} {quoted(row['key_token'])}",
            f"{row['weight']:.3f}",
            bar(row["weight"], 1.0, 10),
        )
    out.print(table)


def _page(
    patterns: AttentionPatterns,
    looks: Any,
    prompts: list[str],
    stand_in: str | None,
    flags: dict[str, Any],
) -> Page:
    from resid_patching import plots

    page = Page(f"Attention patterns, {patterns.provenance.model}", stand_in)
    prompts_of(page, prompts)
    page.heading("Pictures")
    for batch in range(min(4, len(prompts))):
        page.picture(lambda batch=batch: plots.attention(patterns, batch=batch))
    if len(prompts) > 4:
        page.says(f"Pictures of the first 4 of {len(prompts)} prompts.", "limits")
    page.heading("Where each head looks")
    rows = [
        [
            row["head"],
            plain(row["prompt"], 0),
            f"{row['query']} {quoted(row['query_token'])}",
            f"{row['key']} {quoted(row['key_token'])}",
            plain(row["weight"]),
        ]
        for row in looks.to_dict("records")
    ]
    page.table(["head", "prompt", "looks from", "to", "weight"], rows, left=(0, 2, 3))
    page.origin(patterns.provenance, flags)
    return page
