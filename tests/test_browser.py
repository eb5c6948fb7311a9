"""Pages as a browser shows them: each command's page, opened in headless Chromium."""

import base64
import itertools
import json
import time

import numpy as np
import pytest
from browser import Browser

from resid_patching import plots
from resid_patching.cli import main
from resid_patching.plots.base import lay_out
from resid_patching.show.html import Page

pytestmark = [pytest.mark.browser, pytest.mark.once, pytest.mark.full]

EVIL = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"
PROMPT = ["--model", "demo", "--prompt", f"{EVIL} Mary gave"]
SCORED = [*PROMPT, "--answer", " Mary", "--foil", " John"]
ENDS = ["--to", "2.1.q", "--to", "3.0.k", "--to", "logits", "--mlps", "freeze", "--using", "zero"]
COMMANDS = {
    "dla": ["dla", *SCORED],
    "ablate": ["ablate", "zero", "--sweep", "heads", *SCORED],
    "path-patch": ["path-patch", "--sweep", "heads", *ENDS, "--base", *SCORED[3:]],
    "logit-lens": ["logit-lens", *PROMPT],
    "tuned-lens-show": ["tuned-lens", "show", "--lens", "demo", *PROMPT],
    "tuned-lens-eval": ["tuned-lens", "eval", "--lens", "demo"],
    "tuned-lens-fit": "tuned-lens fit --tokens 600 --steps 0 --validation-tokens 64".split(),
    "attention": ["attention", "--heads", "0.1", "2.3", *PROMPT],
    "stream": ["stream", *PROMPT, "--write-scale", "0.5"],
}
WITH_PROMPTS = [name for name in COMMANDS if name not in ("tuned-lens-eval", "tuned-lens-fit")]


@pytest.fixture(scope="module")
def browser():
    found = Browser()
    yield found
    found.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The page of each command, by name."""
    folder = tmp_path_factory.mktemp("pages")
    text = folder / "text.txt"
    text.write_text(f"{EVIL} When Mary and John went to the store. " * 60, encoding="utf-8")
    found = {}
    for name, argv in COMMANDS.items():
        found[name] = folder / f"{name}.html"
        argv = [*argv, "--html", str(found[name])]
        if "--model" not in argv:
            argv += ["--model", "demo"]
        if name in ("tuned-lens-eval", "tuned-lens-fit"):
            argv += ["--text", str(text), "--length", "32"]
        if name == "tuned-lens-fit":
            argv += ["--out", str(folder / "lens")]
        assert main(argv) == 0, name
    return found


def opened(browser, page, width=1280):
    browser.open(page, width)
    browser.wait(
        "[...document.querySelectorAll('.picture')].every(box => box.querySelector('.main-svg'))"
    )


def middle(browser, element):
    """The middle of an element, scrolled into the window."""
    browser.run(f"({element}).scrollIntoView({{block: 'center', inline: 'center'}})")
    box = browser.run(
        f"(() => {{ const b = ({element}).getBoundingClientRect(); "
        "return [b.x, b.y, b.width, b.height]; })()"
    )
    return box[0] + box[2] / 2, box[1] + box[3] / 2


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_opens_without_an_error_or_a_request(browser, pages, name, width):
    opened(browser, pages[name], width)
    assert browser.run("document.querySelectorAll('.picture .main-svg').length") > 0
    assert browser.problems == [] and browser.requests == []
    assert browser.run("document.title") != "run"
    assert browser.run("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("name", WITH_PROMPTS)
def test_a_prompt_of_markup_is_text(browser, pages, name):
    opened(browser, pages[name])
    assert EVIL in browser.run("document.body.innerText")
    assert browser.run("document.querySelectorAll('img[src=x]').length") == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_a_table_sorts_by_click_and_by_key(browser, pages, name):
    opened(browser, pages[name])
    table = "[...document.querySelectorAll('table.sortable')].at(-1)"
    column = browser.run(f"{table}.tHead.rows[0].cells.length - 1")
    values = f"[...{table}.tBodies[0].rows].map(row => Number(row.cells[{column}].dataset.value))"
    heading = f"{table}.tHead.rows[0].cells[{column}]"
    before = browser.run(values)
    assert len(set(before)) > 2
    browser.point(*middle(browser, f"{heading}.querySelector('button')"), click=True)
    assert browser.run(values) == sorted(before, reverse=True)
    assert browser.run(f"{heading}.getAttribute('aria-sort')") == "descending"
    browser.press("Enter", "\r")  # the button has the focus
    assert browser.run(values) == sorted(before)
    assert browser.run(f"{heading}.getAttribute('aria-sort')") == "ascending"


def test_pictures_are_as_dark_as_the_page_and_change_with_it(browser, pages):
    looks = (
        "((box) => [getComputedStyle(document.body).backgroundColor, "
        "getComputedStyle(box.querySelector('.main-svg')).backgroundColor, "
        "getComputedStyle(box.querySelector('.heatmaplayer text')).fill])"
        "(document.querySelector('#picture-0'))"
    )
    dark, light = ["rgb(22, 24, 28)"] * 2, ["rgb(255, 255, 255)"] * 2
    try:
        browser.theme("dark")
        opened(browser, pages["dla"])
        assert browser.run(looks) == [*dark, "rgb(255, 255, 255)"]
        for theme, expected in (("light", [*light, "rgb(0, 0, 0)"]), ("dark", dark)):
            browser.theme(theme)
            browser.wait(f"String({looks}).startsWith({','.join(expected)!r})", 10)
    finally:
        browser.theme("light")
    assert browser.problems == [] and browser.requests == []


def test_hovering_over_a_heat_map_shows_the_cell(browser, pages):
    opened(browser, pages["dla"])
    figure = json.loads(browser.run("document.querySelector('.picture script').textContent"))
    heat = figure["data"][0]
    rows, columns = len(heat["y"]), len(heat["x"])
    numbers = np.frombuffer(base64.b64decode(heat["z"]["bdata"]), heat["z"]["dtype"])
    numbers = numbers.reshape(rows, columns)
    area = "document.querySelector('#picture-0 .nsewdrag')"
    x, y = middle(browser, area)
    width, height = browser.run(
        f"(() => {{ const b = {area}.getBoundingClientRect(); return [b.width, b.height]; }})()"
    )
    for row, column in itertools.product((0, rows - 1), (0, columns - 1)):
        across = x + ((column + 0.5) / columns - 0.5) * width
        browser.point(across, y + ((row + 0.5) / rows - 0.5) * height)
        number = f"{numbers[row, column]:+.5g} logits"
        shown = "document.querySelector('#picture-0 .hoverlayer')?.textContent ?? ''"
        browser.wait(f"({shown}).includes({json.dumps(number)})", 10)
        assert f"layer {row}head {column}" in browser.run(shown)


@pytest.mark.parametrize("name", ["tuned-lens-eval", "stream"])
def test_hovering_over_a_line_shows_the_point(browser, pages, name):
    opened(browser, pages[name])
    figure = json.loads(browser.run("document.querySelector('.picture script').textContent"))
    ends = []
    for line in figure["data"]:
        heights = np.frombuffer(base64.b64decode(line["y"]["bdata"]), line["y"]["dtype"])
        ends.append(f"{line['name']}, {line['x'][-1]}: {heights[-1]:.5g}")
    last = f"document.querySelectorAll('#picture-0 .points path')[{len(heights) - 1}]"
    browser.point(*middle(browser, last))
    shown = "document.querySelector('#picture-0 .hoverlayer')?.textContent ?? ''"
    browser.wait(f"({shown}) !== ''", 10)
    said = browser.run(shown)
    assert any(end in said for end in ends)


def test_pointing_at_a_cell_of_a_lens_shows_its_tokens(browser, pages):
    opened(browser, pages["logit-lens"])
    cell = "document.querySelector('.grid tbody tr:last-child td:last-child')"
    assert browser.run("document.querySelector('#tip').style.display") != "block"
    for _ in range(20):  # what is drawn above the cell may still move it
        browser.point(*middle(browser, cell))
        time.sleep(0.2)
        if browser.run("document.querySelector('#tip').style.display") == "block":
            break
    tip = browser.run("document.querySelector('#tip').textContent")
    assert "entropy" in tip and "the final top token: rank 0" in tip and len(tip.split("\n")) == 8


def test_what_slips_through_is_refused_and_noticed(browser, tmp_path):
    page = Page("still here")
    page._body.append(f"{EVIL}<img src='http://127.0.0.1:9/x.png'>")
    path = tmp_path / "page.html"
    path.write_text(page.html(), encoding="utf-8")
    browser.open(path)
    assert browser.run("document.title") == "still here"
    assert len(browser.problems) >= 2


@pytest.mark.parametrize("n_lines", [1, 2, 3])
def test_a_figure_of_its_own_shows_its_whole_title(browser, tmp_path, n_lines):
    """As in a notebook and in a PNG file, where no page writes the title above it."""
    figure = plots.bars({"9.9": 1.0, "10.0": -0.5}, title="Effects", unit="logits")
    lay_out(figure, ["Effects", *["in logits"] * (n_lines - 1)], width=480, inside=120)
    path = tmp_path / "figure.html"
    figure.write_html(path, include_plotlyjs=True)
    browser.open(path)
    browser.wait("document.querySelector('.gtitle')")
    title, plot = browser.run(
        "['.gtitle', '.draglayer .nsewdrag']"
        ".map(name => document.querySelector(name).getBoundingClientRect())"
        ".map(box => [box.top, box.bottom])"
    )
    start = browser.run("document.querySelector('.main-svg').getBoundingClientRect().top")
    assert start <= title[0] and title[1] <= plot[0]
