"""What is shipped: one version everywhere, the data files, and a demo model of modest size."""

import re
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


def test_every_file_that_is_not_code_is_package_data():
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["resid_patching"]
    declared = {path for pattern in patterns for path in PACKAGE.glob(pattern) if path.is_file()}
    present = {
        path
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    assert present == declared
    assert PACKAGE / "py.typed" in present


def test_the_demo_model_is_there_and_small():
    sizes = {path.name: path.stat().st_size for path in (PACKAGE / "demo").iterdir()}
    assert "model.safetensors" in sizes
    assert sum(sizes.values()) <= DEMO_LIMIT, sizes
