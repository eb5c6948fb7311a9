"""The check-list on models that are at hand: the same measurements, with other arguments.

Every entry runs on every stand-in; only prompts, answers, heads, layers and the like are replaced.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gpt2.checklist import ENTRIES, S_INHIBITION, Entry
from gpt2.measurements import flat


@dataclass(frozen=True)
class StandIn:
    """What a model puts in place of GPT-2's arguments.

    Attributes:
        processing: by GPT-2's.
        bos: by GPT-2's.
        texts: prompts for measurements that take one.
        pairs: prompts, others, answers and foils; others are as long as prompts.
        layers: of states and of layers' writes that are patched.
        heads: that are patched, and that send.
        value_heads: that are patched in k and v, by key-value head.
        positioned: heads that are patched at each position in turn; in k and v, by key-value head.
        single: what else is replaced, by argument.
        relative: how close the package comes to the slow route, by the largest number of a value.
    """

    processing: dict[str, str]
    bos: dict[bool, bool]
    texts: list[str]
    pairs: dict[str, list[str]]
    layers: list[int]
    heads: list[list[str]]
    value_heads: list[list[str]]
    positioned: list[str]
    single: dict[str, Any]
    relative: float

    def adapt(self, entry: Entry) -> Entry:
        """An entry with this model's arguments."""
        given = dict(entry.arguments)
        if entry.name.startswith("arena25"):
            given |= dict.fromkeys(_FROM_FILE[entry.measurement])
        if entry.measurement == "paired_logit_differences":
            given |= dict.fromkeys(["others"])
        return dataclasses.replace(
            entry,
            arguments={name: self._argument(entry, name, given) for name in given},
            processing=self.processing[entry.processing],
            bos=self.bos[entry.bos],
        )

    def _argument(self, entry: Entry, name: str, given: dict[str, Any]) -> Any:
        if name in ("columns", "each"):
            return given[name]
        if name == "k":
            return min(given[name], self.single["k"])
        if name == "prompt":
            return self.texts[list(ENTRIES).index(entry.name) % len(self.texts)]
        if name in self.pairs and entry.measurement != "largest_neurons":
            return self.pairs[name]
        if name == "targets":
            return self._targets(given)
        if name == "senders":
            return self.heads
        if name == "receivers":
            return self.single["receivers"] if given[name] == S_INHIBITION else given[name]
        if name == "zeroed" and entry.measurement == "loss":
            return self.single["part"]
        return self.single["head" if name == "zeroed" else name]

    def _targets(self, given: dict[str, Any]) -> list:
        first = flat(given["targets"])[0]
        site, _, which = first.partition(".")
        if not site.isdigit():
            return [f"{site}.{layer}" for layer in self.layers]
        which = which.partition(".")[2]
        by_value = which in ("k", "v")
        if given.get("each"):
            return [f"{head}.{which}" for head in self.positioned]
        grid = self.value_heads if by_value else self.heads
        return [[f"{head}.{which}" for head in row] for row in grid]


_PAIRS = ("prompts", "answers", "foils")
_FROM_FILE = {
    "logit_difference": _PAIRS,
    "paired_logit_differences": _PAIRS,
    "path_patching": (*_PAIRS, "others"),
    "attention_and_projection": ("prompts", "names", "positions"),
    "ablation_summary": _PAIRS,
}

SLM4096 = StandIn(
    processing={"folded": "folded", "raw": "raw", "gelu": "raw"},
    bos={True: False, False: False},  # its tokenizer has none
    texts=["To be, or not", "The old man said", "there was a"],
    pairs={
        "prompts": ["The old m", "She was h"],
        "others": ["The red c", "She had t"],
        "answers": ["a", "e"],
        "foils": ["o", "i"],
    },
    layers=[0, 1, 2, 3],
    heads=[[f"{layer}.{head}" for head in range(4)] for layer in range(4)],
    value_heads=[[f"{layer}.{head}" for head in range(4)] for layer in range(4)],
    positioned=["0.1", "1.0", "2.3", "3.2"],
    single={
        "k": 10,
        "pairs": [["a", "o"], ["e", "i"]],
        "answers": ["a", "e"],
        "token": "e",
        "text": "The old man said: go home.",
        "answer": "a",
        "foil": "o",
        "part": "1.2.v",
        "head": "2.3",
        "receivers": ["2.0.v", "2.3.v", "3.1.v"],
        "names": {"IO": ["e", "h"], "S": ["o", "a"]},
        "positions": {"IO": [2, 1], "S": [4, 5]},
        "tokens": [[5, 28, 43, 51, 5, 28, 43, 51], [9, 40, 30, 22, 9, 40, 30, 22]],
        "offset": 3,
    },
    relative=1e-6,
)

SMOLLM2 = StandIn(
    processing={"folded": "raw", "raw": "raw", "gelu": "raw"},
    bos={True: True, False: True},  # it is far worse without one
    texts=["The capital of France is"],
    pairs={
        "prompts": ["Mary saw John. Mary saw", "Tom saw Ann. Tom saw"],
        "others": ["Mary saw John. John saw", "Tom saw Ann. Ann saw"],
        "answers": [" Mary", " Tom"],
        "foils": [" John", " Ann"],
    },
    layers=[17],
    heads=[["17.7"]],
    value_heads=[["17.2"]],
    positioned=["12.1"],
    single={
        "k": 10,
        "pairs": [[" Mary", " John"], [" Tom", " Ann"]],
        "answers": [" Paris", " the"],
        "token": " Paris",
        "text": "Hello, world!",
        "answer": " Paris",
        "foil": " the",
        "part": "3.1.v",
        "head": "17.7",
        "receivers": ["16.1.v", "18.0.v"],
        "names": {"IO": [" Mary", " Tom"], "S": [" John", " Ann"]},
        "positions": {"IO": [0, 0], "S": [2, 2]},
        "tokens": [[504, 1100, 2200, 504, 1100, 2200]],
        "offset": 2,
    },
    relative=1e-4,
)


def tolerance_of(expected: Any, relative: float) -> Any:
    """A share of the largest number, for each column where a value has columns."""
    if isinstance(expected, dict):
        return {name: tolerance_of(part, relative) for name, part in expected.items()}
    if isinstance(expected, list) and expected and isinstance(expected[0], dict):
        parts = [tolerance_of(part, relative) for part in expected]
        return {name: max(part[name] for part in parts) for name in parts[0]}
    found = [abs(x) for _, x, _ in leaves(expected, None) if isinstance(x, float)]
    return relative * max(found, default=0.0)


def leaves(value: Any, tolerance: Any) -> Iterator[tuple[Callable[[Any], Any], Any, Any]]:
    """Each number or text: how to get the value with another in its place, what is in it, and
    the tolerance of its column."""
    if not isinstance(value, dict | list):
        yield (lambda new: new), value, tolerance
        return
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        has_own = isinstance(value, dict) and isinstance(tolerance, dict)
        for put, leaf, allowed in leaves(part, tolerance[key] if has_own else tolerance):
            yield _inside(value, key, put), leaf, allowed


def _inside(value: Any, key: Any, put: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def replaced(new: Any) -> Any:
        copy = value.copy()
        copy[key] = put(new)
        return copy

    return replaced


def third_digit(leaf: Any) -> float:
    """What one more in the third significant digit is; a text, an id and 0 have no digits."""
    if not isinstance(leaf, float) or leaf == 0:
        return 1.0
    return 10.0 ** (math.floor(math.log10(abs(leaf))) - 2)


def changed(leaf: Any) -> Any:
    """A number with its third significant digit one more; another text, another id."""
    if isinstance(leaf, str):
        return leaf + "?"
    return leaf + (1 if isinstance(leaf, int) else third_digit(leaf))
