"""The indirect-object study: what it finds, what it writes, and that it names no head itself."""

import dataclasses
import html.parser
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import resid_patching as rp
from resid_patching.errors import ResidPatchingError
from resid_patching.prompt_sets import Difference
from resid_patching.show.html import page_of
from resid_patching.show.text import console, print_report

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import ioi  # noqa: E402
import ioi_report  # noqa: E402
import ioi_study  # noqa: E402

SMALL = ("--model", "demo", "--prompts", "6", "--random-sets", "4", "--heads", "2")


@pytest.fixture(scope="module")
def view():
    return rp.ModelView(rp.load("demo"))


def study_of(view, *, seed, n=32, n_heads=3, n_controls=20, corrupt="names"):
    pairs = rp.indirect_object_prompts(view, n, seed=seed, corrupt=corrupt)
    options = {"n_heads": n_heads, "n_controls": n_controls, "seed": seed, "prepend_bos": None}
    return ioi_study.study(view, pairs, **options)


@pytest.fixture(scope="module")
def small(view):
    return study_of(view, seed=3, n=8, n_heads=4, n_controls=3)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What the command writes: its exit code, JSON and page."""
    folder = tmp_path_factory.mktemp("ioi")
    target, page = folder / "ioi.json", folder / "ioi.html"
    code = ioi.main([*SMALL, "--seed", "3", "--json", str(target), "--html", str(page)])
    assert code == 0 and {path.name for path in folder.iterdir()} == {"ioi.json", "ioi.html"}
    return json.loads(target.read_text(encoding="utf-8")), page.read_text(encoding="utf-8")


# What it finds


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1])
def test_the_demo_models_answers_rest_on_the_heads_found_and_not_on_random_others(view, seed):
    found = study_of(view, seed=seed)
    assert float((found.base > 0).double().mean()) > 0.95
    assert len(found.up) == 3 and len(found.controls) == 20
    assert found.left(found.knocked) < 0.5
    shares = [found.left(effect) for effect in found.controls]
    assert sum(shares) / len(shares) > 0.8
    assert all(not {*effect.targets[0].split(" + ")} & {*found.up} for effect in found.controls)


def test_no_head_is_written_down_in_the_scripts():
    for path in SCRIPTS.glob("ioi*.py"):
        assert not re.search(r"""["']\d+\.\d+[ "'.]""", path.read_text(encoding="utf-8"))


def test_the_strongest_are_told_apart_by_sign(small):
    means = dict(zip(small.to_logits.targets, small.to_logits.total.mean(1).tolist(), strict=True))
    assert small.up == sorted(means, key=means.__getitem__)[: len(small.up)]
    assert small.down == sorted(means, key=lambda head: -means[head])[: len(small.down)]
    assert all(means[head] < 0 for head in small.up)
    assert all(means[head] > 0 for head in small.down)


def test_the_paths_and_the_knock_out_are_those_of_the_library(small, view):
    pairs = small.pairs
    base, source = rp.capture(view, pairs.base), rp.capture(view, pairs.source)
    metric = rp.logit_diff(list(pairs.answers), list(pairs.foils))
    path = rp.Path(to="logits", using=rp.Resample(source), mlps="recompute")
    end = list(pairs.positions["END"])
    expected = rp.ablate(base, rp.heads(view), path, metric=metric, positions=end)
    torch.testing.assert_close(small.to_logits.values, expected.values)
    mean = rp.Mean(source, over=("batch", "pos"))
    knocked = rp.ablate(base, small.up, mean, metric=metric, joint=True)
    torch.testing.assert_close(small.knocked.patched, knocked.patched)
    assert small.left(small.knocked) == pytest.approx(
        float(knocked.patched.mean() / knocked.baseline.mean()), rel=1e-5
    )


def test_heads_of_the_first_layer_are_said_to_have_no_path(small):
    assert {head for head in small.up if head.startswith("0.")} == {*small.unreached}
    assert small.unreached, "this fixture has no such head"
    text = str(ioi_report.report(small, top=3, stand_in=None).sections[3].facts)
    assert f"no head writes before {', '.join(small.unreached)}" in text


def test_random_sets_are_distinct_drawn_by_seed_and_run_out():
    others = [f"0.{head}" for head in range(5)]
    sets = ioi_study.draw_sets(others, 2, 6, seed=0)
    assert sets == ioi_study.draw_sets(others, 2, 6, seed=0)
    assert sets != ioi_study.draw_sets(others, 2, 6, seed=1)
    assert len({frozenset(heads) for heads in sets}) == 6 and all(len(s) == 2 for s in sets)
    assert len(ioi_study.draw_sets(others, 2, 1000, seed=0)) == 10
    with pytest.raises(ResidPatchingError, match="too few to compare with"):
        ioi_study.draw_sets(others, 6, 1, seed=0)
    with pytest.raises(ResidPatchingError, match="no head pushes the answer up"):
        ioi_study.draw_sets(others, 0, 1, seed=0)


def test_a_share_of_nothing_is_not_given(small):
    upside_down = dataclasses.replace(
        small, knocked=dataclasses.replace(small.knocked, baseline=-small.knocked.baseline)
    )
    share = upside_down.left(upside_down.knocked)
    assert share != share
    assert "n/a is left" in str(
        ioi_report.report(upside_down, top=3, stand_in=None).sections[4].facts
    )


# What it writes


def test_the_json_holds_all_numbers_with_their_provenance(written):
    body, _ = written
    effect = rp.Effect.from_json(json.dumps(body["paths_to_logits"]))
    assert effect.provenance.model == "demo" and effect.values.shape == (16, 6)
    assert "MLPs recomputed, using resample rowwise" in effect.how
    attribution = rp.Attribution.from_json(json.dumps(body["attribution"]))
    torch.testing.assert_close(
        attribution.total[:, 0], torch.tensor(body["baseline"]["base"]), rtol=0, atol=1e-4
    )
    knocked = rp.Effect.from_json(json.dumps(body["knock_out"]["found"]))
    share = float(knocked.patched.mean() / knocked.baseline.mean())
    assert body["knock_out"]["left"] == pytest.approx(share, rel=1e-5)
    assert knocked.targets == (" + ".join(body["strongest"]["push_the_answer_up"]),)
    assert len(body["knock_out"]["random"]) == 4 == len(body["knock_out"]["random_left"])
    assert body["flags"]["seed"] == 3 and body["flags"]["corrupt"] == "names"
    prompts = body["prompts"]
    assert {len(prompts[name]) for name in ("base", "source", "answers", "differences")} == {6}
    rp.Effect.from_json(json.dumps(body["paths_to_queries"]))
    rp.Effect.from_json(json.dumps(body["alone"]))


class Page(html.parser.HTMLParser):
    """What a page would load, and the texts that it shows."""

    def __init__(self):
        super().__init__()
        self.loads, self.texts, self.tags, self.inside = [], [], [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.inside = tag
        self.loads += [
            v for name, v in attrs if name in ("src", "href", "srcset", "data", "poster")
        ]

    def handle_data(self, data):
        if self.inside == "style":
            self.loads += re.findall(r"url\(|@import", data)
        elif self.inside != "script":
            self.texts.append(data)


def read(page):
    parser = Page()
    parser.feed(page)
    return parser


def test_the_page_loads_nothing_and_brings_plotly_once(written):
    body, page = written
    parser = read(page)
    assert parser.loads == [] and "link" not in parser.tags
    assert "default-src 'none'" in page and page.endswith("</html>\n")
    assert page.count("plotly.js v") == 1
    reached = [*body["strongest"]["push_the_answer_up"]]
    n_grids = 2 + len(reached) - len(body["nothing_writes_before"])
    assert len(re.findall(r'<div id="picture-\d+"', page)) == n_grids + 1


def test_the_page_shows_the_numbers_of_the_json(written):
    body, page = written
    text = " ".join(read(page).texts)
    assert f"{100 * body['knock_out']['left']:.1f}%" in text
    assert f"mean {100 * body['knock_out']['random_mean']:.1f}%" in text
    assert all(base in text for base in body["prompts"]["base"])
    means = rp.Effect.from_json(json.dumps(body["paths_to_logits"])).total.mean(1)
    for value in means[means.abs().sort(descending=True).indices[:5]].tolist():
        assert f"{value:+.4f}" in text


def test_texts_of_prompts_are_shown_and_not_run(small):
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    origin = dataclasses.replace(small.to_logits.provenance, model=evil)
    planted = dataclasses.replace(
        small,
        pairs=dataclasses.replace(small.pairs, base=[evil] * 8, how=evil),
        differing=[[Difference(1, evil, evil)]] * 8,
        to_logits=dataclasses.replace(small.to_logits, provenance=origin, how=evil),
        attribution=dataclasses.replace(small.attribution, provenance=origin),
    )
    report = ioi_report.report(planted, top=3, stand_in=evil)
    page = page_of(report, {"seed": evil}).html()
    parser = read(page)
    assert "img" not in parser.tags and parser.loads == []
    assert " ".join(parser.texts).count(evil) > 10
    assert evil not in page and "<img src=x" not in page


def test_the_terminal_gives_every_step_with_what_it_does_not_say(capsys, small):
    report = ioi_report.report(small, top=3, stand_in=None)
    print_report(console(), report)
    out = capsys.readouterr().out
    for number, section in enumerate(report.sections, start=1):
        assert f"\n{number}. {section.title}\n" in out
        assert all(word in out for word in f"{section.says} {section.caveats[0]}".split())
    assert max(map(len, out.splitlines())) <= 120 and "\x1b" not in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--prompts", "0"), "0 is too few"),
        (("--corrupt", "letters"), "invalid choice"),
        (("--nonsense",), "unrecognized"),
        (("--model", "/no/such/folder"), "/no/such/folder"),
        (("--device", "abacus"), "abacus"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_nothing_is_written(capsys, tmp_path, flags, message):
    files = ("--json", str(tmp_path / "ioi.json"), "--html", str(tmp_path / "ioi.html"))
    assert ioi.main(["--model", "demo", "--prompts", "4", *files, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_or_plotly_is_noticed_before_the_model_is_loaded(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(ioi, "load_model", lambda _: pytest.fail("the model was loaded"))
    assert ioi.main([*SMALL, "--json", str(tmp_path / "missing" / "ioi.json")]) == 2
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    assert ioi.main([*SMALL, "--html", str(tmp_path / "ioi.html")]) == 2
    assert "pip install 'resid-patching[plots]'" in capsys.readouterr().err


@pytest.mark.once
@pytest.mark.full
def test_the_script_runs_by_itself_from_another_folder(tmp_path):
    argv = [sys.executable, str(SCRIPTS / "ioi.py"), *SMALL, "--corrupt", "swap"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "6. Each head found" in done.stdout and done.stderr == ""


# A real model


@pytest.mark.real
def test_the_strongest_heads_of_a_real_model_are_stable_and_soon_found(smollm2_dir):
    view = rp.ModelView(rp.load(smollm2_dir))
    strongest = []
    for seed in (0, 1):
        pairs = rp.indirect_object_prompts(view, 16, seed=seed, corrupt="names")
        start = time.monotonic()
        base, source = rp.capture(view, pairs.base), rp.capture(view, pairs.source)
        path = rp.Path(to="logits", using=rp.Resample(source), mlps="recompute")
        metric = rp.logit_diff(list(pairs.answers), list(pairs.foils))
        end = list(pairs.positions["END"])
        effect = rp.ablate(base, rp.heads(view), path, metric=metric, positions=end)
        assert time.monotonic() - start < 180
        assert len(effect.targets) == 270 and float((effect.baseline > 0).double().mean()) > 0.8
        order = effect.total.mean(1).abs().sort(descending=True).indices[:5].tolist()
        strongest.append({effect.targets[number] for number in order})
    assert len(strongest[0] & strongest[1]) >= 3, strongest
