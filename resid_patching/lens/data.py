"""Texts as windows of tokens, split into training and validation; lazily, and never silently short.

Documents are joined end to end, with the end-of-text token between them where the tokenizer has
one, and cut into windows of one length. Windows for validation lie evenly among the others and
are never trained on. Reading stops when there are enough tokens; too few are an error.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from resid_patching.errors import OutOfDataError, PromptError
from resid_patching.models import ModelView
from resid_patching.tokens import bos_id, puts_bos, token_ids

_UNKNOWN = (
    "texts are a text, a pathlib.Path to a text file, token ids as a tensor [window, pos] "
    "or [pos], or an iterable of these or of {'text': ...} rows, as a Hugging Face dataset gives"
)


@dataclass(frozen=True, eq=False)
class Windows:
    """Training and validation windows.

    Attributes:
        training: ids [window, pos].
        validation: ids [window, pos].
    """

    training: Int[Tensor, "window pos"]
    validation: Int[Tensor, "held pos"]

    @property
    def hash(self) -> str:
        """sha256 of all ids."""
        digest = hashlib.sha256()
        for part in (self.training, self.validation):
            digest.update(str(tuple(part.shape)).encode())
            digest.update(part.to(torch.int64).contiguous().numpy().astype("<i8").tobytes())
        return digest.hexdigest()


def read_windows(
    view: ModelView,
    texts: Any,
    *,
    length: int,
    tokens: int | None,
    validation_tokens: int,
    validation: Any = None,
    text_key: str = "text",
    prepend_bos: bool | None = None,
) -> Windows:
    """Reads as many windows as are wanted.

    Args:
        view: the model whose tokenizer cuts the texts.
        texts: see `fit_tuned_lens`.
        length: tokens of a window, its beginning-of-sequence token included.
        tokens: training tokens; None for all that there are.
        validation_tokens: validation tokens.
        validation: texts for validation; None holds windows of `texts` out.
        text_key: the column of a dataset's rows that holds the text.
        prepend_bos: whether every window begins with the beginning-of-sequence token.

    Raises:
        OutOfDataError: the texts hold fewer tokens.
        PromptError: what is given is no text or ids, or a window is longer than the context.
    """
    if not 2 <= length <= view.n_ctx:
        raise PromptError(
            f"windows are of 2 to {view.n_ctx} tokens (the context of {view.name}), not {length}"
        )
    if tokens is None and not isinstance(texts, str | os.PathLike | Tensor | Sequence):
        if not hasattr(texts, "__len__"):
            raise PromptError("how much of a stream is to be read? Give tokens=...")
    reader = _Reader(view, length, text_key, prepend_bos)
    n_held = max(1, -(-validation_tokens // length))
    n_training = None if tokens is None else max(1, -(-tokens // length))
    if validation is not None:
        held = reader.take(validation, n_held, "validation")
        return Windows(reader.take(texts, n_training, "training"), held)
    wanted = None if n_training is None else n_training + n_held
    everything = reader.take(texts, wanted, "training and validation")
    if len(everything) < 2 * n_held:
        raise OutOfDataError(
            f"{n_held * length} of the {len(everything) * length} tokens would be for validation; "
            "give more text, a smaller validation_tokens, or shorter windows (length=...)"
        )
    spacing = len(everything) / n_held
    is_held = everything.new_zeros(len(everything), dtype=torch.bool)
    is_held[[int((number + 0.5) * spacing) for number in range(n_held)]] = True
    return Windows(everything[~is_held], everything[is_held])


class _Reader:
    def __init__(
        self, view: ModelView, length: int, text_key: str, prepend_bos: bool | None
    ) -> None:
        self.view = view
        self.length = length
        self.text_key = text_key
        self.prepend_bos = prepend_bos

    def take(self, texts: Any, count: int | None, what: str) -> Tensor:
        """So many windows [window, pos], or all where count is None."""
        at_most = None if count is None else min(count, sys.maxsize)
        windows = list(islice(self._windows(texts), at_most))
        if count is not None and len(windows) < count or not windows:
            asked = "at least one window" if count is None else f"{count * self.length} tokens"
            raise OutOfDataError(
                f"{asked} for {what} were asked for, but the texts hold {len(windows)} windows of "
                f"{self.length} tokens ({len(windows) * self.length} tokens). Give more text, or "
                "ask for fewer tokens."
            )
        found = torch.tensor(windows, device="cpu")
        if int(found.min()) < 0 or int(found.max()) >= self.view.d_vocab:
            raise PromptError(
                f"ids are from 0 to {self.view.d_vocab - 1} for {self.view.name}; found "
                f"{int(found.min())} to {int(found.max())}"
            )
        return found

    def _windows(self, texts: Any) -> Iterator[list[int]]:
        if isinstance(texts, Tensor) and texts.ndim == 2:
            yield from self._rows(texts)
            return
        lead = self._lead(texts)
        step = self.length - len(lead)
        waiting: list[int] = []
        for document in self._documents(texts):
            if isinstance(document, Tensor) and document.ndim == 2:
                yield from self._rows(document)
                continue
            waiting += self._ids(document)
            start = 0
            while start + step <= len(waiting):
                yield lead + waiting[start : start + step]
                start += step
            waiting = waiting[start:]

    def _rows(self, tokens: Tensor) -> Iterator[list[int]]:
        """Rows of ids as they are; longer ones are cut into windows."""
        if tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise PromptError(f"token ids are whole numbers, got {tokens.dtype}")
        if tokens.shape[1] < self.length:
            raise PromptError(
                f"windows of {self.length} tokens were asked for, but the ids come in rows of "
                f"{tokens.shape[1]}; give length={tokens.shape[1]} or less"
            )
        for row in tokens.tolist():
            for start in range(0, len(row) - self.length + 1, self.length):
                yield row[start : start + self.length]

    def _lead(self, texts: Any) -> list[int]:
        if isinstance(texts, Tensor) or self.view.tokenizer is None:
            return []
        bos = bos_id(self.view)
        return [bos] if bos is not None and puts_bos(self.view, self.prepend_bos) else []

    def _documents(self, texts: Any) -> Iterator[Any]:
        if isinstance(texts, str | os.PathLike | Tensor):
            yield texts
        elif isinstance(texts, Mapping):
            raise PromptError(
                f"a mapping with {', '.join(map(str, list(texts)[:4]))} was given; choose one "
                f'split, such as dataset["train"]. {_UNKNOWN}'
            )
        elif isinstance(texts, Iterable) and not isinstance(texts, bytes):
            if isinstance(texts, Sequence) and texts and isinstance(texts[0], int):
                yield texts
            else:
                yield from texts
        else:
            raise PromptError(f"{_UNKNOWN}; got {type(texts).__name__}")

    def _ids(self, document: Any) -> list[int]:
        if isinstance(document, Mapping):
            if self.text_key not in document:
                names = ", ".join(map(str, document))
                raise PromptError(
                    f"the rows have {names}, but no {self.text_key!r}; give text_key=..."
                )
            document = document[self.text_key]
        if isinstance(document, os.PathLike):
            document = _read(Path(document))
        if isinstance(document, str):
            if self.view.tokenizer is None:
                raise PromptError(f"{self.view.name} has no tokenizer; give token ids")
            end = self.view.tokenizer.eos_token_id
            return token_ids(self.view, document) + ([] if end is None else [int(end)])
        if isinstance(document, Tensor) and document.ndim == 1:
            document = document.tolist()
        if isinstance(document, Sequence) and all(isinstance(i, int) for i in document):
            return list(document)
        raise PromptError(f"{_UNKNOWN}; got {type(document).__name__} among them")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from None
