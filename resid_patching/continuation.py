"""What a model writes behind its prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from resid_patching.tokens import token_text


@dataclass(frozen=True, eq=False)
class Continuation:
    """What was written behind each prompt.

    Attributes:
        tokens: the new ids [batch, n].
        texts: the same as text, one for each prompt.
        under: the intervention that was on, in words; empty where there was none.
    """

    tokens: Int[Tensor, "batch n"]
    texts: tuple[str, ...]
    under: str

    @classmethod
    def of(cls, tokenizer: Any | None, tokens: Int[Tensor, "batch n"], under: str) -> Continuation:
        """New ids with their text; without a tokenizer the text is the ids."""
        if tokenizer is None:
            texts = tuple(" ".join(token_text(None, i) for i in row) for row in tokens.tolist())
        else:
            options = {"clean_up_tokenization_spaces": False}
            texts = tuple(tokenizer.decode(row, **options) for row in tokens.tolist())
        return cls(tokens, texts, under)

    def __repr__(self) -> str:
        under = f"under {self.under}: " if self.under else ""
        return f"Continuation({under}{', '.join(map(repr, self.texts))})"

    def __str__(self) -> str:
        return "\n".join(self.texts)


def chooser(
    n: int, seed: int | None, temperature: float | None
) -> Callable[[Tensor], Int[Tensor, ""]]:
    """What picks the next token's id from logits [d_vocab].

    Args:
        n: how many tokens will be picked.
        seed: of the draws; None picks the most probable.
        temperature: divides the logits before a draw; None is 1.

    Raises:
        ValueError: n is no whole number from 1, or a temperature is not above 0 or has no seed.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"the number of tokens to write is a whole number from 1, got {n!r}")
    if seed is None:
        if temperature is not None:
            raise ValueError("a temperature is of draws, which need a seed, such as seed=0")
        return lambda logits: logits.argmax()
    if temperature is not None and not temperature > 0:
        raise ValueError(f"a temperature is above 0, got {temperature}")
    generator = torch.Generator().manual_seed(seed)

    def draw(logits: Tensor) -> Tensor:
        scaled = logits.detach().to("cpu").double() / (temperature or 1.0)
        return torch.multinomial(scaled.softmax(-1), 1, generator=generator)[0]

    return draw
