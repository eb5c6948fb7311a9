"""Text that a command puts between two marks of a Markdown file."""

from pathlib import Path


def put_between(path: Path, start: str, end: str, text: str) -> None:
    """Replaces what stands between two marks.

    Raises:
        SystemExit: the file has no such marks.
    """
    before, opened, rest = path.read_text(encoding="utf-8").partition(start)
    _, closed, after = rest.partition(end)
    if not (opened and closed):
        raise SystemExit(f"{path} has no lines {start} and {end}")
    path.write_text(f"{before}{start}\n\n{text}\n{end}{after}", encoding="utf-8")
