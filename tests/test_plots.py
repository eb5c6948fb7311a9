"""Pictures: they show the numbers of the frame they come from, and nothing where there is none."""

import base64
import dataclasses
import html
import itertools
import json
import sys

import numpy as np
import pandas
import pytest
import torch
import zoo

import resid_patching as rp
from resid_patching import plots
from resid_patching.errors import MissingExtraError, ResidPatchingError
from resid_patching.plots import base as drawing
from resid_patching.plots.grids import Grid, draw_grids
from resid_patching.result import Axis, Provenance, Result, standard_error

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
    path = rp.Path(to=rp.receivers("0.0.q", "1.1.q", "logits"), using=rp.Zero(), mlps="freeze")
    return rp.ablate(base, rp.heads(base), path, metric=rp.logit_diff(" the", " a"))


def made_up(values, rows, columns):
    axes = (Axis("layer", tuple(rows)), Axis("head", tuple(columns)), Axis("batch", (0, 1, 2)))
    return Result(values, axes, "logits", ORIGIN)


def data(figure):
    """The traces of a figure as its JSON has them, numbers as lists, None where there is none."""
    return plain(json.loads(figure.to_json())["data"])


def plain(value):
    if isinstance(value, dict) and "bdata" in value:
        numbers = np.frombuffer(base64.b64decode(value["bdata"]), np.dtype(value["dtype"]))
        shape = value.get("shape", str(len(numbers)))
        return plain(numbers.reshape([int(n) for n in shape.split(",")]).tolist())
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    return None if value != value else value


def read_back(figure):
    """The numbers of a heat map by (row, column), as a reader would hover over them."""
    body = data(figure)[0]
    return {
        (y, x): body["z"][i][j] for i, y in enumerate(body["y"]) for j, x in enumerate(body["x"])
    }


def scale(figure):
    return figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax


def scale_colours(figure, kind):
    return [colour for _, colour in getattr(figure.layout.template.layout.colorscale, kind)]


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
    expected = frame.groupby(["target", "receiver"])[of].mean()
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
    assert scale(figure) == (-3, 3)
    colours = scale_colours(figure, "diverging")
    assert len(colours) % 2 == 1 and colours[len(colours) // 2] == "#ffffff"
    assert read_back(figure)["1", "0"] is None and read_back(figure)["0", "1"] == 0
    assert data(figure)[1]["z"] == [[None, None], [0, None]]
    assert {colour for _, colour in absent.colorscale} == {"rgba(128,128,128,0.5)"}
    assert absent.text[1][0] == "×" and "grey ×: no value" in title(figure)
    for dark in (False, True):  # half of it and half of the page
        template = plots.template(dark=dark)
        paper = template["layout"]["paper_bgcolor"]
        mixed = [(int(paper[n : n + 2], 16) + 128) // 2 for n in (1, 3, 5)]
        cell = "#" + "".join(f"{part:02x}" for part in mixed)
        assert contrast(template["data"]["heatmap"][0]["textfont"]["color"], cell) >= 4.5


@pytest.mark.parametrize(
    ("largest", "text"),
    [(0.0, ".4f"), (4e-5, ".0e"), (0.02, ".4f"), (0.5, ".3f"), (-9.0, ".2f"), (250.0, ".0f")],
)
def test_cells_show_two_or_three_digits_of_the_largest_number(largest, text):
    figure = plots.heatmap(made_up(torch.full((2, 2, 3), largest), (0, 1), (0, 1)))
    assert figure.data[0].texttemplate == f"%{{z:{text}}}"


def test_a_prompt_without_a_number_leaves_the_cell_without_one():
    values = torch.ones(1, 2, 3)
    values[0, 1, 2] = torch.nan
    assert list(read_back(plots.heatmap(made_up(values, (0,), (0, 1)))).values()) == [1, None]


@pytest.mark.parametrize(
    ("unit", "floor"), [("logits", 0.01), ("nats", 0.01), ("probability", 1e-3)]
)
def test_the_scale_has_a_floor_so_that_noise_is_pale(unit, floor):
    for size, end in ((0.0, floor), (1e-4, floor), (-3 * floor, 3 * floor)):
        result = made_up(torch.full((2, 2, 3), size), (0, 1), (0, 1))
        figure = plots.heatmap(dataclasses.replace(result, unit=unit))
        assert scale(figure) == pytest.approx((-end, end))


def luminance(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def between(colours):
    """Colours at small steps along a scale."""
    for one, other in itertools.pairwise(colours):
        ends = [[int(c[place : place + 2], 16) for place in (1, 3, 5)] for c in (one, other)]
        for share in range(11):
            mixed = [round(a + (b - a) * share / 10) for a, b in zip(*ends, strict=True)]
            yield "#" + "".join(f"{part:02x}" for part in mixed)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("kind", ["diverging", "sequential"])
def test_numbers_on_cells_of_every_colour_can_be_read(kind, dark, swept):
    figure = plots.heatmap(swept)
    figure.layout.template = plots.template(dark=dark)
    ink = figure.layout.template.data.heatmap[0].textfont.color
    assert min(contrast(ink, colour) for colour in between(scale_colours(figure, kind))) >= 4.5
    page = figure.layout.template.layout
    assert contrast(page.font.color, page.paper_bgcolor) >= 7
    for colour in (drawing.POSITIVE, drawing.NEGATIVE, drawing.INK, *drawing.SERIES):
        assert contrast(colour, page.paper_bgcolor) >= 2.9
    assert not any(trace.textfont.color for trace in figure.data)  # the template's alone


@pytest.mark.parametrize(("n_layers", "n_heads"), [(12, 12), (30, 9), (48, 25)])
def test_every_layer_and_head_has_its_label_and_room_for_it(n_layers, n_heads):
    values = torch.randn(n_layers, n_heads, 3)
    figure = plots.heatmap(made_up(values, range(n_layers), range(n_heads)))
    layout = figure.layout
    assert list(layout.yaxis.ticktext) == [str(layer) for layer in range(n_layers)]
    assert list(layout.xaxis.ticktext) == [str(head) for head in range(n_heads)]
    assert list(figure.data[0].y) == [str(layer) for layer in range(n_layers)]
    assert layout.yaxis.autorange == "reversed"
    inside = layout.width - layout.margin.l - layout.margin.r - 90  # the colour bar
    assert inside / n_heads >= 28
    assert (layout.height - layout.margin.t - layout.margin.b) / n_layers >= layout.xaxis.tickfont[
        "size"
    ]


@pytest.mark.parametrize("shape", [(1, 1), (2, 300), (61, 15), (300, 2), (12, 64)])
@pytest.mark.parametrize("n", [1, 3])
def test_a_grid_of_any_shape_is_drawn_whole(shape, n):
    names = [f"part {number}" for number in range(n)]
    frames = [pandas.DataFrame(np.random.default_rng(k).normal(size=shape)) for k in range(n)]
    grids = {
        name: Grid(frame.rename_axis(index="layer", columns="head"))
        for name, frame in zip(names, frames, strict=True)
    }
    figure = draw_grids(grids, "logits", ["t", "in logits"])
    assert [trace.z.shape for trace in figure.data] == [shape] * n
    assert {note.text for note in figure.layout.annotations} == set(names * (n > 1))


def test_the_title_says_unit_kind_and_number_of_prompts(swept, edges):
    for effect in (swept, edges):
        for figure in (plots.heatmap(effect), plots.heatmap(effect, title="Ours")):
            flat = title(figure).replace("</span><br><span style='font-size:12px'>", " ")
            assert effect.unit in flat and str(effect.how) in flat and "2 prompts" in flat
    assert title(plots.heatmap(edges, title="Ours")).startswith("Ours<br>")


def test_a_position_in_a_title_has_its_token_where_all_prompts_have_the_same(base):
    run = rp.capture(base.view, ["the dog saw", "the dog ate"])
    metric = rp.logit_diff(" the", " a")

    def heading(place, *targets):
        effect = rp.ablate(run, list(targets), rp.Zero(), metric=metric, positions=place)
        return plots.show(effect).layout.meta["heading"][1]

    tokens = [list(texts) for texts in run.prompts.token_texts]
    same = next(n for n in range(1, 9) if tokens[0][n] == tokens[1][n])
    assert tokens[0][-1] != tokens[1][-1]
    for targets in (["0.0", "0.1"], ["mlp.0"]):
        assert f'at position {same}, "{tokens[0][same]}"; mean' in heading(same, *targets)
        assert "at position -1; mean" in heading(-1, *targets)
    dla = rp.direct_logit_attribution(run, " the", " a", by="head", positions=same)
    for draw in (plots.heatmap, plots.attribution_bars, plots.accumulated):
        said = draw(dla).layout.meta["heading"][1]
        assert f'after position {same}, "{tokens[0][same]}"; mean' in said
    report = rp.stream_report(run, positions=same)
    said = plots.stream(report).layout.meta["heading"][1]
    assert said.endswith(f'position {same}, "{tokens[0][same]}"')


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
    assert bars.layout.yaxis.ticktext == ("0.10  -5.000", "1.0  2.000", "0.1  1.000")
    everything = plots.bars(values, title="t", unit="logits", mark=100.0)
    assert list(everything.data[0].y) == ["0.1", "0.10", "1.0", "mlp.0"]
    assert everything.layout.shapes[0].x0 == 100


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


# Further pictures


@pytest.fixture(scope="module")
def attributed(base):
    return rp.direct_logit_attribution(base, " the", " a", by="head")


@pytest.fixture(scope="module")
def lenses(base):
    return rp.logit_lens(base)


def test_effects_side_by_side_share_a_scale_and_show_the_frame(swept, edges):
    for effect, rows in ((swept, ["target"]), (edges, ["target", "receiver"])):
        frame = effect.to_frame().rename(columns={"value": "total"})
        means = frame.groupby(rows)[["total", "direct", "indirect"]].mean()
        figure = plots.effect_grids(effect)
        grids = [trace for trace in data(figure) if "coloraxis" in trace]
        assert len(grids) == 3
        assert scale(figure)[1] == pytest.approx(means.abs().max().max(), abs=1e-7)
        for name, trace in zip(means.columns, grids, strict=True):
            for i, y in enumerate(trace["y"]):
                for j, x in enumerate(trace["x"]):
                    known = means.loc[f"{y}.{x}" if rows == ["target"] else (y, x), name]
                    shown = trace["z"][i][j]
                    assert (shown is None) == (known != known)
                    assert shown is None or shown == pytest.approx(known, abs=1e-7)


def test_targets_at_each_position_in_turn_are_a_grid(base):
    metric = rp.logit_diff(" the", " a")
    effect = rp.ablate(base, ["attn.0", "mlp.1"], rp.Zero(), metric=metric, positions="each")
    means = effect.mean(effect.total)
    shown = read_back(plots.show(effect))
    assert len(shown) == means.numel()
    for (target, place), value in shown.items():
        known = float(means[effect.targets.index(target), int(place.split()[0])])
        assert (value is None) == (known != known)
        assert value is None or value == pytest.approx(known, abs=1e-7)
    with pytest.raises(ValueError, match="choose one position first"):
        plots.effect_bars(effect)
    n = len(effect.columns.labels)
    named = plots.effect_grids(effect, tokens=["dog"] * n)
    assert named.layout.xaxis.ticktext[1] == '1 "dog"'
    with pytest.raises(ValueError, match="2 tokens for"):
        plots.effect_grids(effect, tokens=["a", "b"])


def test_a_large_grid_of_paths_keeps_the_strongest_and_says_so(edges):
    figure = plots.effect_grids(edges, top=2)
    total = edges.mean(edges.total).nan_to_num().abs()
    strongest = {edges.targets[n] for n in total.amax(1).topk(2).indices.tolist()}
    assert set(figure.data[0].y) == strongest
    assert f"the strongest 2 of {len(edges.targets)} senders" in figure.layout.meta["heading"][1]


def test_bars_of_effects_show_the_largest_targets(swept):
    frame = swept.to_frame().rename(columns={"value": "total"})
    means = frame.groupby("target")[["total", "direct", "indirect"]].mean()
    traces = data(plots.effect_bars(swept, top=5))
    assert [trace["name"] for trace in traces] == list(means.columns)
    order = means["total"].abs().sort_values(ascending=False).index[:5].tolist()
    for trace in traces:
        assert trace["y"] == order
        assert trace["x"] == pytest.approx(means.loc[order, trace["name"]].tolist(), abs=1e-7)


def test_attribution_bars_add_up_to_the_model(attributed):
    (trace,) = data(plots.attribution_bars(attributed, top=4))
    assert sum(trace["x"]) == pytest.approx(float(attributed.model_value.mean()), abs=1e-4)
    assert trace["y"][-1] == f"{len(attributed.components) - 4} other rows"
    largest = attributed.values[..., 0].mean(1).abs().max()
    assert abs(trace["x"][0]) == pytest.approx(float(largest), abs=1e-6)


def test_the_accumulated_sum_ends_at_the_model_whatever_the_grain(base):
    ends = []
    for by in ("component", "head", "neuron"):
        found = rp.direct_logit_attribution(base, " the", " a", by=by)
        line, parts = data(plots.accumulated(found))
        assert line["y"][-1] == pytest.approx(float(found.model_value.mean()), abs=1e-4)
        assert parts["x"][-1] == "constants"
        ends.append(parts["y"])
    whole = rp.direct_logit_attribution(base, " the", " a").values[:, :, 0].mean(1)
    for parts in ends:
        assert parts[:-1] == pytest.approx(whole[:-2].tolist(), abs=1e-4)


def test_positions_show_one_prompt_and_its_tokens(base):
    found = rp.direct_logit_attribution(base, " the", " a", by="head", positions=None)
    trace = data(plots.by_position(found, batch=0, top=3))[0]
    n = base.prompts.lengths[0]
    assert len(trace["x"]) == n < max(base.prompts.lengths) and len(trace["y"]) == 3
    for row, values in zip(trace["y"], trace["z"], strict=True):
        expected = found.values[found.components.index(row), 0, :n]
        assert values == pytest.approx(expected.tolist(), abs=1e-6)


@pytest.mark.parametrize("shade", ["probability", "kl", "entropy"])
def test_a_trajectory_shows_tokens_numbers_and_the_last_layer(base, lenses, shade):
    (trace,) = data(plots.trajectory(lenses, shade=shade, batch=1, top=4))
    top, n = lenses.top_tokens(4), base.prompts.lengths[1]
    numbers = top.values[..., 0] if shade == "probability" else getattr(lenses, shade).values
    assert trace["y"] == list(lenses.labels) and len(trace["x"]) == n
    for row in range(len(lenses.labels)):
        assert trace["z"][row] == pytest.approx(numbers[row, 1, :n].tolist(), abs=1e-6)
    said = trace["customdata"][-1][n - 1]
    assert said.count("%") >= 4 and "KL(final || lens) 0.0000 nats" in said


def test_a_panel_that_copies_another_is_not_drawn_and_the_title_says_so(lenses):
    figure = plots.trajectory(lenses, lenses)
    assert len(figure.data) == 1
    assert "logit lens 2: the same as logit lens" in figure.layout.meta["heading"][1]


def test_an_effect_with_nothing_indirect_has_one_panel(swept):
    alone = dataclasses.replace(swept, direct=swept.values + 1e-9)
    figure = plots.effect_grids(alone)
    assert len(figure.data) == 1
    said = figure.layout.meta["heading"][1]
    assert "direct: the same as total" in said and "indirect: below 0.0001 everywhere" in said
    assert [trace.name for trace in plots.effect_bars(alone).data] == ["total", "direct"]


def test_bars_of_means_over_prompts_carry_standard_errors(swept, attributed):
    drawn = plots.attribution_bars(attributed, top=3).data[0]
    rows = [attributed.components.index(name) for name in drawn.y[:3]]
    values = attributed.values[rows, :, 0].double()
    expected = values.std(-1, correction=1) / values.shape[-1] ** 0.5
    assert list(drawn.error_x.array[:3]) == pytest.approx(expected.tolist())
    (total, *_) = plots.effect_bars(swept, top=2).data
    places = [swept.targets.index(name) for name in total.y]
    values = swept.total[places].double()
    expected = values.std(-1, correction=1) / values.shape[-1] ** 0.5
    assert list(total.error_x.array) == pytest.approx(expected.tolist())


def test_weights_count_in_a_standard_error():
    values, weights = torch.tensor([[1.0, 4.0, 2.0]]), torch.tensor([2, 0, 2])
    equal = standard_error(values)
    assert equal.tolist() == pytest.approx((values.double().std(-1) / 3**0.5).tolist())
    without = standard_error(values[:, [0, 2]])  # a prompt without weight is no observation
    assert standard_error(values, weights).tolist() == pytest.approx(without.tolist())


def test_attention_is_drawn_with_tokens_and_without_the_future():
    text = ["the dog saw the cat", "a bird"]
    run = rp.capture(rp.load(str(zoo.text_folder())), text)
    patterns = rp.attention_patterns(run, ["0.1", "2.3", "1.0"])
    figure = plots.attention(patterns, batch=1, heads=2)
    n, tokens = run.prompts.lengths[1], run.prompts.token_texts[1]
    for trace, head in zip(data(figure), ("0.1", "2.3"), strict=True):
        for query in range(n):
            row = trace["z"][query]
            assert row[query + 1 :] == [None] * (n - query - 1)
            known = patterns.sel(head=head, batch=1)[query, : query + 1].tolist()
            assert row[: query + 1] == pytest.approx(known)
    for ticks in (figure.layout.xaxis.ticktext, figure.layout.yaxis.ticktext):
        assert all(
            token.strip()[:8] in html.unescape(t) for token, t in zip(tokens, ticks, strict=True)
        )
    assert figure.layout.plot_bgcolor not in (None, "#ffffff")  # 0 is white, the future is not
    assert scale(figure) == (0, 1) and "the first 2 of 3 heads" in title(figure)
    assert plots.show(patterns).layout.meta["heading"]


def test_lenses_by_layer_show_their_means(lenses):
    (line,) = data(plots.lens_by_layer(lenses))
    means = lenses.kl.values.double().nanmean((1, 2)).tolist()
    assert line["y"] == pytest.approx(means, abs=1e-7) and line["x"][-1] == "resid_post.2"
    ticks = plots.lens_by_layer(lenses).layout.xaxis.tickvals
    assert ticks[-1] == "resid_post.2"


def test_means_along_depth_carry_standard_errors_over_prompts(lenses, attributed, base):
    kl = lenses.kl
    (line,) = plots.lens_by_layer(lenses).data
    assert line.error_y.array == pytest.approx(kl.table()["se"].tolist())
    sums, parts = plots.accumulated(attributed).data
    embed = attributed.sel(component="embed", pos=-1).double()
    first = float(embed.std() / len(embed) ** 0.5)
    assert parts.error_y.array[0] == sums.error_y.array[0] == pytest.approx(first)
    whole = attributed.total[..., 0].double()
    assert sums.error_y.array[-1] == pytest.approx(float(whole.std() / len(whole) ** 0.5))
    report = rp.stream_report(base)
    errors = [trace.error_y.array for trace in plots.stream(report).data]
    for column in ("se_write_norm", "se_stream_norm", "se_share", "se_cosine"):
        expected = report.table()[column].tolist()
        assert any(found == pytest.approx(expected) for found in errors)


def test_lines_and_grids_leave_a_gap_where_there_is_no_number(lenses):
    figure = plots.kl_by_layer({"logit lens": [1.0, float("nan"), 0.0]}, "abc", over="3 tokens")
    assert data(figure)[0]["y"] == [1.0, None, 0.0]
    surprise = data(plots.lens_grid(lenses.cross_entropy))[0]["z"]
    assert all(row[-1] is None and row[0] is not None for row in surprise)


def test_a_path_diagram_shows_the_largest_paths(edges):
    traces = data(plots.path_diagram(edges, top=3))
    (numbers,) = [t for t in traces if t["mode"] == "markers"]
    frame = edges.to_frame().dropna(subset=["value"])
    frame["indirect"] = frame["value"] - frame["direct"]
    means = frame.groupby(["target", "receiver"])[["value", "direct", "indirect"]].mean()
    order = means["value"].abs().sort_values(ascending=False).index[:3]
    assert [tuple(row[:2]) for row in numbers["customdata"]] == list(order)
    for row, place in zip(numbers["customdata"], order, strict=True):
        assert row[2:] == pytest.approx(means.loc[place].tolist(), abs=1e-7)
    lines = [t for t in traces if t["mode"] == "lines"]
    widths = [t["line"]["width"] for t in lines]
    assert widths == sorted(widths)
    largest = numbers["customdata"][0][2]
    assert lines[-1]["line"]["color"] == (drawing.POSITIVE if largest > 0 else drawing.NEGATIVE)
    nodes = {label for t in traces if "text" in t["mode"] for label in t["text"]}
    assert nodes == {end for row in numbers["customdata"] for end in row[:2]}


def test_the_stream_shows_its_summary(base):
    report = rp.stream_report(base)
    frame = report.table()
    columns = ("mean_stream_norm", "mean_write_norm", "mean_share", "mean_cosine")
    traces = data(plots.stream(report))
    drawn = {(trace["name"], trace["customdata"][0][0].split()[0]): trace for trace in traces}
    stream, write = "stream after the write", "the write"
    order = [(stream, "norms"), (write, "norms"), (write, "share"), (stream, "cosine")]
    for trace, column in zip((drawn[key] for key in order), columns, strict=True):
        assert trace["y"] == pytest.approx(frame[column].tolist(), abs=1e-9)
        assert trace["x"] == frame["write"].tolist()


def test_token_text_shades_each_token_and_escapes_it(base):
    found = rp.direct_logit_attribution(base, " the", " a", positions=None)
    text = plots.token_text(found, "mlp.1", batch=1)
    n = base.prompts.lengths[1]
    place = found.components.index("mlp.1")
    assert text.tokens == base.prompts.token_texts[1]
    assert text.values == pytest.approx(found.values[place, 1, :n].tolist(), abs=1e-6)
    assert text.html.count("<span") == n and found.unit in text.html
    evil = rp.logit_lens(rp.capture(base.view, "a <img onerror='x'>")).kl
    shown = plots.token_text(evil, "resid_post.0")._repr_html_()
    assert "<img" not in shown and "&lt;" in shown
    absent = plots.token_text(rp.logit_lens(base).cross_entropy, "resid_post.0")
    assert absent.values[-1] is None and "no value" in absent.html


def test_show_picks_the_picture(base, swept, edges, attributed, lenses):
    report = rp.stream_report(base)
    mlps = rp.ablate(base, ["mlp.0"], rp.Zero(), metric=rp.logit_diff(" the", " a"))
    expected = [
        (swept, plots.effect_grids(swept)),
        (edges, plots.effect_grids(edges)),
        (mlps, plots.effect_bars(mlps)),
        (attributed, plots.heatmap(attributed)),
        (lenses, plots.trajectory(lenses)),
        (lenses.kl, plots.lens_grid(lenses.kl)),
        (report, plots.stream(report)),
        (swept.grid(), plots.heatmap(swept.grid())),
    ]
    for result, figure in expected:
        assert plots.show(result).to_json() == figure.to_json()
        unit_and_more = figure.layout.meta["heading"][1]
        assert "in " in unit_and_more


def test_every_title_of_an_ablation_names_its_kind(swept, edges):
    drawn = [plots.effect_grids(swept), plots.effect_bars(swept)]
    drawn += [plots.effect_grids(edges), plots.path_diagram(edges)]
    for effect, figure in zip((swept, swept, edges, edges), drawn, strict=True):
        assert f"in {effect.unit}; {effect.how}, at" in figure.layout.meta["heading"][1]


@pytest.mark.parametrize("text", ["$x$ and $y$", "%{meta.least}", "<b>&lt;"])
def test_what_plotly_would_read_is_escaped(text):
    drawn = plots.bars({text: 1.0}, title=text, unit="u")
    (label,) = drawn.data[0].y
    assert "$" not in label and "%{" not in label and "<b" not in label
    assert html.unescape(label) == text and html.unescape(title(drawn)) == text
