"""Texts as windows of tokens, split into training and validation; lazily, and never silently short.

Documents are joined end to end, with the end-of-text token between them where the tokenizer has
one, and cut into windows of one length. Validation is on other documents than training: the first
ones, so that it is on the same text however much is trained on. Where there is one document, or
too little would be left to train on, it is on one block at the end; neighbours of a window within
one article say nearly the same, and would make the validation KL too low. Reading stops when there
are enough tokens; too few are an error.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from resid_patching.errors import OutOfDataError, PromptError
from resid_patching.models import ModelView
from resid_patching.texts import documents
from resid_patching.tokens import bos_id, puts_bos, token_ids

Texts: TypeAlias = str | os.PathLike[str] | Tensor | Iterable[Any]
"""A text, a path to one, ids, or an iterable of these or of rows that hold a text."""

_UNKNOWN = (
    "texts are a text, a pathlib.Path to a text or .jsonl file, token ids as a tensor "
    "[window, pos] or [pos], or an iterable of these or of {'text': ...} rows, as a Hugging Face "
    "dataset gives"
)


@dataclass(frozen=True, eq=False)
class Windows:
    """Training and validation windows.

    Attributes:
        training: ids [window, pos].
        validation: ids [window, pos].
        held_out: what the validation windows are, in words.
    """

    training: Int[Tensor, "window pos"]
    validation: Int[Tensor, "held pos"]
    held_out: str

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
        validation: texts for validation; None holds a part of `texts` out.
        text_key: what holds the text in rows of a dataset or of a .jsonl file.
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
    reader = _WindowReader(view, length, text_key, prepend_bos)
    n_held = max(1, -(-validation_tokens // length))
    n_training = None if tokens is None else max(1, -(-tokens // length))
    if validation is not None:
        held = reader.take(validation, n_held, "validation")
        return Windows(reader.take(texts, n_training, "training"), held, "a text of its own")
    return reader.split(texts, n_training, n_held)


class _WindowReader:
    def __init__(
        self, view: ModelView, length: int, text_key: str, prepend_bos: bool | None
    ) -> None:
        self.view = view
        self.length = length
        self.text_key = text_key
        self.prepend_bos = prepend_bos

    def take(self, texts: Any, count: int | None, what: str) -> Tensor:
        """The first `count` windows [window, pos], or all where it is None."""
        windows = _first_windows(self._windows(self._documents(texts), self._lead(texts)), count)
        return self._tensor(windows, count, what)

    def split(self, texts: Any, n_training: int | None, n_held: int) -> Windows:
        """Windows to train and to validate on; no document is in both where that can be."""
        read: list[Any] = []

        def reading() -> Iterator[Any]:
            for document in self._documents(texts):
                read.append(document)
                yield document

        lead, rest = self._lead(texts), reading()
        held = _first_windows(self._windows(rest, lead), n_held)
        n_first = len(read)  # what is left of the last of them is of no use
        training = _first_windows(self._windows(rest, lead), n_training)
        wanted = None if n_training is None else n_training + n_held
        if n_training is None or len(training) < n_training:
            everything = _first_windows(self._windows(read, lead), wanted)
            if n_training is not None or 2 * len(training) < len(everything):
                return self._with_block(everything, wanted, n_held)
        return Windows(
            self._tensor(training, n_training, "training"),
            self._tensor(held, n_held, "validation"),
            f"the first {n_first} of {len(read)} documents",
        )

    def _with_block(self, windows: list[list[int]], wanted: int | None, n_held: int) -> Windows:
        everything = self._tensor(windows, wanted, "training and validation")
        if len(everything) < 2 * n_held:
            raise OutOfDataError(
                f"{n_held * self.length} of the {everything.numel()} tokens would be for "
                "validation; give more text, a smaller validation_tokens, or shorter windows "
                "(length=...)"
            )
        return Windows(everything[:-n_held], everything[-n_held:], "one block at the end")

    def _tensor(self, windows: list[list[int]], count: int | None, what: str) -> Tensor:
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

    def _windows(self, documents: Iterable[Any], lead: list[int]) -> Iterator[list[int]]:
        step = self.length - len(lead)
        waiting: list[int] = []
        for document in documents:
            if isinstance(document, Tensor):
                yield from self._rows(document)
                continue
            waiting += document
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

    def _documents(self, texts: Any) -> Iterator[list[int] | Tensor]:
        """The ids of each document; a 2-D tensor of ids is one, of windows as they are."""
        for given in self._given(texts):
            if isinstance(given, Tensor) and given.ndim == 2:
                yield given
            elif isinstance(given, os.PathLike):
                yield from map(self._ids, documents(given, self.text_key))
            else:
                yield self._ids(given)

    def _given(self, texts: Any) -> Iterator[Any]:
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


def _first_windows(windows: Iterator[list[int]], count: int | None) -> list[list[int]]:
    return list(islice(windows, None if count is None else min(count, sys.maxsize)))
