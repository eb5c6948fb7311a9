"""Writes the tables of docs/models.md anew: what is exact, and what is refused, on which model.

The checks are those of tests/test_architectures.py. The table of TransformerBridge is written
where TransformerLens 4 is installed, that of HookedTransformer where TransformerLens 3 is:

    .venv-tl4/bin/python scripts/model_table.py
    .venv/bin/python scripts/model_table.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import zoo  # noqa: E402
from zoo_architectures import DOCUMENT, LANES, Subject, rewrite, verdicts  # noqa: E402


def main() -> None:
    """Measures every model of the lane and writes its table."""
    lane = "hooked" if zoo.HAS_HOOKED else "bridge"
    rows = {}
    for arch in LANES[lane]:
        rows[arch.title] = verdicts(Subject(arch, lane))
        refused = sum(verdict.startswith("refused") for verdict in rows[arch.title].values())
        print(f"{arch.title}: {refused} refused")
    rewrite(lane, rows)
    print(f"wrote {DOCUMENT}")


if __name__ == "__main__":
    main()
