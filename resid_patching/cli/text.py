"""Long text files as windows of tokens, read and cut piece by piece.

The windows are those of `rp.windows` on the whole text, whatever its size: each block of the file
is tokenized with the characters around it, and the tokens that begin in it are kept. A .jsonl file
is a document a row (`texts`), and no window holds tokens of two.
"""

from __future__ import annotations

import hashlib
import os
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import resid_patching as rp
from resid_patching.cli.frame import UsageError
from resid_patching.texts import has_rows, require_prose, rows_of

BLOCK = 2**18  # characters read at a time
GROUP_TOKENS = 2**16  # tokens of the windows that are handed on together
_AROUND = 2**10  # characters on each side; no token and no merge reaches that far

_Block = tuple[str, str]
"""Some of a document's text, and the characters that follow it."""


@dataclass
class TextWindows:
    """The windows of a text file, and what has been read of it so far."""

    view: rp.ModelView  # whose tokenizer cuts the text
    path: str  # a UTF-8 file
    length: int  # tokens of a window, its beginning-of-sequence token included
    prepend_bos: bool | None = None  # as in `rp.capture`
    limit: int | None = None  # at most so many windows
    whole: bool = False  # leave out a last window that is shorter
    text_key: str = "text"  # what holds the text in the rows of a .jsonl file
    n_documents: int = 0
    n_windows: int = 0  # handed out
    n_tokens: int = 0  # of these
    share_read: float = 0.0  # of the file, from 0 to 1
    _digest: Any = field(default_factory=hashlib.sha256)

    @property
    def hash(self) -> str:
        """`Prompts.hash` of all windows handed out so far."""
        return self._digest.hexdigest()

    @property
    def estimate(self) -> int:
        """About how many windows there are, from what has been read."""
        found = round(self.n_windows / self.share_read) if self.share_read else self.n_windows
        return min(found, self.limit) if self.limit is not None else found

    @property
    def source(self) -> str:
        """What is read, in words."""
        if not has_rows(self.path):
            return self.path
        rows = f"{self.n_documents} row{'s' * (self.n_documents > 1)}"
        return f"{self.path}, {self.text_key!r} of {rows}"

    def groups(self) -> Iterator[rp.Prompts]:
        """The windows, some at a time."""
        from resid_patching.prompts import prepare

        group: list[list[int]] = []
        for row in self.rows():
            group.append(row)
            if len(group) * self.length >= GROUP_TOKENS:
                yield prepare(self.view, group)
                group = []
        if group:
            yield prepare(self.view, group)

    def rows(self) -> Iterator[list[int]]:
        """The ids of each window, up to the limit."""
        for blocks in self._documents():
            self.n_documents += 1
            for row in self._cut(blocks):
                self.n_windows += 1
                self.n_tokens += len(row)
                self._digest.update((",".join(map(str, row)) + ";").encode())
                yield row
                if self.n_windows == self.limit:
                    return
        if self.n_windows == 0:
            what = f"whole window of {self.length} tokens" if self.whole else "text"
            raise UsageError(f"{self.path} holds no {what}")

    # A document as windows

    def _cut(self, blocks: Iterable[_Block]) -> Iterator[list[int]]:
        lead: list[int] = []
        body: list[int] = []
        before, is_first = "", True
        for here, after in blocks:
            lead = lead if before else self._lead(here)
            ids = self._ids_within(before, here, after)
            if not before and lead and ids[:1] == lead:
                ids = ids[1:]
            before = (before + here)[-_AROUND:]
            body += ids
            step = self.length - len(lead)
            n_full = max(0, len(body) - 1) // step  # the last is held back: more may follow
            for start in range(0, n_full * step, step):
                yield lead + body[start : start + step]
            is_first = is_first and n_full == 0
            body = body[n_full * step :]
        rest = lead + body
        # As in rp.windows: one token alone has no next token to be scored.
        is_alone = is_first and not has_rows(self.path)
        if body and (len(rest) > 1 or is_alone) and not (self.whole and len(rest) < self.length):
            yield rest

    def _lead(self, text: str) -> list[int]:
        """What begins every window."""
        start = text[:_AROUND]
        options: dict[str, Any] = {"length": self.length, "prepend_bos": self.prepend_bos}
        first = rp.windows(self.view, start, limit=1, **options)
        return [] if first.bos_id is None else [first.bos_id]

    def _ids_within(self, before: str, here: str, after: str) -> list[int]:
        """The tokens that begin in a block, cut as they are in the whole text."""
        text, tokenizer = before + here + after, self.view.tokenizer
        assert tokenizer is not None  # `_lead` has refused a model without one
        if not self._has_offsets:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        start, stop = len(before), len(before) + len(here)
        if not after:
            stop = len(text) + 1
        pairs = zip(found["input_ids"], found["offset_mapping"], strict=True)
        return [token for token, (begin, _) in pairs if start <= begin < stop]

    @property
    def _has_offsets(self) -> bool:
        """Whether a text can be tokenized in blocks; otherwise it is one block."""
        return getattr(self.view.tokenizer, "is_fast", False)

    # The file as documents

    def _documents(self) -> Iterator[Iterable[_Block]]:
        if not has_rows(self.path):
            yield self._blocks()
            return
        with open(self.path, "rb") as file:
            n_bytes = max(1, os.fstat(file.fileno()).st_size)
            for text in rows_of(file, self.text_key):
                self.share_read = file.tell() / n_bytes
                yield [(text, "")]

    def _blocks(self) -> Iterator[_Block]:
        size = BLOCK if self._has_offsets else -1
        try:
            with open(self.path, encoding="utf-8-sig") as file:
                buffer: Any = file.buffer
                n_bytes = max(1, os.fstat(file.fileno()).st_size)
                here = file.read(size)
                while here:
                    following = file.read(size)
                    self.share_read = buffer.tell() / n_bytes if following else 1.0
                    yield here, following[:_AROUND]
                    here = following
        except UnicodeDecodeError:
            raise UsageError(f"{self.path} is not UTF-8 text; save it as UTF-8") from None


def windows_of(
    view: rp.ModelView, arguments: Namespace, path: str, length: int, *, whole: bool = False
) -> TextWindows:
    """The windows of a file, cut as flags say."""
    key = arguments.text_key or "text"
    return TextWindows(view, path, length, arguments.prepend_bos, arguments.limit, whole, key)


def require_texts(paths: Iterable[str], text_key: str | None) -> None:
    """Refuses text files that cannot be read, before anything is loaded."""
    paths = list(paths)
    if text_key is not None and not any(map(has_rows, paths)):
        raise UsageError(f"--text-key is for a .jsonl file, but {paths[0]} is a plain text")
    for path in paths:
        require_prose(path)
        if not Path(path).is_file():
            found = "does not exist"
            if Path(path).exists():
                found = "is a folder" if Path(path).is_dir() else "is a pipe or device"
            raise UsageError(f"{path} {found}; give a UTF-8 text file")
        with open(path, "rb") as file:
            text = rows_of(file, text_key or "text") if has_rows(path) else iter(file)
            if next(text, None) is None:
                raise UsageError(f"{path} holds no text")
