"""Where the tests find data and models that are not in the repository; skips with the reason."""

import os
import signal

from gpt2 import source

# Read when a hub client loads. Nothing is downloaded unless GPT-2 is asked for from the hub.
if not source.is_hub_name(os.environ.get(source.VARIABLE)):
    os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# The models here are tiny: a second thread costs more in waiting than it computes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import browser
import pytest
import torch
from hypothesis import settings

# No deadline: a first forward is slow, and that is no bug.
settings.register_profile("default", deadline=None)
settings.register_profile("fuzz", deadline=None, max_examples=1000, database=None)
settings.register_profile("round", deadline=None, max_examples=200, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

REPOSITORY = Path(__file__).resolve().parent.parent


def _folder(variable: str, default: Path) -> Path:
    return Path(os.environ.get(variable) or default)


SHARED = _folder("RESID_PATCHING_SHARED", REPOSITORY.parent / "shared")
SMOLLM2 = _folder("RESID_PATCHING_SMOLLM2", REPOSITORY / ".cache" / "smollm2-135m")


@cache
def _gpt2() -> tuple[str | None, str | None]:
    """Return what to load GPT-2 small from, or None and why there is nothing."""
    from huggingface_hub import try_to_load_from_cache

    is_cached = {
        name: isinstance(try_to_load_from_cache(name, "model.safetensors"), str)
        for name in source.HUB_NAMES
    }
    return source.find(os.environ.get(source.VARIABLE), is_cached)


def _missing(marker: str) -> str | None:
    """Return why tests with this marker cannot run here, or None when they can."""
    if marker == "shared" and not (SHARED / "data").is_dir():
        return f"no test data at {SHARED} (set RESID_PATCHING_SHARED)"
    if marker == "real" and not (SMOLLM2 / "model.safetensors").is_file():
        return f"no SmolLM2-135M at {SMOLLM2} (python scripts/prepare_smollm2.py)"
    if marker == "gpt2":
        return _gpt2()[1]
    if marker == "gpu" and not torch.accelerator.is_available():
        return "no accelerator that torch can use (cuda, mps, xpu)"
    if marker == "browser" and browser.CHROMIUM is None:
        return "no chromium (apt-get install chromium)"
    return None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an accelerator that torch can use")


def pytest_sessionstart() -> None:
    """Control-C reaches the tests that send it, also where a shell began them in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a parametrised test, `make test` runs the cases of `_few`; the others are full."""
    tests: dict[Any, list[Any]] = {}
    for item in items:
        if hasattr(item, "callspec"):
            tests.setdefault((item.path, item.originalname), []).append(item)
    for (_, name), cases in tests.items():
        for case in set(cases).difference(_few(cases, crc32(name.encode()))):
            case.add_marker("full")


def _few(cases: list[Any], seed: int) -> list[Any]:
    """Choose cases of a test such that every value of every parameter is in one of them.

    Of many models (`toy` and `cell`) it is every third, and at most about six; of long lists of
    architectures and of changes (`name`) every second. Which are taken, and which values meet,
    differs from test to test.
    """
    values = {c: {(name, id(v)) for name, v in c.callspec.params.items()} for c in cases}
    missing = set().union(*values.values())
    for name in ("toy", "cell", "name"):
        models = list(
            dict.fromkeys(value for c in cases for value in values[c] if value[0] == name)
        )
        stride = max(3, len(models) // 6) if name != "name" else 2
        if len(models) > (3 if name != "name" else 12):
            missing -= {model for n, model in enumerate(models) if (n + seed) % stride}
    chosen = []
    while missing:
        best = max(cases, key=lambda c: (len(values[c] & missing), crc32(c.nodeid.encode())))
        chosen.append(best)
        missing -= values[best]
    return chosen


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in ("shared", "real", "gpt2", "browser", "gpu"):
        reason = _missing(marker) if item.get_closest_marker(marker) else None
        if reason is None:
            continue
        if marker == "real" and os.environ.get("RESID_PATCHING_REQUIRE_REAL") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of shared test data; for tests marked `shared`."""
    return SHARED


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M as a Hugging Face folder; for tests marked `real`."""
    return SMOLLM2


@pytest.fixture(scope="session")
def gpt2_source() -> str:
    """What to load GPT-2 small from; for tests marked `gpt2`."""
    found, why = _gpt2()
    assert found is not None, why  # a test that uses gpt2_source must be marked gpt2
    return found
