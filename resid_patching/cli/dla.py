"""`resid-patching dla`: direct logit attribution of a prompt, as a table, JSON and CSV."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import resid_patching as rp
from resid_patching.cli.flags import PROMPTS, answer_flags
from resid_patching.cli.frame import Parser, command_parser, load_model
from resid_patching.cli.inputs import read_prompts
from resid_patching.cli.output import body_of, deliver
from resid_patching.markup import quoted
from resid_patching.show.report import Facts, section, token_items

_TOP_PREDICTIONS, _PROMPTS_SHOWN = 5, 4


def build_parser(prog: str) -> Parser:
    """The flags of `dla`."""
    unset = " (unset: the model's top prediction)", " (unset: the mean over the vocabulary)"
    return command_parser(
        prog,
        "What each component of the model wrote directly towards the answer and against the foil. "
        "The rows sum to the model's own logit difference.",
        {
            **PROMPTS,
            **answer_flags(*unset),
            "--by component|head|neuron = head": "what each row is",
            "--top N = 15": "rows shown",
            "--position P = -1": "the position scored, from 0, or from the end if negative",
        },
    )


def run(arguments: Namespace) -> None:
    """Attributes the prompts and shows what was found."""
    prompts, answers, foils = read_prompts(arguments)
    view = load_model(arguments)
    captured = rp.capture(view, prompts, prepend_bos=arguments.prepend_bos)
    predictions = _predictions(captured, arguments.position)
    found = rp.direct_logit_attribution(
        captured,
        answers or [row[0]["id"] for row in predictions],
        foils,
        by=arguments.by,
        positions=arguments.position,
    )
    against = found.foil_texts or ("the vocabulary mean",) * len(prompts)
    columns = {"prompt": prompts, "answer": found.answer_texts, "against": against}
    shown = {"prompt": prompts} if len(prompts) == 1 else columns
    title = f"Direct logit attribution by {found.by}"
    part = section(found, facts=_facts(found, predictions), top=arguments.top)
    body = body_of(found, prompts=prompts, predictions=predictions)
    deliver(arguments, view, found.provenance, title, [part], body, found.to_frame, prompts=shown)


def _predictions(run: rp.Run, position: int) -> list[list[dict[str, Any]]]:
    """For each prompt, the most probable next tokens."""
    from resid_patching.tokens import token_text

    probabilities = run.logits_at(position)[:, 0].float().softmax(-1)
    top = probabilities.topk(min(_TOP_PREDICTIONS, probabilities.shape[-1]))
    return [
        [
            {"id": i, "token": token_text(run.view.tokenizer, i), "probability": p}
            for i, p in zip(ids, values, strict=True)
        ]
        for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]


def _facts(found: rp.Attribution, predictions: list[list[dict[str, Any]]]) -> Facts:
    """The first prompts: tokens, what the model says next, and what is scored."""
    facts: list[Any] = []
    for number, texts in enumerate(found.token_texts[:_PROMPTS_SHOWN]):
        position = int(found.position_index[number, 0])
        foil = "the vocabulary mean"
        if found.foil_texts is not None:
            foil = quoted(found.foil_texts[number])
        top = [f"{quoted(row['token'])} {row['probability']:.1%}" for row in predictions[number]]
        value = float(found.model_value[number, 0])
        scored = f"{quoted(found.answer_texts[number])} against {foil} after position {position}"
        facts += [
            ("tokens", token_items(texts)),
            ("next", top),
            ("score", f"{scored} ({quoted(texts[position])}): {value:+.4f} logits"),
        ]
    if (n := len(found.token_texts) - _PROMPTS_SHOWN) > 0:
        facts.append(("", f"... {n} more prompts; --csv and --json write all"))
    return tuple(facts)
