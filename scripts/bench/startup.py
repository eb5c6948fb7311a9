"""Rows on what a user waits for before anything is computed."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent.parent
PROMPT = "When Mary and John went to the store, John gave a drink to"
COMMANDS = {
    "import transformer_lens": ["-c", "import transformer_lens"],
    "import transformer_lens, transformers' GPT2LMHeadModel": [
        "-c",
        "import transformer_lens; from transformers import GPT2LMHeadModel",
    ],
    "import resid_patching": ["-c", "import resid_patching"],
    "dla.py --help": [str(SCRIPTS / "dla.py"), "--help"],
    "dla.py on the shipped model": [
        str(SCRIPTS / "dla.py"),
        *("--model", "demo", "--prompt", PROMPT, "--answer", " Mary", "--foil", " John"),
    ],
}


def measure_startup(repeats: int) -> list[dict[str, Any]]:
    """Seconds of each command in a process of its own, and over `import transformer_lens`."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    for turn in range(repeats + 1):
        for name, arguments in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run(
                [sys.executable, *arguments],
                check=True,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            if turn:  # the first reads the disk
                times[name].append(time.perf_counter() - start)
    seconds = {name: statistics.median(found) for name, found in times.items()}
    bare = seconds["import transformer_lens"]
    return [{"row": name, "seconds": t, "ratio": t / bare} for name, t in seconds.items()]
