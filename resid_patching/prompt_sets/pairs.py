"""Pairs of prompts, and where the two of a pair differ, by token id and position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from resid_patching.errors import PromptError
from resid_patching.prompts import Prompts


@dataclass(frozen=True)
class PromptPairs:
    """Base prompts and their sources, row by row.

    Attributes:
        base: the texts that are run, and changed.
        source: the texts that other values come from, one for each base text.
        answers: the token scored in each row, leading space included, or None.
        foils: the token it is scored against, or None.
        positions: names of positions -> one position for each row, as the tokens of `base` are
            counted (the beginning-of-sequence token, where the model puts one, is position 0).
        orders: for indirect objects, ABBA or BABA for each row; empty otherwise.
        how: where the pairs come from, in words.
    """

    base: Sequence[str]
    source: Sequence[str]
    answers: Sequence[str] | None = None
    foils: Sequence[str] | None = None
    positions: Mapping[str, Sequence[int]] = field(default_factory=dict)
    orders: Sequence[str] = ()
    how: str = "given pairs"

    def __post_init__(self) -> None:
        for name in ("base", "source", "answers", "foils"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        if not self.base:
            raise PromptError("no pair of prompts was given; give at least one")
        if self.foils is not None and self.answers is None:
            raise PromptError("foils were given without answers; give both, or answers alone")
        columns: dict[str, Sequence[Any] | None] = {
            "source": self.source,
            "answers": self.answers,
            "foils": self.foils,
            "orders": self.orders or None,
        }
        columns |= {f"positions[{name!r}]": rows for name, rows in self.positions.items()}
        for name, rows in columns.items():
            if rows is not None and len(rows) != len(self.base):
                raise PromptError(
                    f"{len(self.base)} base prompts were given, but {len(rows)} in {name}; give "
                    "one for each base prompt"
                )

    def __len__(self) -> int:
        return len(self.base)


def _texts(name: str, given: Any) -> tuple[str, ...] | None:
    if given is None and name in ("answers", "foils"):
        return None
    if isinstance(given, Sequence) and not isinstance(given, str):
        if all(isinstance(text, str) for text in given):
            return tuple(given)
    raise PromptError(f"{name} is a list of texts, one for each pair; got {given!r}")


class Difference(NamedTuple):
    """Where a source prompt has another token than its base.

    Attributes:
        position: counted as in the prompts, so that a beginning-of-sequence token is position 0.
        base: the base's token there, as text.
        source: the source's token there, as text.
    """

    position: int
    base: str
    source: str


def differences(base: Prompts, source: Prompts) -> list[list[Difference]]:
    """Where two sets of prompts differ, row by row, by token id and position.

    Args:
        base: the base prompts of a run, `run.prompts`.
        source: the source prompts, one for each of them.

    Returns:
        For each row its differences, first position first; empty where a row is its own source.

    Raises:
        PromptError: not one source for each base, or a pair of unequal token counts.
    """
    if len(base) != len(source):
        raise PromptError(
            f"{len(base)} base prompts were given for {len(source)} source prompts; give one "
            "source for each base"
        )
    return [_row_differences(base, source, row) for row in range(len(base))]


def _row_differences(base: Prompts, source: Prompts, row: int) -> list[Difference]:
    n_base, n_source = base.lengths[row], source.lengths[row]
    pairs = zip(base.tokens[row].tolist(), source.tokens[row].tolist(), strict=False)
    shared = list(pairs)[: min(n_base, n_source)]
    ours, theirs = base.token_texts[row], source.token_texts[row]
    found = []
    for position, (one, other) in enumerate(shared):
        if one != other:
            texts = ours[position], theirs[position]
            if texts[0] == texts[1]:  # two tokens that read alike
                texts = f"{texts[0]} ({one})", f"{texts[1]} ({other})"
            found.append(Difference(position, *texts))
    if n_base != n_source:
        where = "they agree as far as the shorter goes"
        if found:
            position, one, other = found[0]
            where = f"they first differ at position {position}, {one!r} and {other!r}"
        raise PromptError(
            f"pair {row}: the base has {n_base} tokens and the source {n_source}, but a value at a "
            f"position goes to the same position of the other; {where}. Reword one of them "
            "(a name may be one token in one place and two in another)"
        )
    return found
