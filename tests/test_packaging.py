"""What is shipped: one version everywhere, the data files, and a demo model of modest size."""

import re
import subprocess
from pathlib import Path

import pytest

import resid_patching

tomllib = pytest.importorskip("tomllib")  # in the standard library from Python 3.11

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "resid_patching"
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
DEMO_LIMIT = 6_000_000  # bytes; it is in every clone and every wheel


def test_the_version_is_the_same_in_pyproject_and_package():
    assert PYPROJECT["project"]["version"] == resid_patching.__version__


def test_the_changelog_has_the_current_version():
    changelog = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    version = re.escape(resid_patching.__version__)
    assert re.search(rf"^## {version}\b", changelog, flags=re.MULTILINE)


def test_the_wheel_has_every_file_of_the_package():
    """It takes the whole folder, but for what git ignores: which must be none of its files."""
    wheel = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["resid_patching"]}
    present = {
        str(path.relative_to(REPOSITORY))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"resid_patching/py.typed", "resid_patching/demo/model.safetensors"} <= present
    ignored = subprocess.run(
        ["git", "check-ignore", "--no-index", "--stdin"],
        cwd=REPOSITORY,
        input="\n".join(sorted(present)),
        capture_output=True,
        text=True,
    )
    assert ignored.stderr == "" and ignored.stdout == ""


def test_make_demo_ends_by_saying_what_to_type_next():
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    demo = makefile[makefile.index("\ndemo:") :].split("\n\n")[0]
    assert "source $(BIN)/activate" in demo and "docs/tour.ipynb" in demo


def test_the_demo_model_is_there_and_small():
    sizes = {path.name: path.stat().st_size for path in (PACKAGE / "demo").iterdir()}
    assert "model.safetensors" in sizes
    assert sum(sizes.values()) <= DEMO_LIMIT, sizes
