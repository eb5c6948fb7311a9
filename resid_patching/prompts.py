"""Prompts: token ids in one layout, whatever was given, and positions that count real tokens.

Rows are laid out from position 0 with padding behind them. Under causal attention nothing behind
a token can reach it, so each row computes exactly what it computes alone, with no mask and no
position ids to get wrong. Left-padded input is moved into this layout.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from resid_patching.errors import (
    AnswerWarning,
    PaddingWarning,
    PositionError,
    PromptError,
    TokenError,
    warn,
)
from resid_patching.models import Model, ModelView, as_view, take
from resid_patching.tokens import (
    Token,
    bos_id,
    framed,
    single_token,
    token_ids,
    token_text,
    tokenize,
)

PromptLike: TypeAlias = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Tensor
Positions: TypeAlias = int | Sequence[int] | Tensor | None
"""One position of every prompt, one for each, or None for all."""
Spans: TypeAlias = Positions | Sequence[Sequence[int]]
"""The same, or several positions for each prompt: `[[2, 3, 4], [2, 3]]`."""
Tokens: TypeAlias = Token | Sequence[Token] | Tensor


@dataclass(frozen=True, eq=False)
class Prompts:
    """A batch of prompts.

    Attributes:
        tokens: ids [batch, pos], real tokens first, padding behind.
        lengths: real tokens of each row.
        texts: the text of each row, or None where ids were given.
        token_texts: each real token as text, row by row.
        starts: where each row began in the input it came from (non-zero after left padding).
        bos_id: the id that begins every row, or None.
    """

    tokens: Int[Tensor, "batch pos"]
    lengths: tuple[int, ...]
    texts: tuple[str | None, ...]
    token_texts: tuple[tuple[str, ...], ...]
    starts: tuple[int, ...]
    bos_id: int | None

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        spread = sorted({min(self.lengths), max(self.lengths)})
        return f"Prompts({len(self)} rows of {' to '.join(map(str, spread))} tokens)"

    @property
    def mask(self) -> Bool[Tensor, "batch pos"]:
        """True where a token is real."""
        lengths = torch.tensor(self.lengths, device=self.tokens.device)
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < lengths[:, None]

    def chunks(self, limit: int, length_class: Callable[[int], object]) -> Iterator[slice]:
        """Consecutive rows that run together; at least one row each.

        Args:
            limit: the most tokens, padding included.
            length_class: of the model, `ModelView.length_class`; prompts of different classes
                never share a chunk.
        """
        start = 0
        while start < len(self):
            stop, width = start + 1, self.lengths[start]
            shared = length_class(width)
            while stop < len(self):
                wider = max(width, self.lengths[stop])
                too_many = wider * (stop + 1 - start) > limit
                if too_many or length_class(self.lengths[stop]) != shared:
                    break
                stop, width = stop + 1, wider
            yield slice(start, stop)
            start = stop

    @property
    def hash(self) -> str:
        """sha256 of the real tokens, row by row."""
        digest = hashlib.sha256()
        for row, length in zip(self.tokens.tolist(), self.lengths, strict=True):
            digest.update((",".join(map(str, row[:length])) + ";").encode())
        return digest.hexdigest()

    def locate(self, positions: Positions) -> PositionIndex:
        """Finds positions in every row.

        Args:
            positions: one position for all rows (negative counts from the last real token), one
                for each row, or None for all.

        Raises:
            PositionError: a row has no such position.
        """
        if positions is None:
            width = max(self.lengths)
            device = self.tokens.device
            index = torch.arange(width, device=device).expand(len(self), width).clone()
            index[index >= torch.tensor(self.lengths, device=device)[:, None]] = -1
            return PositionIndex(index)
        wanted = self._one_per_row(positions)
        found = [self._resolve(row, position) for row, position in enumerate(wanted)]
        return PositionIndex(torch.tensor(found, device=self.tokens.device)[:, None])

    def locate_spans(self, spans: Spans) -> PositionIndex:
        """Finds the positions of a span of every row, in the order that they are named in.

        Args:
            spans: a list of positions for each row, of any lengths: `[[2, 3, 4], [2, 3]]`; or what
                `locate` takes.

        Raises:
            PositionError: a row has no such position or an empty span, a position is in a span
                twice, or positions and spans are mixed.
        """
        rows: Any = spans.tolist() if isinstance(spans, Tensor) else spans
        if not _is_several(rows):
            return self.locate(rows)
        are_spans = {_is_several(row) for row in rows}
        if are_spans == {True, False}:
            raise PositionError(
                f"positions and spans are mixed in {rows!r}; give one position for each prompt, or "
                "a list of positions for each"
            )
        if len(rows) != len(self):
            what = "spans" if True in are_spans else "positions"
            raise PositionError(
                f"{len(rows)} {what} were given for {len(self)} prompts; give one position, one "
                "for each prompt, or a list of positions for each, such as [[2, 3, 4], [2, 3]]"
            )
        if are_spans == {False}:
            return self.locate(rows)
        found = [self._span(number, row) for number, row in enumerate(rows)]
        width = max(map(len, found))
        padded = [row + [-1] * (width - len(row)) for row in found]
        return PositionIndex(torch.tensor(padded, device=self.tokens.device))

    def _span(self, row: int, positions: Sequence[int]) -> list[int]:
        """The positions of one row's span, counted from 0."""
        try:
            found = [self._resolve(row, operator.index(position)) for position in positions]
        except TypeError:
            raise PositionError(f"positions are whole numbers; got {list(positions)}") from None
        if not found:
            raise PositionError(f"the span of prompt {row} is empty; name at least one position")
        if twice := [position for position in found if found.count(position) > 1]:
            raise PositionError(f"position {twice[0]} is twice in the span of prompt {row}")
        return found

    def each_position(self) -> list[PositionIndex]:
        """Every position in turn, up to the longest prompt's last."""
        lengths = torch.tensor(self.lengths, device=self.tokens.device)[:, None]
        return [
            PositionIndex(torch.where(lengths > place, place, -1))
            for place in range(max(self.lengths))
        ]

    def _one_per_row(self, positions: int | Sequence[int] | Tensor) -> list[int]:
        if isinstance(positions, Tensor):
            positions = positions.tolist()
        if isinstance(positions, int) and not isinstance(positions, bool):
            return [positions] * len(self)
        if not isinstance(positions, Sequence) or isinstance(positions, str):
            raise PositionError(
                f"positions are one whole number, one for each row, or None; got {positions!r}"
            )
        if len(positions) != len(self):
            raise PositionError(
                f"{len(positions)} positions were given for {len(self)} prompts; give one "
                "position, or one for each prompt"
            )
        try:
            return [operator.index(position) for position in positions]
        except TypeError:
            wanted = "positions are whole numbers"
            if any(map(_is_several, positions)):
                wanted = "here each prompt has one position, no span"
            raise PositionError(f"{wanted}; got {positions!r}") from None

    def _resolve(self, row: int, position: int) -> int:
        length = self.lengths[row]
        if not -length <= position < length:
            raise PositionError(
                f"position {position} was asked for, but prompt {row} has {length} tokens "
                f"(0 to {length - 1}, or -{length} to -1)"
            )
        return position % length


def _is_several(positions: object) -> bool:
    """Whether this is a list, of positions or of anything else."""
    if isinstance(positions, Tensor):
        return positions.ndim > 0
    return isinstance(positions, Sequence) and not isinstance(positions, str)


@dataclass(frozen=True, eq=False)
class PositionIndex:
    """Positions found in every row: [batch, n], -1 where a row has none."""

    index: Int[Tensor, "batch n"]

    @property
    def valid(self) -> Bool[Tensor, "batch n"]:
        """True where the row has this position."""
        return self.index >= 0

    def take(self, activation: Tensor, rows: slice) -> Tensor:
        """[rows, pos, ...] -> [rows, n, ...]; what is taken at -1 is not meaningful."""
        index = self.index[rows].to(activation.device)
        if activation.shape[0] == 1 and index.shape[0] > 1:
            activation = activation.expand(index.shape[0], *activation.shape[1:])
        return take(activation, index)


def prepare(
    view: ModelView,
    prompts: PromptLike | Prompts,
    *,
    prepend_bos: bool | None = None,
    mask: Tensor | None = None,
) -> Prompts:
    """Turns texts or token ids into `Prompts`; raises for what the model cannot be run on.

    Args:
        view: the model.
        prompts: a text, texts of any lengths, ids (one row or several), a 1-D or 2-D tensor of
            ids, or `Prompts`.
        prepend_bos: whether texts get the beginning-of-sequence token. None does what the model's
            own `to_tokens` does. It is never put twice. Ids are taken as they are.
        mask: for a 2-D tensor, 1 where a token is real. Without it, and in batches alone, runs of
            the tokenizer's pad token at one end of the rows are taken for padding, with a warning
            that says which end.

    Raises:
        PromptError: empty, too long for the context, ids outside the vocabulary, or pad tokens
            of which it cannot be known whether they are padding.
    """
    if isinstance(prompts, Prompts):
        for number, row in enumerate(prompts.tokens.tolist()):
            _require_ids(view, number, row[: prompts.lengths[number]])
        _require_fit(view, prompts)
        return prompts
    if mask is not None and not (isinstance(prompts, Tensor) and prompts.ndim == 2):
        raise PromptError("a mask goes with a 2-D tensor of ids; none was given")
    if isinstance(prompts, Tensor):
        rows, starts = _rows_of_tensor(view, prompts, mask)
        return _assemble(view, rows, [None] * len(rows), starts)
    texts, rows = _rows_of_sequence(view, prompts, prepend_bos)
    ready = _assemble(view, rows, texts, [0] * len(rows))
    if texts[0] is None:
        _warn_padded_lists(view, rows)
    _warn_trailing_space(view, texts)
    return ready


def windows(
    model: Model,
    text: str,
    *,
    length: int,
    prepend_bos: bool | None = None,
    limit: int | None = None,
) -> Prompts:
    """Cuts a long text into windows that follow each other without overlap.

    Args:
        model: the model whose tokenizer cuts the text.
        text: the text.
        length: tokens of a window, its beginning-of-sequence token included, and whatever else
            the tokenizer puts around a text.
        prepend_bos: whether every window begins with the beginning-of-sequence token; None does
            what the model's own `to_tokens` does.
        limit: at most so many windows.

    Returns:
        The windows as `Prompts`; the last may be shorter.

    Raises:
        PromptError: the text is empty, or a window is longer than the context.
    """
    view = as_view(model)
    if length > view.n_ctx:
        raise PromptError(
            f"windows of {length} tokens were asked for, but the context of {view.name} is "
            f"{view.n_ctx} tokens"
        )
    [(opening, body, closing)] = framed(view, [text], prepend_bos)
    step = length - len(opening) - len(closing)
    if step < 1 or not body:
        raise PromptError("windows need a text of at least one token and room for it")
    rows = [opening + body[start : start + step] + closing for start in range(0, len(body), step)]
    rows = [row for row in rows if len(row) > 1] or rows
    rows = rows[:limit]
    return _assemble(view, rows, [None] * len(rows), [0] * len(rows))


def tokens_for(view: ModelView, prompts: Prompts, tokens: Tokens, what: str) -> list[int]:
    """The id of an answer or foil for each prompt.

    Args:
        view: the model.
        prompts: the prompts.
        tokens: one token for all prompts, or one for each.
        what: how messages call it.

    Raises:
        TokenError: not one token, or not one for each prompt.

    Warns:
        AnswerWarning: a token without its leading space that is another token.
    """
    if isinstance(tokens, Tensor):
        tokens = tokens.tolist()
    if isinstance(tokens, str | int):
        tokens = [tokens] * len(prompts)
    if not isinstance(tokens, Sequence):
        raise TokenError(f"the {what} is a text, an id, or one for each prompt; got {tokens!r}")
    if len(tokens) != len(prompts):
        raise TokenError(f"{len(tokens)} {what}s were given for {len(prompts)} prompts")
    ids = [single_token(view, token, what) for token in tokens]
    for token in dict.fromkeys(tokens):
        warn_missing_space(view, token, prompts.texts[tokens.index(token)], what)
    return ids


def warn_missing_space(view: ModelView, token: Token, prompt: str | None, what: str) -> None:
    """Warns where an answer lacks the leading space that would make it another single token."""
    if not isinstance(token, str) or token[:1].isspace() or not token[:1].isalnum():
        return
    if prompt is None or prompt[-1:].isspace():
        return
    bare, spaced = token_ids(view, token), token_ids(view, " " + token)
    if len(bare) == 1 and len(spaced) == 1 and bare != spaced:
        warn(
            f"the {what} {token!r} is token {bare[0]}; with its leading space, {' ' + token!r} "
            f"is token {spaced[0]}, which is what usually follows this prompt",
            AnswerWarning,
        )


def _warn_trailing_space(view: ModelView, texts: Sequence[str | None]) -> None:
    """Warns where prompts end in a space that would be part of the next word's token."""
    ending = [text for text in texts if text is not None and _ends_in_loose_space(view, text)]
    if ending:
        warn(
            f"prompts end in a space ({len(ending)} of {len(texts)}, such as "
            f"{ending[0][-20:]!r}). The space is a token of its own there, but this tokenizer puts "
            "it into the next word's token, so the model has hardly ever seen a word follow it. "
            "Leave it out of the prompt, and begin the answer with it.",
            AnswerWarning,
        )


def _ends_in_loose_space(view: ModelView, text: str) -> bool:
    """Whether the last token is of spaces alone, and would not be if a word followed."""
    if not text.endswith(" "):
        return False
    ids = token_ids(view, text)
    alone = bool(ids) and not token_text(view.tokenizer, ids[-1]).strip()
    return alone and token_ids(view, text + "a")[: len(ids)] != ids


def _rows_of_sequence(
    view: ModelView, prompts: Any, prepend_bos: bool | None
) -> tuple[list[str | None], list[list[int]]]:
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, Sequence):
        raise PromptError(
            "prompts are a text, a list of texts, token ids, or a tensor of ids; got "
            f"{type(prompts).__name__}"
        )
    if not prompts:
        raise PromptError("no prompts were given; give at least one")
    if all(isinstance(prompt, str) for prompt in prompts):
        return list(prompts), tokenize(view, prompts, prepend_bos)
    if all(isinstance(token, int) and not isinstance(token, bool) for token in prompts):
        prompts = [prompts]
    rows = []
    for row in prompts:
        if isinstance(row, Tensor):
            row = row.tolist()
        if isinstance(row, str) or not isinstance(row, Sequence):
            raise PromptError("prompts are all texts or all rows of token ids, not a mixture")
        rows.append([int(token) for token in row])
    return [None] * len(rows), rows


def _rows_of_tensor(
    view: ModelView, tokens: Tensor, mask: Tensor | None
) -> tuple[list[list[int]], list[int]]:
    if tokens.ndim == 1:
        tokens = tokens[None]
    if tokens.ndim != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise PromptError(
            f"token ids are a 1-D or 2-D tensor of whole numbers, got {tuple(tokens.shape)} of "
            f"{tokens.dtype}"
        )
    if mask is None:
        real = _guess_mask(view, tokens)
    elif mask.shape != tokens.shape:
        raise PromptError(f"the mask is {tuple(mask.shape)}, the ids are {tuple(tokens.shape)}")
    else:
        real = mask.to(tokens.device).bool()
    rows, starts = [], []
    for number, (row, keep) in enumerate(zip(tokens.tolist(), real.tolist(), strict=True)):
        places = [position for position, is_real in enumerate(keep) if is_real]
        if places and places[-1] - places[0] + 1 != len(places):
            raise PromptError(f"row {number}: the mask has a hole between real tokens")
        starts.append(places[0] if places else 0)
        rows.append([row[position] for position in places])
    return rows, starts


def _guess_mask(view: ModelView, tokens: Tensor) -> Tensor:
    """Takes runs of the pad token at one end of a batch's rows for padding.

    A batch is padded at one end alone. Where the pad token is also the beginning-of-sequence token
    and every row begins with it, the last of a leading run is that token and no padding.

    Raises:
        PromptError: the ids do not tell which tokens are padding.
    """
    tokenizer, n_rows, width = view.tokenizer, *tokens.shape
    pad = getattr(tokenizer, "pad_token_id", None)
    everything = torch.ones_like(tokens, dtype=torch.bool)
    if tokenizer is None or pad is None or n_rows == 1 or width == 1:
        return everything
    left, right = _pad_runs(tokens, pad)
    blank = left == width
    if has_bos := pad == bos_id(view) and bool(left.all()):
        left, right = left - 1, right - blank.long()
    telling = ~blank | blank.all()  # a row of pads alone says nothing about the side
    begun, ended = int((telling & (left > 0)).sum()), int((telling & (right > 0)).sum())
    unclear = None
    if begun and ended:
        unclear = f"begins {begun} and ends {ended} of {n_rows} rows"
    elif has_bos and begun == n_rows:
        unclear = "is also the beginning-of-sequence token, and every row begins with several"
    elif ended == n_rows and pad == tokenizer.eos_token_id:
        unclear = "is also the end-of-text token, and every row ends with it"
    if unclear is not None:
        raise PromptError(
            f"the pad token {token_text(tokenizer, pad)!r} {unclear}, so it cannot be known "
            "which tokens are padding; pass mask=, 1 where a token is real"
        )
    if not begun and not ended and not blank.any():
        return everything
    side = "left" if begun else "right" if ended else tokenizer.padding_side
    places = torch.arange(width, device=tokens.device)
    is_pad = places < left[:, None] if side == "left" else places >= width - right[:, None]
    warn(
        f"{int(is_pad.sum())} pad tokens in {int(is_pad.any(1).sum())} of {n_rows} rows are left "
        f"out, all on the {side}; pass mask= to say which tokens are real",
        PaddingWarning,
    )
    return ~is_pad


def _pad_runs(tokens: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """How many pad tokens begin and end each row."""
    is_pad = (tokens == pad).long()
    return is_pad.cumprod(1).sum(1), is_pad.flip(1).cumprod(1).sum(1)


def _warn_padded_lists(view: ModelView, rows: list[list[int]]) -> None:
    """Lists of ids need no padding and are taken as they are; says where they look padded."""
    pad = getattr(view.tokenizer, "pad_token_id", None)
    if pad is None or len(rows) == 1 or len({len(row) for row in rows}) > 1 or not rows[0]:
        return
    if any(len(run.unique()) > 1 for run in _pad_runs(torch.tensor(rows), pad)):
        warn(
            f"the rows of ids are of one length, and the pad token "
            f"{token_text(view.tokenizer, pad)!r} begins or ends some of them; it counts as a "
            "token here. If it is padding, leave it out, or give a tensor and mask=.",
            PaddingWarning,
        )


def _assemble(
    view: ModelView, rows: list[list[int]], texts: Sequence[str | None], starts: list[int]
) -> Prompts:
    for number, row in enumerate(rows):
        if not row:
            raise PromptError(f"prompt {number} has no tokens; give at least one")
        _require_ids(view, number, row)
    lengths = tuple(len(row) for row in rows)
    pad = getattr(view.tokenizer, "pad_token_id", None)
    pad = pad if pad is not None and 0 <= pad < view.d_vocab else 0
    width = max(lengths)
    tokens = torch.tensor(
        [row + [pad] * (width - len(row)) for row in rows], device=view.input_device
    )
    bos = bos_id(view)
    shares_bos = bos is not None and all(row[0] == bos for row in rows)
    prompts = Prompts(
        tokens=tokens,
        lengths=lengths,
        texts=tuple(texts),
        token_texts=_texts_of(view, rows),
        starts=tuple(starts),
        bos_id=bos if shares_bos else None,
    )
    _require_fit(view, prompts)
    return prompts


def _texts_of(view: ModelView, rows: list[list[int]]) -> tuple[tuple[str, ...], ...]:
    known: dict[int, str] = {}
    for token in {token for row in rows for token in row}:
        known[token] = token_text(view.tokenizer, token)
    return tuple(tuple(known[token] for token in row) for row in rows)


def _require_ids(view: ModelView, number: int, row: list[int]) -> None:
    for position, token in enumerate(row):
        if not 0 <= token < view.d_vocab:
            raise PromptError(
                f"prompt {number}, position {position}: id {token} is outside the vocabulary of "
                f"{view.d_vocab} tokens of {view.name}"
            )


def _require_fit(view: ModelView, prompts: Prompts) -> None:
    longest = max(prompts.lengths)
    if longest > view.n_ctx:
        row = prompts.lengths.index(longest)
        raise PromptError(
            f"prompt {row} has {longest} tokens, but the context of {view.name} is {view.n_ctx} "
            "tokens; shorten it, or cut it with rp.windows"
        )
