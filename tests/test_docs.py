"""Every Python block and every command of the README and the docs runs, as a reader would type it.

They run in a folder that holds docs/examples, and what a page shows as their output is compared.
"""

import importlib
import re
import sys
from pathlib import Path

import pytest

import resid_patching as rp

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "scripts"))

import pages  # noqa: E402

pytestmark = pytest.mark.once

pytest.importorskip("plotly")

PAGES = pages.PAGES
BLOCKS = {page: list(pages.blocks_of(page)) for page in PAGES}
NOT_RUN = {
    ("README.md", "sets up"),
    ("development.md", "sets up, tests and measures"),
    ("logit-lens.md", "needs pip install -e '.[png]', and Chrome or Chromium"),
    ("ablation.md", "needs SmolLM2-135M, which python scripts/prepare_smollm2.py puts there"),
    ("migrating.md", "needs the tuned-lens package"),
}
NUMBER = re.compile(r"[-+]?\d+\.?\d*(?:e[-+]\d+)?")
COMMAND = re.compile(r"^\s*(?:resid-patching|python scripts/\w+\.py) .*$", re.M)


def name_of(page):
    return str(page.relative_to(REPOSITORY))


def same(shown, printed):
    """Whether two outputs have the same words, and numbers that differ by rounding alone."""
    shown, printed = (" ".join(text.split()) for text in (shown, printed))
    numbers = [[float(n) for n in NUMBER.findall(text)] for text in (shown, printed)]
    return NUMBER.sub("#", shown) == NUMBER.sub("#", printed) and numbers[0] == pytest.approx(
        numbers[1], rel=1e-2, abs=2e-3
    )


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::resid_patching.errors.UnverifiedLensWarning")
@pytest.mark.parametrize("page", [page for page in PAGES if BLOCKS[page]], ids=name_of)
def test_a_page_runs_from_its_first_block_to_its_last_and_prints_what_it_shows(page, monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    run = [block for block in BLOCKS[page] if block.reason is None]
    for (block, printed), expected in zip(pages.outputs_of(page), run, strict=True):
        assert block == expected
        if block.output is not None:
            told = f"{name_of(page)}, line {block.line}: run python scripts/pages.py"
            assert same(block.output, printed), told


def test_a_changed_output_is_noticed():
    shown = "head  logits\n2.3   +6.99\n"
    assert same(shown, "head   logits\n2.3   +6.9905\n")
    assert not same(shown, "head   logits\n2.3   +7.99\n")
    assert not same(shown, "part   logits\n2.3   +6.99\n")


def test_what_is_not_run_is_listed():
    found = {(page.name, block.reason) for page in PAGES for block in BLOCKS[page] if block.reason}
    assert found == NOT_RUN


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_found_and_no_command_stands_outside_of_one(page):
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^\s*```(.*)$", text, re.M)
    assert len(fences) % 2 == 0
    assert set(fences[::2]) <= {"python", "bash", "text"} and set(fences[1::2]) <= {""}
    assert sum(fence != "text" for fence in fences[::2]) == len(BLOCKS[page])
    assert text.count("<!-- output -->") == sum(b.output is not None for b in BLOCKS[page])
    inside = "".join(block.source for block in BLOCKS[page])
    assert [line for line in COMMAND.findall(text) if line not in inside] == []


def test_the_readme_is_short_and_its_links_lead_somewhere():
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 150
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    missing = [
        link
        for link in links
        if not link.startswith("https://") and not (REPOSITORY / link).exists()
    ]
    assert links and missing == []


def test_the_citation_names_this_version():
    text = (REPOSITORY / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {rp.__version__}\n" in text


def test_the_api_page_has_every_public_name():
    text = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: (resid_patching\S+)$", text, re.M)
    found = []  # plots has names of its own, such as attention
    for path in listed:
        home, _, name = path.rpartition(".")
        found.append(getattr(importlib.import_module(home), name))
    errors = importlib.import_module("resid_patching.errors")
    assert errors in found
    for name in set(rp.__all__) - {"__version__"}:
        assert getattr(rp, name) in found or hasattr(errors, name), name
