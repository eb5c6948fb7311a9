"""Pictures: they show the numbers of the frame they come from, and nothing where there is none."""

import json
import sys

import pytest
import torch
import zoo

import resid_patching as rp
from resid_patching import plots
from resid_patching.errors import MissingExtraError, ResidPatchingError
from resid_patching.result import Axis, Provenance, Result

ORIGIN = Provenance("toy", None, "none", "0", "raw", "float64", "00", 3, True, "a made-up plan")


@pytest.fixture(scope="module")
def base():
    return rp.capture(rp.load(str(zoo.text_folder())), ["the dog saw the cat", "a bird sang"])


@pytest.fixture(scope="module")
def swept(base):
    metric = rp.logit_diff(" the", " a")
    return rp.ablate(base, rp.heads(base), rp.Zero(), metric=metric)


@pytest.fixture(scope="module")
def edges(base):
    path = rp.Path(to=rp.readers("0.0.q", "1.1.q", "logits"), using=rp.Zero(), mlps="freeze")
    return rp.ablate(base, rp.heads(base), path, metric=rp.logit_diff(" the", " a"))


def made_up(values, rows, columns):
    axes = (Axis("layer", tuple(rows)), Axis("head", tuple(columns)), Axis("batch", (0, 1, 2)))
    return Result(values, axes, "logits", ORIGIN)


def read_back(figure):
    """The numbers of a heat map by (row, column), as its reader would hover over them."""
    body = json.loads(figure.to_json())["data"][0]
    return {
        (y, x): body["z"][i][j] for i, y in enumerate(body["y"]) for j, x in enumerate(body["x"])
    }


def title(figure):
    return figure.layout.title.text


@pytest.mark.parametrize("of", ["total", "direct", "indirect"])
def test_a_grid_of_heads_shows_the_numbers_of_the_frame(swept, of):
    frame = swept.to_frame().rename(columns={"value": "total"})
    expected = frame.groupby("target")[of].mean()
    shown = read_back(plots.heatmap(swept, of=of))
    assert len(shown) == len(expected)
    for (layer, head), value in shown.items():
        assert value == pytest.approx(expected[f"{layer}.{head}"], abs=1e-7)


@pytest.mark.parametrize("of", ["total", "direct", "indirect"])
def test_a_grid_of_paths_shows_the_frame_and_leaves_out_what_has_no_path(edges, of):
    frame = edges.to_frame().rename(columns={"value": "total"})
    expected = frame.groupby(["target", "reader"])[of].mean()
    shown = read_back(plots.heatmap(edges, of=of))
    assert len(shown) == len(expected)
    for place, value in shown.items():
        known = expected[place]
        assert (value is None) == (known != known)
        assert value is None or value == pytest.approx(known, abs=1e-7)
    assert shown["0.0", "0.0.q"] is None and shown["0.0", "1.1.q"] is not None


def test_an_attribution_shows_its_heads(base):
    dla = rp.direct_logit_attribution(base, " the", " a", by="head")
    shown = read_back(plots.heatmap(dla))
    assert len(shown) == base.view.n_layers * base.view.n_heads
    for (layer, head), value in shown.items():
        written = dla.sel(component=f"{layer}.{head}").mean()
        assert value == pytest.approx(float(written), abs=1e-7)


def test_a_mean_over_tokens_is_weighted_as_the_metric_says(base):
    effect = rp.ablate(base, rp.heads(base), rp.Zero(), metric=rp.loss())
    share = effect.weights.double() / effect.weights.sum()
    shown = read_back(plots.heatmap(effect))
    expected = (effect.total.double() * share).sum(1)
    assert len(set(share.tolist())) > 1, "prompts of one length hide the weights"
    assert list(shown.values()) == pytest.approx(expected.tolist(), abs=1e-7)


def test_zero_is_the_middle_of_the_scale_and_nan_is_no_part_of_it():
    values = torch.tensor([[-3.0, 0.0], [torch.nan, 1.0]])[..., None].expand(2, 2, 3)
    figure = plots.heatmap(made_up(values, (0, 1), (0, 1)))
    cells, absent = figure.data
    assert (cells.zmin, cells.zmid, cells.zmax) == (-3, 0, 3)
    colours = [colour for _, colour in cells.colorscale]
    assert colours[5] == "#f7f7f7" and len(colours) == 11
    assert read_back(figure)["1", "0"] is None and read_back(figure)["0", "1"] == 0
    assert json.loads(figure.to_json())["data"][1]["z"] == [[None, None], [0, None]]
    assert {colour for _, colour in absent.colorscale}.isdisjoint(colours)
    assert absent.text[1][0] == "×" and "grey ×: no value" in title(figure)


def test_a_prompt_without_a_number_leaves_the_cell_without_one():
    values = torch.ones(1, 2, 3)
    values[0, 1, 2] = torch.nan
    assert list(read_back(plots.heatmap(made_up(values, (0,), (0, 1)))).values()) == [1, None]


def test_a_grid_of_zeros_has_a_scale():
    cells = plots.heatmap(made_up(torch.zeros(2, 2, 3), (0, 1), (0, 1))).data[0]
    assert (cells.zmin, cells.zmax) == (-1, 1)


@pytest.mark.parametrize(("n_layers", "n_heads"), [(12, 12), (30, 9), (48, 25)])
def test_every_layer_and_head_has_its_label_and_room_for_it(n_layers, n_heads):
    values = torch.randn(n_layers, n_heads, 3)
    figure = plots.heatmap(made_up(values, range(n_layers), range(n_heads)))
    layout = figure.layout
    assert (layout.xaxis.dtick, layout.yaxis.dtick) == (1, 1)
    assert list(figure.data[0].y) == [str(layer) for layer in range(n_layers)]
    assert layout.yaxis.autorange == "reversed"
    inside = layout.width - layout.margin.l - layout.margin.r - 90  # the colour bar
    assert inside / n_heads >= 30
    assert (layout.height - layout.margin.t - layout.margin.b) / n_layers >= layout.xaxis.tickfont[
        "size"
    ]


def test_the_title_says_unit_kind_and_number_of_prompts(swept, edges):
    for effect in (swept, edges):
        for figure in (plots.heatmap(effect), plots.heatmap(effect, title="Ours")):
            flat = title(figure).replace("</span><br><span style='font-size:12px'>", " ")
            assert effect.unit in flat and str(effect.how) in flat and "2 prompts" in flat
    assert title(plots.heatmap(edges, title="Ours")).startswith("Ours<br>")


def test_texts_are_shown_and_not_read_as_tags(swept):
    values = torch.ones(1, 1, 3)
    figure = plots.heatmap(made_up(values, ("<b>x</b>",), ("a & b",)), title="<i>t</i>")
    assert figure.data[0].y == ("&lt;b&gt;x&lt;/b&gt;",) and figure.data[0].x == ("a &amp; b",)
    assert title(figure).startswith("&lt;i&gt;t&lt;/i&gt;<br>")
    drawn = plots.bars({"<b>": 1.0}, title="<u>", unit="<i>")
    assert drawn.data[0].y == ("&lt;b&gt;",) and title(drawn) == "&lt;u&gt;"


def test_bars_show_the_largest_by_size_with_their_sign():
    values = {"0.1": 1.0, "0.10": -5.0, "1.0": 2.0, "1.1": float("nan"), "mlp.0": 0.5}
    bars = plots.bars(values, title="Total effect, zero", unit="logits", top=3)
    assert dict(zip(bars.data[0].y, bars.data[0].x, strict=True)) == {
        "0.10": -5.0,
        "1.0": 2.0,
        "0.1": 1.0,
    }
    assert bars.layout.yaxis.type == "category"  # 0.1 and 0.10 are two heads
    low, high = bars.layout.xaxis.range
    assert low < -5 and high > 2
    everything = plots.bars(values, title="t", unit="logits", mark=100.0)
    assert list(everything.data[0].y) == ["0.1", "0.10", "1.0", "mlp.0"]
    assert everything.layout.xaxis.range[1] > 100


def test_no_global_theme_is_touched_and_none_is_taken_over(swept):
    import plotly.io

    before = plotly.io.templates.default
    plotly.io.templates.default = "plotly_dark"
    try:
        dark = plots.heatmap(swept).to_json()
        assert plotly.io.templates.default == "plotly_dark"
    finally:
        plotly.io.templates.default = before
    assert dark == plots.heatmap(swept).to_json()


def test_a_missing_plotly_is_asked_for_by_the_name_of_the_extra(swept, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'resid-patching\[plots\]'") as caught:
        plots.heatmap(swept)
    assert isinstance(caught.value, ImportError) and isinstance(caught.value, ResidPatchingError)


def test_what_cannot_be_drawn_is_refused(base, swept, edges):
    metric = rp.logit_diff(" the", " a")
    mlps = rp.ablate(base, ["mlp.0"], rp.Zero(), metric=metric)
    together = rp.ablate(base, ["0.0", "0.1"], rp.Zero(), metric=metric, joint=True)
    for effect in (mlps, together):
        with pytest.raises(ValueError, match="heads one at a time"):
            plots.heatmap(effect)
    every = rp.direct_logit_attribution(base, " the", " a", by="head", positions=None)
    with pytest.raises(ValueError, match="one position"):
        plots.heatmap(every)
    with pytest.raises(ValueError, match="two axes"):
        plots.heatmap(Result(torch.ones(3), (Axis("batch", (0, 1, 2)),), "logits", ORIGIN))
    with pytest.raises(ValueError, match="numbers of an Effect"):
        plots.heatmap(made_up(torch.ones(1, 1, 3), (0,), (0,)), of="direct")
    with pytest.raises(ValueError, match="no number"):
        plots.bars({"0.0": float("nan")}, title="t", unit="logits")
