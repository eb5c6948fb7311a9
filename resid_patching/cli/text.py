"""Long text files as windows of tokens, read and cut piece by piece.

The windows are those of `rp.windows` on the whole text, whatever its size: each block of the file
is tokenized with the characters around it, and the tokens that begin in it are kept. A .jsonl file
is a document a row (`texts`), and no window holds tokens of two.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from resid_patching.cli.frame import UsageError
from resid_patching.texts import has_rows, require_prose, rows_of

BLOCK = 2**18  # characters read at a time
GROUP_TOKENS = 2**16  # tokens of the windows that are handed on together
_AROUND = 2**10  # characters on each side; no token and no merge reaches that far


@dataclass
class TextWindows:
    """The windows of a text file.

    Attributes:
        view: the model whose tokenizer cuts the text.
        path: a UTF-8 file.
        text_key: what holds the text in the rows of a .jsonl file.
        length: tokens of a window, its beginning-of-sequence token included.
        prepend_bos: as in `rp.capture`.
        limit: at most so many windows.
        whole: leave out a last window that is shorter.
        n_documents: documents begun so far.
        n_windows: windows handed out so far.
        n_tokens: their tokens.
        share_read: how much of the file has been read, from 0 to 1.
    """

    view: Any
    path: str
    length: int
    prepend_bos: bool | None = None
    limit: int | None = None
    whole: bool = False
    text_key: str = "text"
    n_documents: int = 0
    n_windows: int = 0
    n_tokens: int = 0
    share_read: float = 0.0

    def __post_init__(self) -> None:
        self._digest = hashlib.sha256()

    @property
    def hash(self) -> str:
        """`Prompts.hash` of all windows handed out so far."""
        return self._digest.hexdigest()

    @property
    def estimate(self) -> int:
        """About how many windows there are, from what has been read."""
        found = round(self.n_windows / self.share_read) if self.share_read else self.n_windows
        return min(found, self.limit) if self.limit is not None else found

    def groups(self) -> Iterator[Any]:
        """The windows as `Prompts`, some at a time.

        Raises:
            UsageError: the file cannot be read, or holds no window.
            PromptError: a window is longer than the context.
        """
        from resid_patching.prompts import prepare

        group: list[list[int]] = []
        for row in self._limited():
            group.append(row)
            if len(group) * self.length >= GROUP_TOKENS:
                yield prepare(self.view, group)
                group = []
        if group:
            yield prepare(self.view, group)
        if self.n_windows == 0:
            what = f"whole window of {self.length} tokens" if self.whole else "text"
            raise UsageError(f"{self.path} holds no {what}")

    def _limited(self) -> Iterator[list[int]]:
        for row in self._rows():
            self.n_windows += 1
            self.n_tokens += len(row)
            self._digest.update((",".join(map(str, row)) + ";").encode())
            yield row
            if self.n_windows == self.limit:
                return

    @property
    def source(self) -> str:
        """What is read, in words."""
        if not has_rows(self.path):
            return self.path
        rows = f"{self.n_documents} row{'s' * (self.n_documents > 1)}"
        return f"{self.path}, {self.text_key!r} of {rows}"

    def _rows(self) -> Iterator[list[int]]:
        for blocks in self._documents():
            self.n_documents += 1
            yield from self._cut(blocks)

    def _cut(self, blocks: Iterable[tuple[str, str]]) -> Iterator[list[int]]:
        lead: list[int] = []
        body: list[int] = []
        n_yielded = 0
        for number, (lead, ids) in enumerate(self._pieces(blocks)):
            if number == 0 and lead and ids[:1] == lead:
                ids = ids[1:]
            body += ids
            step = self.length - len(lead)
            n_full = max(0, len(body) - 1) // step  # the last is held back: more may follow
            for start in range(0, n_full * step, step):
                yield lead + body[start : start + step]
            n_yielded += n_full
            body = body[n_full * step :]
        rest = lead + body
        # As in rp.windows: one token alone has no next token to be scored.
        alone = n_yielded == 0 and not has_rows(self.path)
        if body and (len(rest) > 1 or alone) and not (self.whole and self._short(rest)):
            yield rest

    def _short(self, row: list[int]) -> bool:
        return len(row) < self.length

    def _pieces(self, blocks: Iterable[tuple[str, str]]) -> Iterator[tuple[list[int], list[int]]]:
        """What begins every window, and the ids of one block of a document after another."""
        before = ""
        lead: list[int] | None = None
        for here, after in blocks:
            if lead is None:
                lead = self._lead(here)
            yield lead, self._ids_within(before, here, after)
            before = (before + here)[-_AROUND:]

    def _lead(self, text: str) -> list[int]:
        from resid_patching.prompts import windows

        start = text[:_AROUND]
        first = windows(self.view, start, length=self.length, prepend_bos=self.prepend_bos, limit=1)
        return [] if first.bos_id is None else [first.bos_id]

    def _ids_within(self, before: str, here: str, after: str) -> list[int]:
        tokenizer = self.view.tokenizer
        text = before + here + after
        if not getattr(tokenizer, "is_fast", False):
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        start, stop = len(before), len(before) + len(here)
        pairs = zip(found["input_ids"], found["offset_mapping"], strict=True)
        if not after:
            stop = len(text) + 1
        return [token for token, (begin, _) in pairs if start <= begin < stop]

    def _documents(self) -> Iterator[Iterable[tuple[str, str]]]:
        """Each document as blocks."""
        if not has_rows(self.path):
            yield self._blocks()
            return
        try:
            with open(self.path, "rb") as file:
                n_bytes = max(1, os.fstat(file.fileno()).st_size)
                for text in rows_of(file, self.text_key):
                    self.share_read = file.tell() / n_bytes
                    yield [(text, "")]
        except OSError as error:
            raise UsageError(f"{self.path} cannot be read: {error.strerror}") from None

    def _blocks(self) -> Iterator[tuple[str, str]]:
        """Blocks of the text, each with the characters that follow it."""
        # Without offsets a text cannot be cut and joined, so it is taken as one block.
        size = BLOCK if getattr(self.view.tokenizer, "is_fast", False) else -1
        try:
            with open(self.path, encoding="utf-8-sig") as file:
                n_bytes = max(1, os.fstat(file.fileno()).st_size)
                here = file.read(size)
                while here:
                    following = file.read(size)
                    self.share_read = _bytes_read(file) / n_bytes if following else 1.0
                    yield here, following[:_AROUND]
                    here = following
        except UnicodeDecodeError:
            raise UsageError(f"{self.path} is not UTF-8 text; save it as UTF-8") from None
        except OSError as error:
            raise UsageError(f"{self.path} cannot be read: {error.strerror}") from None


def _bytes_read(file: IO[str]) -> int:
    return file.buffer.tell()  # type: ignore[attr-defined]


def require_texts(paths: Iterable[str], text_key: str | None) -> None:
    """Refuses text files that cannot be read, before anything is loaded.

    Raises:
        UsageError: missing, a folder, or empty, or a --text-key for files without rows.
        PromptError: a table, or a .jsonl file whose first row has no text.
    """
    paths = list(paths)
    if text_key is not None and not any(map(has_rows, paths)):
        raise UsageError(f"--text-key is for a .jsonl file, but {paths[0]} is a text as it is")
    for path in paths:
        _require_text(path)
        if has_rows(path):
            with open(path, "rb") as file:
                if next(rows_of(file, text_key or "text"), None) is None:
                    raise UsageError(f"{path} holds no text")


def _require_text(path: str) -> None:
    require_prose(path)
    if not Path(path).is_file():
        found = "does not exist"
        if Path(path).exists():
            found = "is a folder" if Path(path).is_dir() else "is a pipe or device"
        raise UsageError(f"{path} {found}; give a UTF-8 text file")
    if Path(path).stat().st_size == 0:
        raise UsageError(f"{path} holds no text")
