"""Files: read as data that may be damaged, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def checksum(body: dict[str, Any]) -> str:
    """sha256 of what JSON says, whatever its layout and the order of its entries."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def as_json(body: dict[str, Any]) -> dict[str, Any]:
    """What a body is after being written as JSON and read again."""
    return json.loads(json.dumps(body))


def read_json(text: str) -> Any:
    """What a JSON text says.

    Raises:
        ValueError: it is no JSON, or nested beyond what can be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text as UTF-8, whole or not at all; see `write_bytes`.

    Halves of characters, as in names of files that are not UTF-8, become escapes.
    """
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file whole or not at all: to a temporary name beside it, then renamed.

    A symbolic link stays, and the file that it names is written. What is no regular file
    (`/dev/null`, a pipe) is written to as it is.

    Raises:
        OSError: the folder does not exist or cannot be written; the old file is untouched.
    """
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(f"{path} is a folder")
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)
        else:
            _replace(Path(os.path.realpath(path)), content)
    except OSError as error:
        if error.errno is None:
            raise
        # Names the file that was asked for, not the temporary one.
        raise type(error)(error.errno, error.strerror, str(path)) from error


def _replace(target: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", text=False)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
