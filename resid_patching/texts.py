"""Text files as documents: a row of JSON lines is one each, any other text file is one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from resid_patching.errors import PromptError
from resid_patching.files import read_json

_TABLES = (".json", ".csv", ".tsv")


def has_rows(path: str | os.PathLike[str]) -> bool:
    """Whether a file is of JSON lines, by its name."""
    return Path(path).suffix.lower() in (".jsonl", ".ndjson")


def require_prose(path: str | os.PathLike[str]) -> None:
    """Refuses files whose syntax would be read as if it were text.

    Raises:
        PromptError: the name is that of a table or of one JSON value.
    """
    if (kind := Path(path).suffix.lower()) in _TABLES:
        raise PromptError(
            f"{path} is a {kind} file, whose syntax would be read as text; write one "
            '{"text": ...} a line to a .jsonl file, or the text alone to a .txt file'
        )


def documents(path: str | os.PathLike[str], text_key: str = "text") -> Iterator[str]:
    """The documents of a UTF-8 file, read as they are asked for.

    Args:
        path: with the ending .jsonl or .ndjson, a JSON object a line; any other is one document.
        text_key: which entry of the objects is the text.

    Raises:
        PromptError: not UTF-8, a table, or a line that is no such object (it says which).
        OSError: the file cannot be read.
    """
    if has_rows(path):
        with open(path, "rb") as file:
            yield from rows_of(file, text_key)
    else:
        yield read_text(path)


def read_text(path: str | os.PathLike[str]) -> str:
    """A whole UTF-8 text file.

    Raises:
        PromptError: not UTF-8, or a table.
        OSError: the file cannot be read.
    """
    require_prose(path)
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from None


def rows_of(file: IO[bytes], text_key: str) -> Iterator[str]:
    """The text of each row of an open file of JSON lines; empty lines and texts are skipped.

    Raises:
        PromptError: a line is not UTF-8, no JSON object, or has no such text; it says which.
    """
    for number, line in enumerate(file, 1):
        where = f"{file.name}, line {number}"
        try:
            # utf-8-sig leaves out a byte order mark, which only the first line can begin with.
            content = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise PromptError(f"{where}: this is not UTF-8 text; save it as UTF-8") from None
        if content.strip() and (text := _text_of_row(content, text_key, where)).strip():
            yield text


def _text_of_row(line: str, text_key: str, where: str) -> str:
    try:
        row = read_json(line)
    except ValueError as error:
        raise PromptError(f"{where}: this is no JSON: {error}") from None
    if not isinstance(row, dict):
        raise PromptError(
            f'{where}: a JSON object was expected, such as {{"{text_key}": "..."}}; found '
            f"{line.strip()[:40]!r}"
        )
    if text_key not in row:
        names = ", ".join(map(repr, row)) or "nothing"
        raise PromptError(
            f"{where}: the row has {names}, but no {text_key!r}; say which it is (text_key, on the "
            "command line --text-key)"
        )
    if not isinstance(row[text_key], str):
        raise PromptError(f"{where}: {text_key!r} is a text; found {str(row[text_key])[:40]!r}")
    return row[text_key]
