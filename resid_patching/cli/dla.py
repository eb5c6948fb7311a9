"""`resid-patching dla`: direct logit attribution of a prompt, as a table, JSON and CSV."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from resid_patching.cli.frame import Parser, add_model_flags, add_output_flags, load_model
from resid_patching.cli.inputs import add_prompt_flags, count, given_text, read_prompts
from resid_patching.cli.page import asked, require_files, write_page
from resid_patching.cli.pages import attribution_page
from resid_patching.cli.screen import (
    bar,
    console,
    csv_text,
    new_table,
    print_line,
    print_model,
    quoted,
)
from resid_patching.markup import printable

if TYPE_CHECKING:
    from resid_patching.attribution import Attribution
    from resid_patching.run import Run

_TOP_PREDICTIONS = 5


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The flags of `dla`."""
    parser = Parser(
        prog=prog,
        description="What each component of the model wrote directly towards the answer and "
        "against the foil. The rows sum to the model's own logit difference.",
    )
    add_prompt_flags(parser)
    parser.add_argument(
        "--answer",
        action="append",
        type=given_text,
        metavar="TOKEN",
        help="the token scored, leading space included; once, or once for each prompt (unset: "
        "the model's top prediction)",
    )
    parser.add_argument(
        "--foil",
        action="append",
        type=given_text,
        metavar="TOKEN",
        help="the token it is scored against; once, or once for each prompt (unset: the mean "
        "over the vocabulary)",
    )
    parser.add_argument(
        "--by",
        default="head",
        choices=("component", "head", "neuron"),
        help="the grain of the rows (default: head)",
    )
    parser.add_argument(
        "--top", type=count, default=15, metavar="N", help="rows shown (default: 15)"
    )
    parser.add_argument(
        "--position",
        type=int,
        default=-1,
        metavar="P",
        help="the position scored, from 0, or from the end if negative (default: -1)",
    )
    add_model_flags(parser)
    add_output_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Attributes the prompts and prints what was found."""
    prompts, answers, foils = read_prompts(arguments)
    require_files(arguments)
    model, stand_in = load_model(arguments)

    from resid_patching.attribution import direct_logit_attribution
    from resid_patching.files import write_text
    from resid_patching.run import capture

    captured = capture(model, prompts, prepend_bos=arguments.prepend_bos)
    predictions = _predictions(captured, arguments.position)
    if answers is None:
        answers = [row[0][0] for row in predictions]
    found = direct_logit_attribution(
        captured, answers, foils, by=arguments.by, positions=arguments.position
    )
    if arguments.json is not None:
        write_text(arguments.json, _as_json(found, prompts, predictions, stand_in))
    if arguments.csv is not None:
        write_text(arguments.csv, csv_text(found.to_frame()))
    write_page(arguments, lambda: attribution_page(found, prompts, stand_in, asked(arguments)))
    _print(captured, found, predictions, stand_in, arguments.top)


def _predictions(run: Run, position: int) -> list[list[tuple[int, str, float]]]:
    """For each prompt, the most probable next tokens: id, text, probability."""
    from resid_patching.tokens import token_text

    probabilities = run.logits_at(position)[:, 0].float().softmax(-1)
    top = probabilities.topk(min(_TOP_PREDICTIONS, probabilities.shape[-1]))
    tokenizer = run.view.tokenizer
    return [
        [(i, token_text(tokenizer, i), p) for i, p in zip(ids, values, strict=True)]
        for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]


def _as_json(
    found: Attribution,
    prompts: list[str],
    predictions: list[list[tuple[int, str, float]]],
    stand_in: str | None,
) -> str:
    """The result, readable by `Attribution.from_json`, with what the command knew beside it."""
    body = json.loads(found.to_json())
    body["command"] = "dla"
    body["stand_in"] = stand_in
    body["prompts"] = prompts
    body["predictions"] = [
        [{"id": i, "token": text, "probability": p} for i, text, p in row] for row in predictions
    ]
    return json.dumps(body, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def _print(
    run: Run,
    found: Attribution,
    predictions: list[list[tuple[int, str, float]]],
    stand_in: str | None,
    top: int,
) -> None:
    out = console()
    print_model(out, run.view, found.provenance, stand_in)
    for number in range(len(run)):
        _print_prompt(out, found, predictions[number], number)
    _print_rows(out, found, top)


def _print_prompt(
    out: Any, found: Attribution, predictions: list[tuple[int, str, float]], number: int
) -> None:
    tokens = found.token_texts[number]
    out.print()
    print_line(out, "tokens", *(f"{p} {quoted(text)}" for p, text in enumerate(tokens)))
    print_line(out, "next", *(f"{quoted(text)} {p:.1%}" for _, text, p in predictions))
    position = int(found.position_index[number, 0])
    foil = "the vocabulary mean"
    if found.foil_texts is not None:
        foil = quoted(found.foil_texts[number])
    print_line(
        out,
        "score",
        f"{quoted(found.answer_texts[number])} against {foil}",
        f"after position {position} ({quoted(tokens[position])}):",
        f"{float(found.model_value[number, 0]):+.4f} logits",
        gap=" ",
    )


def _print_rows(out: Any, found: Attribution, top: int) -> None:
    values = found.values[:, :, 0].cpu().double()
    mean, names = values.mean(1), found.components
    several = values.shape[1] > 1
    spread = values.std(1) if several else None
    constants = [names.index(name) for name in found.constants]
    parts = [number for number in range(len(names)) if number not in constants]
    parts.sort(key=lambda number: -abs(float(mean[number])))
    shown, others = parts[:top], parts[top:]

    title = f"direct logit attribution by {found.by}, in logits"
    if several:
        title += f": mean over {values.shape[1]} prompts, and standard deviation"
    out.print()
    out.print(title)
    table = new_table("row", "logits", *(["sd"] if several else []), "")
    largest = max(abs(float(mean[number])) for number in [*shown, *constants])
    for number in [*shown, *constants]:
        value = float(mean[number])
        cells = [printable(names[number]), f"{value:+.4f}"]
        cells += [f"{float(spread[number]):.4f}"] if spread is not None else []
        table.add_row(*cells, bar(value, largest))
        if number == shown[-1] and others:
            rest = float(mean[others].sum())
            cells = [f"{len(others)} other rows", f"{rest:+.4f}"] + [""] * several
            table.add_row(*cells, "")
    out.print(table)
    _print_sum(out, found, several)


def _print_sum(out: Any, found: Attribution, several: bool) -> None:
    name = "mean sum" if several else "sum"
    gap = float(found.gap.max())
    out.print(f"{name} of all {len(found.components)} rows  {float(found.total.mean()):+.4f}")
    out.print(f"the model's own difference  {float(found.model_value.mean()):+.4f}")
    out.print(f"largest gap  {gap:.1e}")
    if found.capped_value is not None:
        out.print(f"after the output softcap  {float(found.capped_value.mean()):+.4f}")
    out.print("A row is a direct effect: a part that acts through later parts scores near zero.")
