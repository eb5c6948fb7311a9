"""Between text and token ids: one token, the text of a token, a prompt with its BOS once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import Tensor

from resid_patching.errors import (
    BosWarning,
    PromptError,
    SpecialTokenWarning,
    TokenError,
    warn,
)
from resid_patching.models import ModelView

Token: TypeAlias = str | int


def single_token(view: ModelView, token: Token, what: str = "answer") -> int:
    """The id of an answer or foil.

    Args:
        view: the model.
        token: an id, or a text that is one token.
        what: how messages call it.

    Raises:
        TokenError: not one token (the pieces are listed), or an id outside the vocabulary.
    """
    n_out = view.W_U.shape[1]
    if isinstance(token, Tensor) and token.ndim == 0 and not token.is_floating_point():
        token = int(token)
    if isinstance(token, int) and not isinstance(token, bool):
        if not 0 <= token < n_out:
            raise TokenError(
                f"{what} id {token} is outside the vocabulary of {n_out} tokens of {view.name}"
            )
        return token
    if not isinstance(token, str):
        raise TokenError(f"the {what} is a text or a token id, got {token!r}")
    _require_unicode(token, TokenError)
    ids = token_ids(view, token)
    if len(ids) == 1:
        return ids[0]
    pieces = ", ".join(f"{token_text(view.tokenizer, i)!r} ({i})" for i in ids) or "nothing"
    spaced = not token.startswith(" ") and len(token_ids(view, " " + token)) == 1
    hint = f" Did you mean {' ' + token!r}?" if spaced else ""
    raise TokenError(
        f"the {what} {token!r} is {len(ids)} tokens of {view.name}, not one: {pieces}.{hint} "
        "Give one token, for instance the first piece that tells the answers apart."
    )


def token_ids(view: ModelView, text: str) -> list[int]:
    """The ids of a text in the middle of a sentence: nothing is put before or behind it."""
    tokenizer = _require_tokenizer(view)
    _require_unicode(text, PromptError)
    piece = text.replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")
    if piece != text and (found := tokenizer.get_vocab().get(piece)) is not None:
        return [found]
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if len(ids) > 1 and (found := tokenizer.get_vocab().get(text)) is not None:
        # SentencePiece puts a space before every text; this names the inside of a word.
        return [found] if token_text(tokenizer, found) == text else ids
    return ids


def token_text(tokenizer: Any | None, token: int) -> str:
    """One token as text; bytes that are no whole character are shown as escapes."""
    if tokenizer is None:
        return str(token)
    piece = tokenizer.convert_ids_to_tokens(token)
    if piece is None:
        return f"<{token}>"
    if isinstance(piece, bytes):
        return piece.decode("utf-8", "backslashreplace")
    if "\N{LOWER ONE EIGHTH BLOCK}" in piece:
        return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ")
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text
    table = _byte_of_character()
    if all(character in table for character in piece):
        raw = bytes(table[character] for character in piece)
        return raw.decode("utf-8", "backslashreplace")
    return piece


def _byte_of_character() -> dict[str, int]:
    """The printable stand-ins that byte-level tokenizers use for bytes, reversed."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {chr(byte): byte for byte in shown}
    return table | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def _require_unicode(text: str, error: type[PromptError | TokenError]) -> None:
    """Refuses text that no tokenizer can read: halves of characters, left by a wrong decoding."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise error(
            f"{text[: problem.end][-20:]!r} ends in half a character (a surrogate), which no "
            "tokenizer reads; decode the text as UTF-8"
        ) from None


def _require_tokenizer(view: ModelView) -> Any:
    if view.tokenizer is None:
        raise PromptError(f"{view.name} has no tokenizer; give token ids instead of text")
    return view.tokenizer


def bos_id(view: ModelView) -> int | None:
    """The beginning-of-sequence token's id, or None where the tokenizer has no such one token.

    TransformerLens puts `<|endoftext|>` in for tokenizers without one, even where the vocabulary
    does not hold it and would cut it into letters.
    """
    text = getattr(view.tokenizer, "bos_token", None)
    if view.tokenizer is None or not text:
        return None
    ids = view.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids[0] if len(ids) == 1 and ids[0] < view.d_vocab else None


def puts_bos(view: ModelView, prepend_bos: bool | None) -> bool:
    """Whether texts get the beginning-of-sequence token; None asks the model's own setting."""
    possible = bos_id(view) is not None
    if prepend_bos and not possible:
        raise PromptError(
            f"prepend_bos=True was asked for, but the tokenizer of {view.name} has no "
            "beginning-of-sequence token; leave it out"
        )
    default = bool(getattr(view.cfg, "default_prepend_bos", True)) and possible
    return default if prepend_bos is None else prepend_bos


Framed: TypeAlias = tuple[list[int], list[int], list[int]]
"""The ids put before a text, its own, and the ids put behind it."""


def tokenize(view: ModelView, texts: Sequence[str], prepend_bos: bool | None) -> list[list[int]]:
    """Ids as the model's own `to_tokens` gives them, with the BOS once and never cut short.

    What a tokenizer without BOS puts around a text stays, such as [CLS] and [SEP]. An end-of-text
    token that it puts behind every text is left off, as by TransformerBridge. Both are said.

    Warns:
        BosWarning: the BOS that the model was trained with is left out.
        SpecialTokenWarning: the tokenizer puts a token of its own behind every text.
    """
    parts = framed(view, texts, prepend_bos)
    return [opening + body + closing for opening, body, closing in parts]


def framed(view: ModelView, texts: Sequence[str], prepend_bos: bool | None) -> list[Framed]:
    """`tokenize`, with each text's ids in three parts."""
    for text in texts:
        _require_unicode(text, PromptError)
    tokenizer = _require_tokenizer(view)
    wanted, bos = puts_bos(view, prepend_bos), bos_id(view)
    # TransformerLens has every tokenizer put a BOS; a model that was trained with one has a token
    # for it that is not also its end of text.
    puts_own = getattr(view.cfg, "tokenizer_prepends_bos", False)
    if prepend_bos is False and puts_own and bos not in (None, tokenizer.eos_token_id):
        warn(
            f"{view.name} has a beginning-of-sequence token, {tokenizer.bos_token!r}, and "
            "prepend_bos=False leaves it out; some models are far worse without it",
            BosWarning,
        )
    before, behind = _around(tokenizer)
    if behind:
        _warn_behind(view, behind)
    if not behind and bos is not None:
        return [_with_bos(view, text, wanted, bos) for text in texts]
    default = bool(getattr(view.cfg, "default_prepend_bos", True))
    opens = default if prepend_bos is None else prepend_bos
    return [_with_own_frame(view, text, opens, before, behind) for text in texts]


def _with_bos(view: ModelView, text: str, wanted: bool, bos: int) -> Framed:
    """A text of a tokenizer that puts a BOS or nothing; a BOS that the text begins with is it."""
    bos_text = str(view.tokenizer.bos_token)  # type: ignore[union-attr]
    opens_with_bos = text.startswith(bos_text)
    if wanted and opens_with_bos:
        text = text[len(bos_text) :]
    if not text:
        return _only_bos(view, wanted or opens_with_bos, bos), [], []
    ids = view.model.to_tokens(text, prepend_bos=wanted, truncate=False)[0].tolist()
    if wanted:
        while len(ids) > 1 and ids[0] == ids[1] == bos and not text.startswith(bos_text):
            ids = ids[1:]
    n_opening = int(ids[:1] == [bos])
    return ids[:n_opening], ids[n_opening:], []


def _with_own_frame(
    view: ModelView, text: str, opens: bool, before: list[int], behind: list[int]
) -> Framed:
    """A text of a tokenizer that puts more around it than a BOS, or has none.

    TransformerLens takes whatever stands first for a BOS, a word of the text where it is one.
    """
    tokenizer, bos = _require_tokenizer(view), bos_id(view)
    if bos is not None and opens:
        text = text.removeprefix(tokenizer.bos_token)
    if not text:
        return _only_bos(view, opens, bos), [], []
    ids = list(tokenizer(text)["input_ids"])
    body = ids[len(before) : len(ids) - len(behind)]
    opening = before if opens else [token for token in before if bos not in (None, token)]
    if opens and bos is not None and bos not in before:
        opening = [*before, bos]
    return opening, body, [] if behind == [tokenizer.eos_token_id] else behind


def _warn_behind(view: ModelView, behind: list[int]) -> None:
    """Says what becomes of the tokens that a tokenizer puts behind every text."""
    tokenizer = _require_tokenizer(view)
    shown = "".join(token_text(tokenizer, token) for token in behind)
    puts = f"the tokenizer of {view.name} puts {shown!r} behind every text"
    if behind == [tokenizer.eos_token_id]:
        warn(
            f"{puts}; it is left off, so that position -1 is the text's own last token. Give token "
            "ids to keep it.",
            SpecialTokenWarning,
        )
        return
    warn(
        f"{puts}, and so it is here: position -1 is {token_text(tokenizer, behind[-1])!r}. The "
        f"text's own last token is at position {-1 - len(behind)}; or give token ids.",
        SpecialTokenWarning,
    )


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer puts before and behind every text."""
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a")["input_ids"])
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def _only_bos(view: ModelView, wanted: bool, bos: int | None) -> list[int]:
    if wanted and bos is not None:
        return [bos]
    raise PromptError(
        f"the prompt is empty, and without a beginning-of-sequence token there is nothing for "
        f"{view.name} to read; give a text, or prepend_bos=True"
    )
