"""Every Python block and every command of the README and the docs runs, as a reader would run it.

The demo model stands in for others, and small made-up texts for the receiver's files.
"""

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

import resid_patching as rp
from resid_patching.cli import main

pytestmark = pytest.mark.once

pytest.importorskip("plotly")

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
NOT_RUN = {("migrating.md", "needs the tuned-lens package")}

STAND_INS = {'"gpt2"': '"demo"', "tokens=100_000": "tokens=2_000, validation_tokens=256, steps=2"}
# The same on command lines; heads and lengths of larger models are those the demo model has.
COMMAND_STAND_INS = {
    ".cache/smollm2-135m": "demo",
    "--model gpt2": "--model demo",
    "--length 512": "--length 64",
    "--tokens 16384": "--tokens 2000 --validation-tokens 256 --steps 2",
    " 9.9 9.6 ": " 2.3 2.2 ",
    "attn.6": "attn.2",
    "resid_pre.6": "resid_pre.2",
}

_BLOCK = re.compile(r"^(?:<!-- not run: (.+?) -->\n)?```python\n(.*?)^```$", re.M | re.S)
_COMMAND = re.compile(r"^(?: {4})?(resid-patching (?:.*\\\n)*.*)$", re.M)


def blocks_of(page):
    """(line, source, why it is not run) of each block; a reason of None means that it runs."""
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        yield text[: found.start(2)].count("\n"), found[2], found[1]


def commands_of(page):
    text = page.read_text(encoding="utf-8")
    return [" ".join(found[1].split("\\\n")) for found in _COMMAND.finditer(text)]


def name_of(page):
    return str(page.relative_to(REPOSITORY))


WITH_BLOCKS = [page for page in PAGES if list(blocks_of(page))]
COMMANDS = [(name_of(page), line) for page in PAGES for line in commands_of(page)]


@pytest.fixture
def at_home(tmp_path, monkeypatch):
    """A folder with the files that blocks and commands read."""
    monkeypatch.chdir(tmp_path)
    pairs = rp.indirect_object_prompts(rp.load("demo"), 200, seed=0, corrupt="names")
    prose = ". ".join(pairs.base)
    for name in ("prose.txt", "other.txt", "wikitext.txt"):
        Path(name).write_text(prose, encoding="utf-8")
    rows = "".join(json.dumps({"text": text}) + "\n" for text in pairs.base)
    Path("articles.jsonl").write_text(rows, encoding="utf-8")
    Path("prompts.txt").write_text("\n".join(pairs.base[:3]), encoding="utf-8")
    Path("others.txt").write_text("\n".join(pairs.source[:3]), encoding="utf-8")
    return tmp_path


def replaced(text, stand_ins):
    for old, new in stand_ins.items():
        text = text.replace(old, new)
    return text


@pytest.mark.once
@pytest.mark.full
@pytest.mark.filterwarnings("ignore::resid_patching.errors.UnverifiedLensWarning")
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=name_of)
def test_the_python_of_a_page_runs_from_its_first_block_to_its_last(page, at_home):
    names = {"__name__": "__main__"}
    for line, source, reason in blocks_of(page):
        if reason is None:
            lines = "\n" * line + replaced(source, STAND_INS)
            exec(compile(lines, str(page), "exec"), names)


@pytest.mark.once
def test_what_is_not_run_is_listed():
    found = {(page.name, reason) for page in PAGES for _, _, reason in blocks_of(page) if reason}
    assert found == NOT_RUN


@pytest.mark.once
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_fence_of_a_page_says_what_it_holds(page):
    fences = re.findall(r"^\s*```(.*)$", page.read_text(encoding="utf-8"), re.M)
    assert len(fences) % 2 == 0
    assert set(fences[::2]) <= {"python", "text"} and set(fences[1::2]) <= {""}
    assert sum(fence == "python" for fence in fences) == len(list(blocks_of(page)))


@pytest.mark.once
@pytest.mark.full
def test_the_commands_of_all_pages_succeed(at_home, capsys):
    assert len(COMMANDS) > 10
    for page, line in COMMANDS:
        code = main(shlex.split(replaced(line, COMMAND_STAND_INS))[1:])
        shown = capsys.readouterr()
        assert code == 0, f"{page}: {line}\n{shown.err}"


@pytest.mark.once
def test_the_api_page_has_every_public_name():
    text = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: (resid_patching\S+)$", text, re.M)
    found = {}
    for path in listed:
        home, _, name = path.rpartition(".")
        found[name] = getattr(importlib.import_module(home), name)
    errors = importlib.import_module("resid_patching.errors")
    assert errors in found.values()
    for name in set(rp.__all__) - {"__version__"}:
        assert found.get(name) is getattr(rp, name) or hasattr(errors, name), name
