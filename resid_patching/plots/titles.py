"""What titles say of an effect and of an attribution, and the rows of one position."""

from __future__ import annotations

from typing import Any

from resid_patching.ablation import Effect
from resid_patching.attribution import Attribution
from resid_patching.plots.base import at_token, under
from resid_patching.result import Result


def over_prompts(result: Result) -> str:
    """What a mean over prompts was taken over."""
    n = result.provenance.n_prompts
    return f"mean over {n} prompts" if n > 1 else "one prompt"


def metric_words(effect: Effect) -> str:
    """The metric, for readers: where each prompt has its own answer, it says so."""
    each = "(one a prompt) - (one a prompt)"
    return effect.metric.replace(each, "of each prompt's answer - foil")


def about_effect(effect: Effect) -> tuple[str, ...]:
    """Kind of ablation and place, with its token; and what means are taken over."""
    joint = " (targets together)" if effect.joint else ""
    where, texts = effect.positions, effect.token_texts or ()
    number = where.removeprefix("position ")
    if number != where and len(texts) == len(effect.baseline):
        where = at_token(int(number), [tokens[int(number)] for tokens in texts])
    return f"{effect.how}{joint}, at {where}", effect.averaged or "one prompt", *under(effect)


def what_is_scored(found: Attribution) -> str:
    """Answer and foil, where all prompts agree on them; else the plan, as of a direction."""
    answers, foils = set(found.answer_texts), set(found.foil_texts or ())
    if len(answers) != 1 or len(foils) > 1:
        return found.provenance.plan
    foil = f'"{foils.pop()}"' if foils else "the vocabulary mean"
    plan = f'direct logit attribution by {found.by}, "{answers.pop()}" against {foil}'
    capped = ("before the output softcap",) if found.capped_value is not None else ()
    return ", ".join([plan, *capped, *under(found)])


def scored_after(found: Attribution) -> str:
    """After which position an attribution at one position is, with its token."""
    places = found.position_index[:, 0].tolist()
    (label,) = found.axis("pos").labels
    there = [texts[p] for texts, p in zip(found.token_texts, places, strict=True)]
    return f"after {at_token(places[0] if len(set(places)) == 1 else label, there)}"


def at_one_position(found: Attribution) -> Any:
    """A table of means over prompts, a row for each component.

    Raises:
        ValueError: there are several positions.
    """
    if len(found.axis("pos").labels) != 1:
        raise ValueError("this picture is of one position; choose one, such as positions=-1")
    return found.table()
