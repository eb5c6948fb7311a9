"""Pages and PNG files of the commands: their numbers, what is escaped, what is missing."""

import base64
import hashlib
import html
import json
import re
import sys

import pandas
import pytest
import torch
import zoo

import resid_patching as rp
from resid_patching import plots
from resid_patching.cli import main
from resid_patching.errors import MissingExtraError
from resid_patching.show.assets import STYLE
from resid_patching.show.html import Page
from resid_patching.show.report import Table

pytestmark = pytest.mark.once

EVIL = "<script>run()</script><img onerror='x'>"
PROMPT = "the dog saw the cat"


@pytest.fixture(scope="module")
def model():
    return str(zoo.text_folder())


def page_of(tmp_path, *argv):
    path = tmp_path / "page.html"
    assert main([*argv, "--html", str(path)]) == 0
    return path.read_text(encoding="utf-8")


def tables(page):
    """Each sortable table as rows of cells."""
    found = re.findall(r'<table class="sortable">.*?<tbody>(.*?)</tbody>', page, re.S)
    return [
        [
            [html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
            for row in re.findall(r"<tr>(.*?)</tr>", body, re.S)
        ]
        for body in found
    ]


def figures(page):
    """The figures of a page, as its script reads them."""
    bodies = re.findall(r'<script type="application/json">(.*?)</script>', page, re.S)
    return [json.loads(body) for body in bodies]


def test_the_page_of_dla_shows_its_rows_and_its_sum(tmp_path, model, capsys):
    flags = ["--model", model, "--prompt", PROMPT, "--answer", " the", "--foil", " a"]
    page = page_of(tmp_path, "dla", *flags)
    found = rp.direct_logit_attribution(rp.capture(rp.load(model), PROMPT), " the", " a", by="head")
    (rows,) = tables(page)
    assert dict(rows) == {
        name: f"{float(value):+.4f}"
        for name, value in zip(found.components, found.values[:, 0, 0], strict=True)
    }
    sizes = [abs(float(value)) for _, value in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert f"{float(found.total.mean()):+.4f} logits" in page
    assert len(figures(page)) == 3 and page.count("plotly.js v") == 1
    assert found.provenance.tokens in page


def test_the_page_of_ablate_names_the_kind_in_every_picture(tmp_path, model):
    flags = ["--model", model, "--prompt", PROMPT, "--answer", " the", "--foil", " a"]
    page = page_of(tmp_path, "ablate", "zero", "--sweep", "heads", *flags)
    run = rp.capture(rp.load(model), PROMPT)
    effect = rp.ablate(run, rp.heads(run), rp.Zero(), metric=rp.logit_diff(" the", " a"))
    (rows,) = tables(page)
    assert len(rows) == len(effect.targets)
    for target, *numbers in rows:
        place = effect.targets.index(target)
        parts = [part[place].mean() for part in (effect.total, effect.direct, effect.indirect)]
        assert numbers == [f"{float(part):+.4f}" for part in parts]
    headings = [" ".join(figure["layout"]["meta"]["heading"]) for figure in figures(page)]
    assert len(headings) == 2
    assert all("zero, at all positions" in text and "logits" in text for text in headings)


def test_no_picture_stands_twice_on_a_page(tmp_path, model):
    flags = ["--model", model, "--prompt", PROMPT, "--answer", " the", "--foil", " a"]
    assert len(figures(page_of(tmp_path, "ablate", "zero", "--sweep", "layers", *flags))) == 1


def test_the_page_of_paths_leaves_out_what_has_no_path(tmp_path, model):
    flags = ["--base", PROMPT, "--answer", " the", "--foil", " a", "--using", "zero"]
    ends = ["--to", "1.1.q", "--to", "logits", "--mlps", "freeze"]
    page = page_of(tmp_path, "path-patch", "--model", model, "--sweep", "heads", *ends, *flags)
    run = rp.capture(rp.load(model), PROMPT)
    path = rp.Path(to=rp.receivers("1.1.q", "logits"), using=rp.Zero(), mlps="freeze")
    effect = rp.ablate(run, rp.heads(run), path, metric=rp.logit_diff(" the", " a"))
    (rows,) = tables(page)
    frame = effect.to_frame().dropna(subset=["value"])
    expected = {(row.target, row.receiver): f"{row.value:+.4f}" for row in frame.itertuples()}
    assert {(sender, receiver): total for sender, receiver, total, *_ in rows} == expected
    assert len(expected) < effect.values.numel()


def test_the_page_of_stream_shows_both_reports(tmp_path, model):
    page = page_of(tmp_path, "stream", "--model", model, "--prompt", PROMPT, "--write-scale", "0.5")
    run = rp.capture(rp.load(model), PROMPT)
    for rows, report in zip(
        tables(page)[:2],
        (rp.stream_report(run, rp.WriteScale(0.5)), rp.stream_report(run)),
        strict=True,
    ):
        frame = report.table()
        assert [row[0] for row in rows] == frame["write"].tolist()
        assert [row[1] for row in rows] == [f"{v:.3f}" for v in frame["mean_write_norm"]]
        assert [row[4] for row in rows] == [f"{v:+.4f}" for v in frame["mean_cosine"]]


def test_texts_are_shown_and_only_the_page_s_own_scripts_may_run(tmp_path, model):
    page = page_of(tmp_path, "dla", "--model", model, "--prompt", EVIL)
    assert html.escape(EVIL) in page
    assert "<script>run" not in page and "<img" not in re.sub(r"<script.*?</script>", "", page)
    policy = re.search(r'Security-Policy" content="([^"]*)"', page).group(1)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy and policy.count("'unsafe-inline'") == 1  # of styles
    allowed = set(re.findall(r"'sha256-([^']*)'", policy))
    scripts = re.findall(r"<script>(.*?)</script>", page, re.S)
    digests = {base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts}
    assert len(scripts) == 2 and digests == allowed


def test_a_page_brings_both_templates_and_its_own_colours_agree_with_them(tmp_path, model):
    page = page_of(tmp_path, "logit-lens", "--model", model, "--prompt", PROMPT)
    (body,) = re.findall(r'<script type="application/json" id="templates">(.*?)</script>', page)
    both = json.loads(body)
    assert both == {"light": plots.template(), "dark": plots.template(dark=True)}
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)")[:2]
    for style, template in ((light, both["light"]), (dark, both["dark"])):
        colours = dict(re.findall(r"--([\w-]+): (#\w+)", style))
        assert same_colour(colours["paper"], template["layout"]["paper_bgcolor"])
        assert same_colour(colours["on-cell"], template["data"]["heatmap"][0]["textfont"]["color"])
        for cell in (colours["paper"], colours["full"]):  # and what is mixed of the two
            assert contrast(colours["on-cell"], cell) >= 4.5


def parts(colour):
    """Red, green and blue, of `#rgb` or `#rrggbb`."""
    wide = len(colour) == 7
    digits = [colour[n : n + 2] for n in (1, 3, 5)] if wide else [2 * c for c in colour[1:]]
    return [int(pair, 16) / 255 for pair in digits]


def same_colour(one, other):
    return parts(one) == parts(other)


def contrast(one, other):
    linear = [
        [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts(colour)]
        for colour in (one, other)
    ]
    low, high = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in linear)
    return (high + 0.05) / (low + 0.05)


def test_a_closing_tag_in_a_label_does_not_end_the_figure():
    page = Page("t")
    page.picture(lambda: plots.bars({"</script><b>": 1.0}, title="</script>", unit="u"))
    (figure,) = figures(page.html())
    assert figure["data"][0]["y"] == ["&lt;/script&gt;&lt;b&gt;"]
    assert "<figcaption>&lt;/script&gt;</figcaption>" in page.html()


def test_absent_numbers_sort_last_and_are_not_zero():
    page = Page("t")
    page.table(Table(pandas.DataFrame({"name": ["a", "b"], "value": [float("nan"), 0.0]})))
    assert 'data-value="">n/a' in page.html() and 'data-value="0.0">+0.0000' in page.html()


def test_without_plotly_a_page_has_its_table_and_says_how_to_get_pictures(
    tmp_path, model, monkeypatch
):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    page = page_of(tmp_path, "dla", "--model", model, "--prompt", PROMPT)
    assert page.count("pip install &#x27;resid-patching[plots]&#x27;") == 1
    assert "plotly.js v" not in page and not figures(page) and len(tables(page)) == 1


def test_a_png_without_a_renderer_is_refused_before_anything_runs(
    tmp_path, model, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "kaleido", None)
    files = ["--png", str(tmp_path / "a.png"), "--json", str(tmp_path / "a.json")]
    assert main(["dla", "--model", model, "--prompt", PROMPT, *files]) == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1 and "pip install plotly kaleido" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["dla", "logit-lens"])
def test_a_png_is_of_the_main_picture(tmp_path, model, monkeypatch, command):
    drawn = []
    monkeypatch.setattr(plots, "require_renderer", lambda: None)
    monkeypatch.setattr(plots, "png", lambda figure: drawn.append(figure) or b"PNG")
    path = tmp_path / "a.png"
    assert main([command, "--model", model, "--prompt", PROMPT, "--png", str(path)]) == 0
    assert path.read_bytes() == b"PNG"
    assert len(drawn) == 1 and drawn[0].data[0].type == "heatmap"


def test_a_renderer_that_cannot_run_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "kaleido", sys)
    figure = plots.bars({"a": 1.0}, title="t", unit="u")

    def fail(*_given, **_named):
        raise RuntimeError("no browser\nsecond line")

    monkeypatch.setattr(type(figure), "to_image", fail)
    with pytest.raises(MissingExtraError, match="no browser .it needs Chrome"):
        plots.png(figure)


def test_a_notebook_shows_a_line_and_the_largest_rows_escaped(model):
    run = rp.capture(rp.load(model), [EVIL, PROMPT])
    effect = rp.ablate(run, rp.heads(run), rp.Zero(), metric=rp.logit_diff(" the", " a"))
    shown = effect._repr_html_()
    assert "<script" not in shown and html.escape(repr(effect)) in shown
    assert "zero" in shown and f"the 10 largest of {len(effect.targets)} targets" in shown
    assert "mean over 2 prompts" in shown
    assert all(f"<td>{row.value:+.4f}</td>" in shown for row in effect.top(10).itertuples())
    lens = rp.logit_lens(run)
    tokens = lens.top_tokens(3)._repr_html_()
    assert tokens.count("<tr>") == 1 + 2 * len(lens.labels)
    kl = lens.kl._repr_html_()
    assert "<script" not in kl + tokens and "<img" not in kl + tokens


def test_a_notebook_needs_no_plotly(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    report = rp.stream_report(rp.capture(rp.load(model), PROMPT))
    assert "<table>" in report._repr_html_() and torch.is_tensor(report.values)
