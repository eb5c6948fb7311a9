"""Where the check-list takes GPT-2 small from."""

from __future__ import annotations

from pathlib import Path

VARIABLE = "RESID_PATCHING_GPT2"
HUB_NAMES = ("gpt2", "openai-community/gpt2")


def is_hub_name(named: str | None) -> bool:
    """Whether the variable asks for the hub, which may then be reached."""
    return named in HUB_NAMES


def find(named: str | None, is_cached: dict[str, bool]) -> tuple[str | None, str | None]:
    """What to load, or None and why there is nothing.

    Args:
        named: what `RESID_PATCHING_GPT2` says: a folder, a hub name, nothing.
        is_cached: for each hub name, whether the hub's cache on this machine holds it.

    Returns:
        A folder or hub name to load, and None; or None, and why tests are skipped.
    """
    if is_hub_name(named):
        return named, None
    if named:
        if (Path(named) / "config.json").is_file():
            return named, None
        return None, f"no GPT-2 small: {VARIABLE} is {named}, which has no config.json"
    for name in HUB_NAMES:
        if is_cached[name]:
            return name, None
    return None, f"no GPT-2 small in the hub's cache (set {VARIABLE} to a folder, or gpt2)"
