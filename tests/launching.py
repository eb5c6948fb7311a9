"""Starts two processes of a script as its users start them."""

import os
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
TORCHRUN = (str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2")
ACCELERATE = (
    *(str(BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2"),
    *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
    *("--main_process_port", "0"),
)


def launch(*command):
    """Exit code, stdout, stderr and seconds of two processes on the CPU."""
    began = time.monotonic()
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [str(word) for word in command],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout, done.stderr, time.monotonic() - began
