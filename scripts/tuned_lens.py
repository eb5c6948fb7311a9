"""The tuned lens from the command line; the same as `resid-patching tuned-lens`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from resid_patching.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(["tuned-lens", *sys.argv[1:]]))
