"""The indirect-object task: two people are named, one of them gives, and the other is who gets it.

    When Mary and John went to the store, John gave a drink to
         IO       S1                     S2                 END      ABBA; BABA names S first

S is the subject, who gives; IO the indirect object, the answer. A source prompt has the same
tokens but for the names, so that every position of one is a position of the other:

    corrupt="names"   three other names at IO, S1 and S2: nothing to copy and nobody named twice
    corrupt="swap"    IO's name at S2: the answer becomes the other one

Source: Wang et al. 2022 (arXiv 2211.00593), sections 2 and 3.1; the words here are our own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from resid_patching.errors import PromptError
from resid_patching.models import Model, ModelView, as_view
from resid_patching.prompt_sets.pairs import PromptPairs, differences
from resid_patching.prompts import prepare
from resid_patching.tokens import single_token, token_ids

_FIRST_NAMES = (
    "Alice Amanda Amy Andrew Angela Anna Anthony Ben Bill Bob Brian Carl Carol Charles Chris "
    "Daniel David Diana Edward Emily Emma Eric Frank Fred George Grace Greg Hannah Harry Helen "
    "Henry Jack James Jane Jason Jennifer Jessica John Joseph Julia Karen Kate Kevin Laura Linda "
    "Lisa Lucy Luke Maria Martin Mary Matthew Max Michael Nancy Nick Oscar Paul Peter Rachel "
    "Richard Robert Ruth Ryan Sam Sarah Simon Stephen Steven Susan Thomas Tim Tom Victoria William"
).split()
_PLACE_NAMES = (
    "store park school garden library market beach station kitchen office house restaurant "
    "hospital museum farm river lake theater church castle bridge hotel forest village airport "
    "stadium"
).split()
_OBJECTS = (
    "drink bag ball book ring letter key map hat coat cake box flower lamp phone pen gift bone "
    "computer basketball necklace picture ticket blanket basket bottle card watch coin shirt "
    "guitar chair camera newspaper"
).split()
# Every name has a word before it: the first word of a text has no space, and so another token.
_TEMPLATES = (
    "When {first} and {second} went to the {place}, {giver} gave a {object} to",
    "After {first} and {second} walked to the {place}, {giver} handed a {object} to",
    "While {first} and {second} were at the {place}, {giver} showed a {object} to",
    "As soon as {first} and {second} left the {place}, {giver} passed a {object} to",
    "Then {first} and {second} drove to the {place}, and {giver} offered a {object} to",
    "In the morning, {first} was with {second} at the {place}, and {giver} sold a {object} to",
    "Last Friday, {first} took {second} to the {place}. Later, {giver} gave a {object} to",
    "At the {place}, {first} sat next to {second}. Then {giver} brought a {object} to",
    "Everyone agreed that {first} and {second} worked well at the {place}, so {giver} sent a "
    "{object} to",
    "The old friends {first} and {second} had a long talk at the {place} before {giver} lent a "
    "{object} to",
    "During the concert near the {place}, {first} and {second} argued, and afterwards {giver} "
    "handed a {object} to",
)
_ORDERS = ("ABBA", "BABA")
_CORRUPTIONS = {
    "names": "three other names in the source",
    "swap": "the subject of the second clause swapped in the source",
}


def indirect_object_prompts(
    model: Model,
    n: int,
    *,
    seed: int,
    corrupt: Literal["names", "swap"],
    prepend_bos: bool | None = None,
) -> PromptPairs:
    """Draws pairs of the indirect-object task whose every word the model's tokenizer knows.

    Names, places and objects are drawn from our lists, as far as each is one token after a space;
    a template is left out where one of its own words is not. Templates take turns, and so do the
    two orders of the names. No base prompt comes twice while another is possible.

    Args:
        model: the model whose tokenizer decides.
        n: how many pairs.
        seed: of the draw; the same seed gives the same pairs.
        corrupt: `names` (the source has three other names, as in the paper's ABC prompts) or
            `swap` (the source's second clause has the other of the two names as its subject).
        prepend_bos: as it will be given to `capture`; positions count the token.

    Returns:
        Pairs with answers (IO), foils (S) and the positions IO, S1, S1+1, S2 and END.

    Raises:
        PromptError: a wrong `corrupt`, n or seed; too few names, places, objects or templates for
            the tokenizer; or a base and source that do not line up as tokens.
    """
    if corrupt not in _CORRUPTIONS:
        raise PromptError(
            'corrupt is "names" (three other names in the source) or "swap" (the subject of the '
            f"second clause is the other name), and has no default; got {corrupt!r}"
        )
    _require_int("n, the number of pairs,", n, 1)
    _require_int("seed", seed, None)
    view = as_view(model)
    words = _known_words(view, 5 if corrupt == "names" else 2)
    rows = _draw(random.Random(seed), words, n)
    base = tuple(row.text(row.slots) for row in rows)
    source = tuple(row.text(row.corrupted(corrupt)) for row in rows)
    return PromptPairs(
        base=base,
        source=source,
        answers=tuple(f" {row.recipient}" for row in rows),
        foils=tuple(f" {row.giver}" for row in rows),
        positions=_role_positions(view, rows, base, source, corrupt, prepend_bos),
        orders=tuple(row.order for row in rows),
        how=f"{n} indirect-object pairs, seed {seed}, {_CORRUPTIONS[corrupt]}",
    )


def _require_int(name: str, value: Any, least: int | None) -> None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number or (least is not None and value < least):
        from_least = "" if least is None else f" from {least}"
        raise PromptError(f"{name} is a whole number{from_least}; got {value!r}")


@dataclass(frozen=True)
class _Words:
    """What a tokenizer knows of our lists."""

    names: tuple[str, ...]
    places: tuple[str, ...]
    objects: tuple[str, ...]
    templates: tuple[str, ...]

    @property
    def capacity(self) -> int:
        """Different base prompts of one template and order."""
        return len(self.names) * (len(self.names) - 1) * len(self.places) * len(self.objects)


def _known_words(view: ModelView, least_names: int) -> _Words:
    def known(words: Sequence[str]) -> tuple[str, ...]:
        return tuple(word for word in words if len(token_ids(view, f" {word}")) == 1)

    names, places, objects = known(_FIRST_NAMES), known(_PLACE_NAMES), known(_OBJECTS)
    templates = tuple(text for text in _TEMPLATES if _is_known(view, text))
    for what, found, listed, least in (
        ("name", names, _FIRST_NAMES, least_names),
        ("place", places, _PLACE_NAMES, 1),
        ("object", objects, _OBJECTS, 1),
        ("template", templates, _TEMPLATES, 1),
    ):
        if len(found) < least:
            words = f": {', '.join(found)}" if found else ""
            raise PromptError(
                f"indirect-object prompts need {least} {what}{'s' * (least > 1)} whose words are "
                f"single tokens of {view.name}; {len(found)} of our {len(listed)} are{words}. "
                "Give pairs of your own with rp.PromptPairs or rp.read_pairs"
            )
    return _Words(names, places, objects, templates)


def _is_known(view: ModelView, template: str) -> bool:
    """Whether each of a template's own words is one token where it stands."""
    words = re.findall(r"[A-Za-z]+", re.sub(r"\{\w+\}", "", template))
    pieces = [words[0], *(f" {word}" for word in words[1:])]
    return all(len(token_ids(view, piece)) == 1 for piece in pieces)


@dataclass(frozen=True)
class _Sentence:
    """A prompt of the task: its words, and three names that are not in it."""

    template: str
    order: str
    recipient: str
    giver: str
    others: tuple[str, ...]
    place: str
    thing: str

    @property
    def slots(self) -> dict[str, str]:
        """The names by role: IO, S1 and S2."""
        return {"IO": self.recipient, "S1": self.giver, "S2": self.giver}

    def corrupted(self, corrupt: str) -> dict[str, str]:
        """The names of the source by role."""
        if corrupt == "swap":
            return {**self.slots, "S2": self.recipient}
        return dict(zip(("IO", "S1", "S2"), self.others, strict=True))

    def text(self, names: Mapping[str, str]) -> str:
        """The prompt with names by role."""
        pair = names["IO"], names["S1"]
        first, second = pair if self.order == "ABBA" else pair[::-1]
        return self.template.format(
            first=first, second=second, giver=names["S2"], place=self.place, object=self.thing
        )


def _draw(rng: random.Random, words: _Words, n: int) -> list[_Sentence]:
    templates = rng.sample(words.templates, len(words.templates))
    drawn: dict[tuple[str, str], set[str]] = {}
    rows = []
    for number in range(n):
        order, turn = _ORDERS[number % 2], number // 2
        in_turn = [templates[(turn + step) % len(templates)] for step in range(len(templates))]
        template = next(
            (t for t in in_turn if len(drawn.get((t, order), ())) < words.capacity), in_turn[0]
        )
        seen = drawn.setdefault((template, order), set())
        row = _draw_row(rng, words, template, order)
        while len(seen) < words.capacity and row.text(row.slots) in seen:
            row = _draw_row(rng, words, template, order)
        seen.add(row.text(row.slots))
        rows.append(row)
    return rows


def _draw_row(rng: random.Random, words: _Words, template: str, order: str) -> _Sentence:
    recipient, giver, *others = rng.sample(words.names, min(5, len(words.names)))
    place, thing = rng.choice(words.places), rng.choice(words.objects)
    return _Sentence(template, order, recipient, giver, tuple(others), place, thing)


def _role_positions(
    view: ModelView,
    rows: Sequence[_Sentence],
    base: Sequence[str],
    source: Sequence[str],
    corrupt: str,
    prepend_bos: bool | None,
) -> dict[str, tuple[int, ...]]:
    """Where the names stand, by token id; checked against where base and source differ."""
    ours = prepare(view, base, prepend_bos=prepend_bos)
    theirs = prepare(view, source, prepend_bos=prepend_bos)
    changed = ("S2",) if corrupt == "swap" else ("IO", "S1", "S2")
    columns: dict[str, list[int]] = {name: [] for name in ("IO", "S1", "S1+1", "S2", "END")}
    for number, (row, found) in enumerate(zip(rows, differences(ours, theirs), strict=True)):
        ids = ours.tokens[number].tolist()[: ours.lengths[number]]
        subject = _places_of(single_token(view, f" {row.giver}", "name"), ids)
        recipient = _places_of(single_token(view, f" {row.recipient}", "name"), ids)
        if len(subject) != 2 or len(recipient) != 1:
            raise _not_lined_up(view, base[number])
        places = {"IO": recipient[0], "S1": subject[0], "S2": subject[1]}
        if {difference.position for difference in found} != {places[name] for name in changed}:
            raise _not_lined_up(view, base[number])
        places |= {"S1+1": subject[0] + 1, "END": len(ids) - 1}
        for name, column in columns.items():
            column.append(places[name])
    return {name: tuple(column) for name, column in columns.items()}


def _places_of(token: int, ids: list[int]) -> list[int]:
    return [position for position, other in enumerate(ids) if other == token]


def _not_lined_up(view: ModelView, text: str) -> PromptError:
    return PromptError(
        f"the names of {text!r} are not found where they were put in the tokens of {view.name}: "
        "its tokenizer joins words. Give pairs of your own with rp.PromptPairs or rp.read_pairs"
    )
