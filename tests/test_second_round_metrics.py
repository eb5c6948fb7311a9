"""Cases that once came out wrong: metrics of one's own, overlapping targets, tops and pictures.

S06 overlap of a whole and its part; S07, S08 a function of logits as a metric, with padding and
in groups of prompts; S22 pictures that leave out what matters; S24 the top of several prompts.
"""

import dataclasses

import pytest
import torch
import zoo
from zoo_ablation import KINDS_OF_BACKEND, OTHERS, ROWS, TOYS, Slow

import resid_patching as rp
from resid_patching.errors import AddressError, MetricError

backends = pytest.mark.parametrize("backend", zoo.BACKENDS)

SHORT = "When Mary and John went to the store, John gave a drink to"  # 15 tokens
LONG = "When the old man Mary and John went to the store, John gave a drink to"
MANY = [[(7 * row + 3 * place) % zoo.D_VOCAB for place in range(8)] for row in range(12)]
LABELS = torch.tensor([(11 * row + 5) % zoo.D_VOCAB for row in range(12)])
# All prompts together; in groups, but all logits fit; pairs, where they do not; one by one.
BOUNDS = [2**30, 2**18, 2**17, 1]
HEAD = "1.2"


def toy(backend):
    return zoo.build("hooked") if backend == "hooked" else zoo.named("gpt2_untied")


def assert_close(left, right, tolerance=1e-10):
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


def bounded(run, max_bytes):
    return dataclasses.replace(run, max_bytes=max_bytes, _kept={}, _own={})


def both(run, metric, **options):
    """Baseline and patched value of a metric, with a head at zero."""
    effect = rp.ablate(run, HEAD, rp.Zero(), metric=metric, **options)
    return torch.stack([effect.baseline, effect.patched[0]])


def labelled(logits, labels):
    return logits[range(len(logits)), -1, labels]


# A function of logits and padding


@pytest.mark.once
def test_s07_the_last_position_is_each_prompts_last_token():
    model = rp.load("demo")
    run = rp.capture(model, [SHORT, LONG])
    assert run.prompts.lengths[0] == 15 < run.prompts.lengths[1]
    mary, john = (model.tokenizer.encode(name)[-1] for name in (" Mary", " John"))
    own = rp.measure(run, lambda logits: logits[:, -1, mary] - logits[:, -1, john])
    assert float(own[0]) == pytest.approx(12.4552, abs=1e-4)
    torch.testing.assert_close(own, rp.measure(run, rp.logit_diff(" Mary", " John")))


@pytest.mark.parametrize("two", [False, True], ids=["logits", "logits and prompts"])
@pytest.mark.parametrize("routes", [("plain",), ("full",)], ids=str)
@backends
def test_s07_a_function_of_a_padded_batch_gives_what_it_gives_of_each_prompt_alone(
    backend, routes, two
):
    def spread(logits):
        return logits[:, -1, 3] - logits[:, -2, 4] + logits.logsumexp(-1).mean(-1)

    def with_prompts(logits, prompts):
        assert prompts.dtype == torch.long and len(prompts) == len(logits)
        return spread(logits)

    model, metric = toy(backend), with_prompts if two else spread
    for max_bytes in BOUNDS:
        found = both(rp.capture(model, zoo.RAGGED, max_bytes=max_bytes), metric, routes=routes)
        for row, tokens in enumerate(zoo.RAGGED):
            alone = both(rp.capture(model, [tokens]), metric, routes=routes)
            assert_close(found[:, [row]], alone)


@backends
def test_s07_a_position_narrows_what_a_function_sees(backend):
    run = rp.capture(toy(backend), zoo.RAGGED)
    shapes = set()

    def last(logits):
        shapes.add(tuple(logits.shape))
        return logits[:, 0, 3]

    assert_close(both(run, rp.custom(last, position=-1)), both(run, rp.logit(3)))
    assert shapes == {(3, 1, zoo.D_VOCAB)}
    places = [0, 2, 1]
    found = both(run, rp.custom(last, position=places))
    assert_close(found, both(run, rp.logit(3, position=places)))


# A function of logits and groups of prompts


@pytest.mark.parametrize("max_bytes", BOUNDS)
@backends
def test_s08_a_function_that_is_told_which_prompts_gives_one_number_for_every_grouping(
    backend, max_bytes
):
    run = rp.capture(toy(backend), MANY, max_bytes=max_bytes)
    found = both(run, lambda logits, prompts: labelled(logits, LABELS[prompts]))
    assert_close(found, both(run, rp.logit(LABELS)))


@pytest.mark.parametrize("max_bytes", BOUNDS)
@backends
def test_s08_a_function_that_does_not_count_rows_works_for_every_max_bytes(backend, max_bytes):
    run = rp.capture(toy(backend), MANY, max_bytes=max_bytes)
    assert_close(both(run, lambda logits: logits[:, -1, 3]), both(run, rp.logit(3)))


HOLDERS = {
    "index": labelled,
    "gather": lambda logits, labels: logits[:, -1].gather(1, labels[:, None])[:, 0],
    "cut": lambda logits, labels: labelled(logits, labels[: len(logits)]),
    "loop": lambda logits, labels: torch.stack(
        [logits[row, -1, labels[row]] for row in range(len(logits))]
    ),
    "zip": lambda logits, labels: torch.stack(
        [own[-1, label] for own, label in zip(logits, labels, strict=False)]
    ),
    "right": lambda logits, labels: (logits[:, -1].argmax(-1) == labels[: len(logits)]).double(),
}


@pytest.mark.parametrize("kind", HOLDERS)
@pytest.mark.parametrize("prompts", ["many", "ragged", "sorted"])
@backends
def test_s08_a_function_that_holds_a_label_a_prompt_gives_its_numbers_or_one_error(
    backend, prompts, kind
):
    """Also where all labels of the first prompts are alike, so that a group of them shows none."""
    rows = [tokens[: 3 + row % 3] for row, tokens in enumerate(MANY)]
    rows = rows if prompts == "ragged" else MANY
    run = rp.capture(toy(backend), rows)
    labels = LABELS
    if prompts == "sorted":
        labels = torch.arange(12) // 10 + 3
    if kind == "right":  # what the model says of every second prompt
        said = run.logits_at(-1)[:, 0].argmax(-1)
        labels = torch.where(torch.arange(12) % 2 == 0, said, labels)
    holder = HOLDERS[kind]
    expected = both(run, lambda logits, prompts: holder(logits, labels[prompts]))
    refused = []
    for max_bytes in BOUNDS:
        try:
            found = both(bounded(run, max_bytes), lambda logits: holder(logits, labels))
        except MetricError as error:
            assert "second argument, the numbers of the prompts" in str(error)
            refused.append(max_bytes)
        else:
            assert_close(found, expected)
    assert refused == [bound for bound in BOUNDS if not run_fits(run, bound)]
    assert len(refused) in (1, 2)


def run_fits(run, max_bytes):
    """Whether all logits take no more than a quarter."""
    return len(run) * max(run.prompts.lengths) * zoo.D_VOCAB * 8 <= max_bytes // 4


@pytest.mark.parametrize("two", [False, True], ids=["logits", "logits and prompts"])
@pytest.mark.once
def test_s08_eighty_prompts_have_their_own_labels(two):
    """More prompts than one group has."""
    rows = [[(7 * row + 3 * place) % zoo.D_VOCAB for place in range(15)] for row in range(80)]
    labels = torch.tensor([(11 * row + 5) % zoo.D_VOCAB for row in range(80)])
    run = rp.capture(toy(zoo.BACKENDS[0]), rows)
    seen = []

    def own(logits):
        seen.append(len(logits))
        return labelled(logits, labels)

    metric = (lambda logits, prompts: labelled(logits, labels[prompts])) if two else own
    assert_close(both(run, metric), both(run, rp.logit(labels)))
    assert set(seen) <= {80}


@backends
def test_s08_the_order_of_prompts_is_theirs_alone(backend):
    model = toy(backend)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    rows = [tokens[: 3 + row % 3] for row, tokens in enumerate(MANY)]
    straight = both(
        rp.capture(model, rows), lambda logits, prompts: labelled(logits, LABELS[prompts])
    )
    shuffled = rp.capture(model, [rows[n] for n in order])
    labels = LABELS[order]
    for metric in (
        lambda logits, prompts: labelled(logits, labels[prompts]),
        lambda logits: labelled(logits, labels),
    ):
        assert_close(both(shuffled, metric), straight[:, order])


@pytest.mark.parametrize("max_bytes", BOUNDS)
@pytest.mark.parametrize("two", [False, True], ids=["logits", "logits and prompts"])
@backends
def test_s08_a_function_that_mixes_prompts_is_refused_however_they_are_grouped(
    backend, two, max_bytes
):
    def centred(logits):
        return logits[:, -1, 3] - logits[:, -1, 3].mean()

    metric = (lambda logits, prompts: centred(logits)) if two else centred
    for rows in (MANY, zoo.RAGGED):
        run = rp.capture(toy(backend), rows, max_bytes=max_bytes)
        with pytest.raises(MetricError, match="a number of its own"):
            rp.measure(run, metric)


@backends
def test_s08_a_function_is_called_once_a_variant_and_length(backend):
    model = toy(backend)
    run = rp.capture(model, [*zoo.RAGGED, *[tokens[::-1] for tokens in zoo.RAGGED]])
    for own in (lambda logits: logits[:, -1, 3], lambda logits, prompts: logits[:, -1, 3]):
        calls = []

        def count(*given, own=own, calls=calls):
            calls.append(len(given[0]))
            return own(*given)

        metric = (
            (lambda logits, f=count: f(logits))
            if own.__code__.co_argcount == 1
            else (lambda logits, prompts, f=count: f(logits, prompts))
        )
        rp.ablate(run, rp.heads(model), rp.Zero(), metric=metric)
        n_checks = 3 * 2
        assert len(calls) <= n_checks + 3 * (1 + 2 * len(rp.heads(model)))


@pytest.mark.once
def test_s08_only_a_second_argument_without_a_default_is_given_the_prompts():
    run = rp.capture(toy(zoo.BACKENDS[-1]), MANY[:4])
    labels = LABELS[:4]
    expected = rp.measure(run, rp.logit(labels))
    for metric in (
        lambda logits, labels=labels: labelled(logits, labels),
        lambda logits, prompts, *, labels=labels: labelled(logits, labels[prompts]),
        lambda *given: labelled(given[0], labels),
    ):
        assert_close(rp.measure(run, metric), expected)


@pytest.mark.parametrize(
    "function",
    [lambda: 1, lambda logits, prompts, more: 1, lambda logits, *, labels: 1],
)
@pytest.mark.once
def test_s08_a_function_of_other_arguments_is_refused_at_once(function):
    with pytest.raises(TypeError, match="a function of logits"):
        rp.custom(function)


@pytest.mark.once
def test_s08_a_metric_of_ones_own_has_a_name_and_a_unit():
    run = rp.capture(toy(zoo.BACKENDS[-1]), zoo.RAGGED)
    metric = rp.custom(lambda logits: logits[:, -1, 3], name="logit of 3", unit="logits")
    effect = rp.ablate(run, HEAD, rp.Zero(), metric=metric)
    assert (effect.metric, effect.unit) == ("logit of 3", "logits")
    assert_close(effect.total, rp.ablate(run, HEAD, rp.Zero(), metric=rp.logit(3)).total)


@backends
def test_s08_greater_than_is_the_probability_above_each_prompts_label_less_that_below(backend):
    """Sums over a set of tokens that is another one for each prompt."""
    model, labels = toy(backend), torch.tensor([3, 8, 5])
    digits = torch.arange(20, 30)
    above = torch.arange(10) > labels[:, None]

    def greater_than(logits, prompts):
        probs = logits[:, -1].softmax(-1)[:, digits]
        return torch.where(above[prompts], probs, -probs).sum(-1)

    for max_bytes in BOUNDS:
        run = rp.capture(model, zoo.RAGGED, max_bytes=max_bytes)
        found = rp.measure(run, rp.custom(greater_than, position=-1))
        for row in range(3):
            probs = run.logits_at(-1)[row, 0].softmax(-1)[20:30]
            own = probs[labels[row] + 1 :].sum() - probs[: labels[row] + 1].sum()
            assert_close(found[row], own)


# A part and the whole that holds it


def parts_of_layers(toy):
    """A layer and everything that can be replaced inside of it, pair by pair."""
    kv = toy.n_kv_heads - 1
    inside = ["1.2", "1.2.z", "1.2.q", f"1.{kv}.k", f"1.{kv}.v", "1.2.pattern", "attn.1.bias"]
    found = [(part, "attn.1") for part in inside]
    return [*found, ("mlp.1.5", "mlp.1"), ("mlp.1.bias", "mlp.1")]


def overlaps(toy):
    """Pairs of which one is computed from the other, or is the same place; the later one last."""
    k, v = f"1.{toy.n_kv_heads - 1}.k", f"1.{toy.n_kv_heads - 1}.v"
    found = [("1.2.q", "1.2"), ("1.2.pattern", "1.2.z"), (k, "1.2.pattern"), (v, "1.3")]
    found += [("1.2.q", k), ("attn.1", "resid_post.1"), ("mlp.1.bias", "resid_post.1")]
    found += [("mlp.1", "resid_post.1"), ("resid_post.0", "resid_pre.1"), ("embed", "resid_pre.0")]
    if not toy.parallel:
        found += [("attn.1", "resid_mid.1"), ("attn.1.bias", "resid_mid.1"), ("1.2", "resid_mid.1")]
    return found + [("embed", "pos_embed")] * toy.has_positions


@pytest.mark.parametrize("toy", [*KINDS_OF_BACKEND, TOYS[-1]], ids=str)
def test_s06_a_layer_and_a_part_of_it_are_refused_together(toy):
    run = rp.capture(toy.model, ROWS)
    path = rp.Path(to="logits", using=rp.Zero(), mlps="freeze")
    for part, whole in parts_of_layers(toy):
        is_writer = part.count(".") == 1 or part.startswith(("mlp", "attn"))
        for how in [rp.Zero(), path] if is_writer else [rp.Zero()]:
            for pair in ([part, whole], [whole, "0.1", part]):
                with pytest.raises(AddressError, match=f"^{part} is a part of {whole}, so"):
                    rp.ablate(run, pair, how, metric=rp.logit(3), joint=True)


@pytest.mark.parametrize("toy", [*KINDS_OF_BACKEND, TOYS[-1]], ids=str)
def test_s06_of_other_targets_that_overlap_the_later_one_wins(toy):
    """As hooks at both places in whole forward passes say; new values are those of a source."""
    run, source = rp.capture(toy.model, ROWS[:1]), rp.capture(toy.model, OTHERS[:1])
    base, other = Slow(toy, ROWS[:1]), Slow(toy, OTHERS[:1])
    how, metric = rp.Resample(source, "rowwise"), rp.logit_diff(3, 6)
    clean = base.score("logit_diff", base.clean)
    for pair in overlaps(toy):
        total, direct = base.changed(pair, None, other.value)
        for order in (pair, pair[::-1]):
            effect = rp.ablate(run, order, how, metric=metric, joint=True)
            assert_close(effect.total[0], base.score("logit_diff", total) - clean, 1e-9)
            assert_close(effect.direct[0], base.score("logit_diff", direct) - clean, 1e-9)


@pytest.mark.once
def test_s06_a_layer_and_its_bias_together_are_refused_and_the_layer_holds_its_bias():
    run = rp.capture(rp.load("demo"), SHORT)
    metric = rp.logit_diff(" Mary", " John")
    with pytest.raises(AddressError, match=r"attn\.2\.bias is a part of attn\.2"):
        rp.ablate(run, ["attn.2", "attn.2.bias"], rp.Zero(), metric=metric, joint=True)
    whole = rp.ablate(run, "attn.2", rp.Zero(), metric=metric)
    parts = [*(f"2.{head}" for head in range(4)), "attn.2.bias"]
    together = rp.ablate(run, parts, rp.Zero(), metric=metric, joint=True)
    assert float(whole.total[0, 0]) == pytest.approx(4.548, abs=1e-3)
    torch.testing.assert_close(together.patched, whole.patched, rtol=0, atol=1e-4)


@backends
def test_s06_one_at_a_time_a_layer_and_its_parts_are_two_rows(backend):
    run = rp.capture(toy(backend), zoo.RAGGED)
    sites = ["attn.1", "attn.1.bias", "1.2"]
    effect = rp.ablate(run, sites, rp.Zero(), metric=rp.logit(3))
    for number, site in enumerate(sites):
        assert_close(
            effect.total[number], rp.ablate(run, site, rp.Zero(), metric=rp.logit(3)).total[0]
        )


# The top of several prompts


@backends
def test_s24_the_top_of_several_prompts_is_of_targets_by_their_mean(backend):
    run = rp.capture(toy(backend), zoo.RAGGED)
    effect = rp.ablate(run, rp.heads(run), rp.Zero(), metric=rp.logit_diff(3, 6))
    top = effect.top(5)
    columns = "target layer head baseline patched direct indirect se value"
    assert list(top.columns) == columns.split()
    assert len(set(top.target)) == 5
    means = effect.total.mean(1)
    order = means.abs().sort(descending=True, stable=True).indices[:5].tolist()
    assert top.target.tolist() == [effect.targets[number] for number in order]
    parts = {"value": effect.total, "patched": effect.patched, "direct": effect.direct}
    for name, part in {**parts, "indirect": effect.indirect}.items():
        assert top[name].tolist() == pytest.approx(part.mean(1)[order].tolist(), abs=1e-12)
    assert top.baseline.tolist() == pytest.approx([float(effect.baseline.mean())] * 5)
    signed = effect.top(3, by="signed").value.tolist()
    assert signed == pytest.approx(means.sort(descending=True).values[:3].tolist())
    assert "mean over 3 prompts" in effect._repr_html_()


@backends
def test_s24_where_the_metric_is_of_tokens_their_mean_ranks(backend):
    run = rp.capture(toy(backend), zoo.RAGGED)
    effect = rp.ablate(run, rp.heads(run), rp.Zero(), metric=rp.loss())
    expected = (effect.total * torch.tensor([7, 2, 4])).sum(1) / 13
    top = effect.top(12)
    by_name = dict(zip(effect.targets, expected.tolist(), strict=True))
    assert top.value.tolist() == pytest.approx([by_name[name] for name in top.target])
    assert top.value.abs().is_monotonic_decreasing
    assert "mean over 13 tokens of 3 prompts" in effect._repr_html_()


@backends
def test_s24_receivers_and_positions_have_a_row_each(backend):
    run = rp.capture(toy(backend), zoo.RAGGED)
    path = rp.Path(to=rp.receivers("1.0.q", "logits"), using=rp.Zero(), mlps="freeze")
    paths = rp.ablate(run, ["0.1", "1.2"], path, metric=rp.logit(3)).top()
    cells = {("0.1", "1.0.q"), ("0.1", "logits"), ("1.2", "logits")}  # no path from 1.2 to 1.0.q
    assert set(zip(paths.target, paths.receiver, strict=True)) == cells and len(paths) == 3
    options = {"metric": rp.logit(3), "positions": "each"}
    places = rp.ablate(run, ["0.1", "mlp.1"], rp.Zero(), **options).top(99)
    in_all = range(min(map(len, zoo.RAGGED)))
    found = sorted(zip(places.target, places.position, strict=True))
    assert found == sorted((target, place) for target in ("0.1", "mlp.1") for place in in_all)


@backends
def test_s24_the_top_of_an_attribution_is_of_components(backend):
    run = rp.capture(toy(backend), zoo.RAGGED)
    dla = rp.direct_logit_attribution(run, 3, 6, by="head")
    top = dla.top(5)
    assert (
        list(top.columns) == "component layer head position se value".split()
        and len(set(top.component)) == 5
    )
    means = dla.values[..., 0].mean(1)
    assert top.value.abs().tolist() == pytest.approx(means.abs().topk(5)[0].tolist())
    (one,) = rp.direct_logit_attribution(run, 3, 6, positions=[0, 1, 2]).top(1).position
    assert one == "own"
    single = rp.direct_logit_attribution(rp.capture(toy(backend), zoo.RAGGED[:1]), 3, 6).top(3)
    assert list(single.columns) == ["component", "layer", "position", "token", "value"]
    assert set(single.position) == {7}


# Pictures


def swept(targets, n_positions):
    """A sweep over positions: made-up effects, so many targets and positions."""
    run = rp.capture(toy(zoo.BACKENDS[-1]), zoo.RAGGED[0])
    effect = rp.ablate(run, "1.2", rp.Zero(), metric=rp.logit(3), positions="each")
    values = torch.randn(len(targets), n_positions, 1, generator=torch.Generator().manual_seed(0))
    axes = (
        rp.Axis("target", tuple(targets)),
        rp.Axis("position", tuple(range(n_positions))),
        rp.Axis("batch", (0,)),
    )
    return dataclasses.replace(effect, values=values, patched=values, direct=values / 3, axes=axes)


STATES = [f"resid_{place}.{layer}" for layer in range(30) for place in ("pre", "mid")]
LAYERS = ["embed", *(f"{part}.{layer}" for layer in range(30) for part in ("attn", "mlp"))]


@pytest.mark.parametrize("n_positions", [15, 300])
@pytest.mark.parametrize("targets", [[*STATES, "resid_post.29"], LAYERS], ids=["states", "layers"])
@pytest.mark.once
def test_s22_a_picture_shows_every_layer_and_every_position(targets, n_positions):
    plots = pytest.importorskip("resid_patching.plots")
    pytest.importorskip("plotly")
    figure = plots.effect_grids(swept(targets, n_positions))
    for trace in figure.data[:3]:
        assert list(trace.y) == targets
        assert [name.split(" ")[0] for name in trace.x] == list(map(str, range(n_positions)))
    assert "strongest" not in " ".join(figure.layout.meta["heading"])
    assert figure.layout.width < 2500
    wide = (figure.layout.width - 200) / n_positions / (3 if n_positions == 15 else 1)
    shown = [int(str(name).split(" ")[0]) for name in figure.layout.xaxis.tickvals]
    assert wide * (shown[1] - shown[0]) >= 11  # labels stand apart


@pytest.mark.once
def test_s22_where_heads_are_cut_the_picture_says_how_many_there_are():
    plots = pytest.importorskip("resid_patching.plots")
    pytest.importorskip("plotly")
    heads = [f"{layer}.{head}" for layer in range(12) for head in range(12)]
    effect = swept(heads, 50)
    figure = plots.effect_grids(effect)
    strongest = effect.total.abs().amax((1, 2)).topk(40).indices.sort().values.tolist()
    assert list(figure.data[0].y) == [heads[number] for number in strongest]
    assert len(figure.data[0].x) == 50
    assert "the strongest 40 of 144 targets" in figure.layout.meta["heading"][1]
