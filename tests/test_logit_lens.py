"""The logit lens: the norm anew at every layer, the last row the model's own output."""

import math

import pytest
import torch
import zoo
from reference import lens as reference

import resid_patching as rp
from resid_patching.errors import (
    AddressError,
    CacheMismatchError,
    LensMismatchError,
    ModelChangedError,
    PositionError,
    ReadoutMismatchError,
    TokenError,
    UnsupportedModelError,
)
from resid_patching.lens import quantities, readout, unembed

backends = pytest.mark.parametrize("backend", zoo.BACKENDS)
cells = pytest.mark.parametrize("cell", zoo.MATRIX, ids=str)
SEQUENTIAL, PARALLEL = zoo.Cell(), zoo.Cell(parallel=True)


def assert_close(left, right, tolerance=1e-10):
    torch.testing.assert_close(
        left, right, rtol=0, atol=tolerance, equal_nan=True, check_dtype=False
    )


def lens_on(model, prompts=zoo.RAGGED, **options):
    return rp.logit_lens(rp.capture(model, prompts), **options)


def states_of(model, tokens, mid=False):
    """Each row's states [pos, d_model], from TransformerLens's own cache."""
    cache = zoo.plain_cache(model, tokens)
    names = ["blocks.0.hook_resid_pre"]
    for layer in range(model.cfg.n_layers):
        places = ("mid", "post") if mid else ("post",)
        names += [f"blocks.{layer}.hook_resid_{place}" for place in places]
    return [cache[name][0] for name in names]


def slow_distributions(model, tokens, norm="LN", softcap=None, mid=False):
    """Probabilities of each row and position, by the reference."""
    weights = zoo.plain_weights(model)
    rows = []
    for states in states_of(model, tokens, mid):
        z = [reference.logits(x, weights, norm, zoo.EPS, softcap) for x in states]
        rows.append([reference.probabilities(logits) for logits in z])
    return rows


# Rows


@cells
@backends
def test_the_last_row_equals_what_the_model_returns(backend, cell):
    model = zoo.build(backend, cell)
    logits = lens_on(model).logits(layer="resid_post.2", positions=None)
    for row, tokens in enumerate(zoo.RAGGED):
        own = rp.capture(model, zoo.RAGGED).logits_at(None)[row, : len(tokens)]
        assert torch.equal(logits[row, : len(tokens)], own)
        assert_close(own, zoo.plain_logits(model, tokens))
        assert logits[row, len(tokens) :].isnan().all()


@cells
@backends
def test_every_row_is_the_slow_reference(backend, cell):
    model = zoo.build(backend, cell)
    lens = lens_on(model)
    weights = zoo.plain_weights(model)
    for number, tokens in enumerate(zoo.RAGGED):
        for label, states in zip(lens.labels, states_of(model, tokens), strict=True):
            expected = [reference.logits(x, weights, cell.norm, zoo.EPS) for x in states]
            found = lens.logits(layer=label, positions=None)[number, : len(tokens)]
            assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("name", zoo.EXACT)
def test_many_architectures_lead_to_their_own_output(name):
    model = zoo.named(name)
    run = rp.capture(model, zoo.RAGGED)
    lens = rp.logit_lens(run)
    last = lens.logits(layer=lens.labels[-1], positions=None)
    assert torch.equal(last.nan_to_num(), run.logits_at(None).nan_to_num())
    assert float(lens.kl.values[0].nanmean()) > 0.01


@backends
def test_the_middle_is_read_where_asked(backend):
    model = zoo.build(backend, SEQUENTIAL)
    lens = lens_on(model, [zoo.RAGGED[0]], mid=True)
    assert lens.labels[:3] == ("resid_pre.0", "resid_mid.0", "resid_post.0")
    assert len(lens.labels) == 7
    weights = zoo.plain_weights(model)
    for label, states in zip(lens.labels, states_of(model, zoo.RAGGED[0], mid=True), strict=True):
        expected = [reference.logits(x, weights, "LN", zoo.EPS) for x in states]
        assert_close(lens.logits(layer=label, positions=None)[0], torch.stack(expected))


@backends
def test_parallel_blocks_have_no_middle(backend):
    with pytest.raises(UnsupportedModelError, match="no resid_mid"):
        lens_on(zoo.build(backend, PARALLEL), mid=True)


def test_rows_go_by_several_names():
    lens = lens_on(zoo.build(zoo.BACKENDS[0]))
    assert lens.row("embed") == lens.row("resid_pre.0") == 0
    assert lens.row("resid_pre.2") == lens.row("resid_post.1") == 2
    assert lens.row(rp.parse("blocks.1.hook_resid_post")) == 2
    for wrong in ("resid_post.3", "resid_mid.0", "attn.0"):
        with pytest.raises(AddressError, match="its rows are resid_pre.0, resid_post.0"):
            lens.row(wrong)


def test_the_norm_is_recomputed_at_every_layer():
    """The twin: with the final scale at every layer, the first row is another distribution."""
    model = zoo.build(zoo.BACKENDS[0])
    tokens = zoo.RAGGED[0]
    weights = zoo.plain_weights(model)
    states = states_of(model, tokens)
    first, last = states[0][-1], states[-1][-1]
    frozen_scale = (last - last.mean()).pow(2).mean().add(zoo.EPS).sqrt()
    normed = (first - first.mean()) / frozen_scale * weights["gain"] + weights["shift"]
    frozen = normed @ weights["W_U"] + weights["b_U"]
    found = lens_on(model, [tokens]).logits(layer="embed")[0, 0]
    assert (found - frozen).abs().max() > 0.1


# Quantities


@pytest.mark.parametrize("blocks", ["one block", "a row at a time"])
@backends
def test_every_quantity_is_the_slow_reference(backend, blocks, monkeypatch):
    if blocks == "a row at a time":
        monkeypatch.setattr(unembed, "CELLS", 1)
    model = zoo.build(backend)
    lens = lens_on(model)
    found = lens.measure(*quantities.SCALARS, tokens=[7, 8, 9])
    for number, tokens in enumerate(zoo.RAGGED):
        rows = slow_distributions(model, tokens)
        for row, distributions in enumerate(rows):
            for pos, q in enumerate(distributions):
                p = rows[-1][pos]
                token = 7 + number
                expected = {
                    "entropy": reference.entropy(q),
                    "kl": reference.kl(p, q),
                    "prob": q[token],
                    "rank": sum(x > q[token] for x in q),
                    "cross_entropy": -math.log(q[tokens[pos + 1]])
                    if pos + 1 < len(tokens)
                    else math.nan,
                }
                for name, value in expected.items():
                    cell = float(found[name].values[row, number, pos])
                    assert cell == pytest.approx(value, abs=1e-10, nan_ok=True), (name, row, pos)
        assert all(r.values[:, number, len(tokens) :].isnan().all() for r in found.values())


@backends
def test_asked_together_or_apart_quantities_are_the_same(backend):
    model = zoo.build(backend)
    together = lens_on(model).measure(*quantities.SCALARS, top=4)
    lens = lens_on(model)
    apart = {
        "entropy": lens.entropy,
        "kl": lens.kl,
        "cross_entropy": lens.cross_entropy,
        "prob": lens.prob(),
        "rank": lens.rank(),
        "top_tokens": lens.top_tokens(4),
    }
    for name, result in apart.items():
        assert_close(together[name].values, result.values, 1e-12)


def test_several_quantities_cost_one_forward_pass_and_one_unembedding(monkeypatch):
    model = zoo.build(zoo.BACKENDS[0])
    lens = lens_on(model)
    calls = {"forward": 0, "project": 0}

    def counted(cls, name):
        original = getattr(cls, name)

        def call(self, *args, **kwargs):
            calls[name] += 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(cls, name, call)

    counted(rp.ModelView, "forward")
    counted(unembed.Unembedding, "project")
    lens.measure("kl", "entropy", top=10)
    assert calls == {"forward": 1, "project": 3 + 1}  # three rows, and the check of the last
    lens.prob(3)
    assert calls["forward"] == 1
    before = dict(calls)
    assert lens.kl is lens.kl
    assert lens.entropy is not None and lens.cross_entropy is not None
    assert calls["project"] == before["project"] + 3


@pytest.mark.parametrize("k", [1, 3, 10, 50])
def test_top_tokens_are_the_largest(k):
    model = zoo.build(zoo.BACKENDS[0])
    lens = lens_on(model)
    top = lens.top_tokens(k)
    for row, label in enumerate(lens.labels):
        logits = lens.logits(layer=label, positions=None)
        values, ids = logits.topk(k, -1)
        real = ~logits[..., 0].isnan()
        assert torch.equal(top.ids[row][real], ids[real])
        assert_close(top.logits[row][real], values[real])
        assert_close(top.values[row][real], logits.softmax(-1).gather(-1, ids)[real])
        assert (top.ids[row][~real] == -1).all()


@pytest.mark.parametrize("d_vocab", [63, 64, 1000, 4099])
def test_the_largest_by_blocks_are_the_largest(d_vocab):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, d_vocab, generator=generator, dtype=torch.float64)
    logits[:, -1] = 9.0  # behind the last whole block
    for k in (1, 2, 10, 63):
        values, ids = quantities.largest(logits, k)
        expected = logits.topk(k, -1)
        assert torch.equal(values, expected.values) and torch.equal(ids, expected.indices)


def test_top_tokens_give_texts():
    lens = lens_on(zoo.text_model(zoo.BACKENDS[0]), ["The dog saw the cat", "Tom"])
    top = lens.top_tokens(2)
    texts = top.tokens(layer="resid_post.2", pos=-1)
    assert len(texts) == 2 and all(isinstance(t, str) for row in texts for t in row)
    frame = top.to_frame()
    assert list(frame.columns[:6]) == ["layer", "prompt", "position", "token", "rank", "top_token"]
    assert len(frame) == 4 * sum(lens.run.prompts.lengths) * 2
    assert frame["top_token"].notna().all()


def test_a_probability_without_a_token_is_that_of_the_models_own_choice():
    model = zoo.build(zoo.BACKENDS[0])
    lens = lens_on(model)
    prob = lens.prob()
    last = lens.logits(layer=lens.labels[-1], positions=None)
    real = ~last[..., 0].isnan()
    assert_close(prob.values[-1][real], last.softmax(-1).amax(-1)[real])
    assert (lens.rank().values[-1][real] == 0).all()


def test_a_softcap_is_applied_at_every_row():
    for backend in zoo.BACKENDS:
        model = zoo.softcapped(backend)
        lens = lens_on(model)
        for label in lens.labels:
            logits = lens.logits(layer=label, positions=None)
            assert float(logits.nan_to_num().abs().max()) <= zoo.SOFTCAP
        tokens = zoo.RAGGED[0]
        if backend == "hooked":
            rows = slow_distributions(model, tokens, softcap=zoo.SOFTCAP)
            expected = [list(map(reference.kl, rows[-1], row)) for row in rows]
            assert_close(lens.kl.values[:, 0], torch.tensor(expected, dtype=torch.float64))


def test_the_kl_of_the_last_row_is_zero():
    kl = lens_on(zoo.build(zoo.BACKENDS[0])).kl
    assert (kl.values[-1].nan_to_num(0) == 0).all()
    assert float(kl.values[:-1].nan_to_num(1).min()) > 0


# Two readouts


def test_distances_are_the_slow_reference_and_keep_their_bounds():
    model = zoo.build(zoo.BACKENDS[0])
    left = lens_on(model, [zoo.RAGGED[0]])
    other = zoo.fresh(zoo.BACKENDS[0])
    zoo.randomise(other, seed=5)
    right = lens_on(other, [zoo.RAGGED[0]])
    js, tv = left.js(right), left.total_variation(right)
    p, q = slow_distributions(model, zoo.RAGGED[0]), slow_distributions(other, zoo.RAGGED[0])
    for row in range(4):
        for pos in range(len(zoo.RAGGED[0])):
            expected = reference.jensen_shannon(p[row][pos], q[row][pos])
            assert float(js.values[row, 0, pos]) == pytest.approx(expected, abs=1e-10)
            expected = reference.total_variation(p[row][pos], q[row][pos])
            assert float(tv.values[row, 0, pos]) == pytest.approx(expected, abs=1e-10)
    assert_close(js.values, right.js(left).values)
    assert float(left.js(left).values.max()) < 1e-15
    assert (left.total_variation(left).values == 0).all()


@pytest.mark.parametrize("scale", [1.0, 100.0, 1e4])
def test_distances_of_far_distributions_stay_in_bounds(scale):
    generator = torch.Generator().manual_seed(1)
    z = scale * torch.randn(2, 64, 100, generator=generator)
    js, tv = quantities.jensen_shannon(*z), quantities.total_variation(*z)
    assert float(js.min()) >= 0 and float(js.max()) <= math.log(2)
    assert float(tv.min()) >= 0 and float(tv.max()) <= 1
    if scale == 1e4:
        assert float(js.max()) == pytest.approx(math.log(2), abs=1e-6)
        assert float(tv.max()) == pytest.approx(1, abs=1e-6)


def test_readouts_of_other_prompts_are_not_compared():
    model = zoo.build(zoo.BACKENDS[0])
    left = lens_on(model)
    with pytest.raises(LensMismatchError, match="their prompts differ"):
        left.js(lens_on(model, [[1, 2]]))
    with pytest.raises(LensMismatchError, match="their rows differ"):
        left.total_variation(lens_on(model, mid=True))


def test_the_marginal_bias_is_the_kl_of_the_means():
    model = zoo.build(zoo.BACKENDS[0])
    found = lens_on(model).marginal_bias()
    rows = [slow_distributions(model, tokens) for tokens in zoo.RAGGED]
    means = []
    for row in range(4):
        every = [q for prompt in rows for q in prompt[row]]
        means.append([math.fsum(q[t] for q in every) / len(every) for t in range(zoo.D_VOCAB)])
    expected = [reference.kl(means[-1], mean) for mean in means]
    assert_close(found.values, torch.tensor(expected, dtype=torch.float64))
    assert found.axis("layer").labels[0] == "resid_pre.0" and found.unit == "nats"
    assert "mean over 16 tokens" in found.provenance.plan


# The run


@backends
def test_a_small_bound_on_memory_changes_nothing(backend):
    model = zoo.build(backend)
    small = rp.capture(model, zoo.RAGGED, max_bytes=1)
    lens = rp.logit_lens(small)
    whole = lens_on(model)
    assert_close(lens.kl.values, whole.kl.values)
    assert_close(lens.top_tokens(3).values, whole.top_tokens(3).values)
    assert "chunks" not in lens._memo and "chunks" in whole._memo


@backends
def test_a_cache_of_the_caller_is_read(backend):
    model = zoo.build(backend)
    tokens = torch.tensor([zoo.RAGGED[0], zoo.RAGGED[0][::-1]])
    _, cache = model.run_with_cache(tokens)
    lens = rp.logit_lens(rp.capture(model, tokens, cache=cache))
    assert_close(lens.kl.values, lens_on(model, tokens).kl.values)
    partial = {k: v for k, v in cache.items() if "1.hook_resid_post" not in k}
    partial = {k: v for k, v in partial.items() if "2.hook_resid_pre" not in k}
    lens = rp.logit_lens(rp.capture(model, tokens, cache=partial))
    if backend == "hooked":
        with pytest.raises(CacheMismatchError, match="lacks resid_post.1"):
            lens.kl  # noqa: B018


@backends
def test_left_padding_and_batching_change_nothing(backend):
    model = zoo.build(backend)
    width = max(map(len, zoo.RAGGED))
    padded = torch.tensor([[0] * (width - len(row)) + row for row in zoo.RAGGED])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in zoo.RAGGED])
    left = rp.logit_lens(rp.capture(model, padded, mask=mask))
    batch = lens_on(model)
    assert_close(left.kl.values, batch.kl.values)
    for row, tokens in enumerate(zoo.RAGGED):
        alone = lens_on(model, [tokens])
        assert_close(alone.kl.values[:, 0], batch.kl.values[:, row, : len(tokens)])


@backends
def test_the_model_is_left_as_it_was(backend):
    model = zoo.fresh(backend)
    zoo.plain_logits(model, zoo.RAGGED[0])  # a bridge sets itself up on its first forward pass
    before = zoo.snapshot(model)
    lens = lens_on(model, mid=not model.cfg.parallel_attn_mlp)
    lens.measure(*quantities.SCALARS, top=3)
    lens.logits(layer="embed")
    lens.js(lens)
    lens.marginal_bias()
    assert list(zoo.differences(before, zoo.snapshot(model))) == []


def test_a_model_that_changed_is_read_again():
    model = zoo.fresh(zoo.BACKENDS[0])
    lens = lens_on(model)
    before = lens.kl.values.clone()
    with torch.no_grad():
        model.unembed.W_U.mul_(2)
    with pytest.raises(ModelChangedError, match="unembed.* has other values"):
        lens.kl  # noqa: B018
    assert (lens_on(model).kl.values - before).abs().nan_to_num().max() > 0.01


def test_a_hook_that_edits_the_last_state_behind_us_is_refused():
    model = zoo.fresh(zoo.BACKENDS[0])
    lens = lens_on(model)

    def edit(module, inputs, output):
        return output + 3.0

    # Seen as a library's own, so that it is noticed by what it does.
    handle = model.unembed.register_forward_hook(zoo.watching(edit))
    try:
        with pytest.raises(ReadoutMismatchError, match="differ from the model's logits"):
            lens.kl  # noqa: B018
    finally:
        handle.remove()
    assert lens.kl.values.isfinite().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@backends
def test_low_precision_is_read_in_float32(backend, dtype, monkeypatch):
    monkeypatch.setattr(unembed, "_VOCABULARY_BLOCK", 7)
    model = zoo.build(backend, dtype=dtype)
    lens = lens_on(model)
    kl = lens.kl
    assert kl.values.dtype == torch.float32
    assert float((kl.values - lens_on(zoo.build(backend)).kl.values).abs().nan_to_num().max()) < 0.3
    last = lens.logits(layer="resid_post.2", positions=None)
    assert last.dtype == dtype
    state = rp.capture(model, zoo.RAGGED).fetch(rp.parse("resid_post.0")).float()
    expected = lens.run.view.readout(state[:, 0])
    assert_close(lens.logits(layer="resid_post.0", positions=0)[:, 0], expected.detach(), 1e-4)


def test_selecting_and_laying_out():
    lens = lens_on(zoo.build(zoo.BACKENDS[0]))
    kl = lens.kl
    last = kl.sel(pos=-1)
    assert_close(last[:, 1], kl.values[:, 1, len(zoo.RAGGED[1]) - 1])
    assert_close(kl.sel(layer="resid_pre.0", pos=-1), last[0])
    with pytest.raises(KeyError, match="not in every prompt"):
        kl.sel(pos=-4)
    frame = kl.to_frame()
    assert list(frame.columns) == ["layer", "prompt", "position", "token", "value"]
    assert len(frame) == 4 * sum(map(len, zoo.RAGGED))
    assert type(kl).from_json(kl.to_json()).values.shape == kl.values.shape
    top = lens.top_tokens(2)
    assert torch.equal(type(top).from_json(top.to_json()).ids, top.ids)


def test_wrong_arguments_are_named():
    model = zoo.build(zoo.BACKENDS[0])
    lens = lens_on(model)
    with pytest.raises(ValueError, match="no quantity of a lens"):
        lens.measure("perplexity")
    with pytest.raises(ValueError, match="nothing was asked for"):
        lens.measure()
    for k in (-1, zoo.D_VOCAB + 1):
        with pytest.raises(ValueError, match="number of top tokens"):
            lens.top_tokens(k)
    with pytest.raises(TokenError):
        lens.prob(zoo.D_VOCAB)
    with pytest.raises(PositionError):
        lens.logits(layer="embed", positions=99)
    with pytest.raises(ValueError, match="stride"):
        lens_on(model, stride=0)


# Field cases


@pytest.mark.parametrize("norm", ["LN", "RMS"])
@backends
def test_D01_the_last_row_is_the_models_output_unfolded(backend, norm):
    model = zoo.build(backend, zoo.Cell(norm=norm))
    lens = lens_on(model)
    expected = rp.capture(model, zoo.RAGGED).logits_at(-1)
    assert torch.equal(lens.logits(layer="resid_post.2"), expected)


def test_L01_and_L06_the_scale_is_each_layers_own():
    """Multiplying a state by a constant leaves a recomputed norm's prediction as it is."""
    model = zoo.build(zoo.BACKENDS[0])
    lens = lens_on(model, [zoo.RAGGED[0]])
    weights = zoo.plain_weights(model)
    embeds = states_of(model, zoo.RAGGED[0])[0]
    frozen = reference.logits(states_of(model, zoo.RAGGED[0])[-1][0], weights, "LN", zoo.EPS)
    assert frozen.shape == (zoo.D_VOCAB,)
    scaled = [reference.logits(1e3 * x, weights, "LN", 0.0) for x in embeds]
    found = lens.logits(layer="embed", positions=None)[0]
    assert_close(found, torch.stack(scaled), 0.2)  # eps alone tells them apart
    assert_close(found.argmax(-1), torch.stack(scaled).argmax(-1))
    unnormed = embeds @ weights["W_U"] + weights["b_U"]
    assert (found - unnormed).abs().max() > 0.1


@pytest.mark.parametrize("folded", [False, True], ids=["raw", "folded"])
@backends
def test_L02_and_L04_the_last_layer_is_normed_once(backend, folded):
    model = zoo.build(backend, zoo.Cell(folded=folded))
    tokens = zoo.RAGGED[0]
    last = lens_on(model, [tokens]).logits(layer="resid_post.2", positions=None)[0]
    assert_close(last, zoo.plain_logits(model, tokens))


def test_L04_weight_processing_changes_no_prediction_in_the_middle():
    config = zoo.gpt2_config()
    original = zoo.hugging_face(config)
    raw, folded = (zoo.bridge(original, folded=f) for f in (False, True))
    left, right = lens_on(raw), lens_on(folded)
    assert_close(left.kl.values, right.kl.values, 1e-6)  # folding adds float32 zeros
    assert float(left.js(right).values.nan_to_num().max()) < 1e-8


def test_L07_a_lens_has_one_row_more_than_the_model_has_layers():
    lens = lens_on(zoo.build(zoo.BACKENDS[0]))
    assert lens.labels == ("resid_pre.0", "resid_post.0", "resid_post.1", "resid_post.2")
    assert lens.kl.axis("layer").labels == lens.labels


def test_L08_position_zero_is_not_the_last():
    lens = lens_on(
        zoo.text_model(zoo.BACKENDS[0]),
        "On January",
    )
    first = lens.logits(layer="resid_post.2", positions=0)
    last = lens.logits(layer="resid_post.2", positions=-1)
    assert (first - last).abs().max() > 0.1
    entropy = lens.entropy
    assert float((entropy.sel(pos=0) - entropy.sel(pos=-1)).abs().min()) > 0


@pytest.mark.parametrize("stride", [1, 2, 3, 100])
def test_L10_a_stride_keeps_the_last_layer(stride):
    lens = lens_on(zoo.build(zoo.BACKENDS[0]), stride=stride)
    assert lens.labels[0] == "resid_pre.0" and lens.labels[-1] == "resid_post.2"
    assert len(set(lens.labels)) == len(lens.labels)


def test_L13_plain_strings_are_prompts():
    lens = lens_on(zoo.text_model(zoo.BACKENDS[0]), ["The dog", "Tom and Anna sat"])
    assert lens.kl.values.shape[1] == 2
    with pytest.raises(TypeError, match="a lens reads a run, got str"):
        zoo_call_without_checks(rp.logit_lens, "The dog")


def zoo_call_without_checks(function, *args):
    """Call as a user does, without the checks that tests put on annotations."""
    return getattr(function, "__wrapped__", function)(*args)


def test_L15_labels_are_clean_and_the_final_top_token_is_always_there():
    lens = lens_on(zoo.text_model(zoo.BACKENDS[0]), "François: chien; Deutsch:")
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(lens.run.prompts.token_texts[0])
    top = lens.top_tokens(1)
    assert torch.equal(
        top.ids[-1, ..., 0], lens.logits(layer="resid_post.2", positions=None).argmax(-1)
    )
    with pytest.raises(TokenError, match="tokens of"):
        lens.prob(" Hund; und")
    assert lens.prob().values.isfinite().all()  # the final top token, at every layer


def test_L16_the_result_says_which_scale_it_has():
    model = zoo.build(zoo.BACKENDS[0])
    run = rp.capture(model, zoo.RAGGED)
    lens = rp.logit_lens(run)
    assert "norm recomputed at each layer" in lens.kl.provenance.plan
    dla = rp.direct_logit_attribution(run, 3, 6)
    written = [name for name in ("embed", "pos_embed") if name in dla.components]
    parts = sum(dla.sel(component=name, pos=-1) for name in written)
    logits = lens.logits(layer="embed")[:, 0]
    assert (parts - (logits[:, 3] - logits[:, 6])).abs().max() > 0.01


def test_L17_unusual_unembedding_rows_are_not_hidden():
    model = zoo.fresh(zoo.BACKENDS[0])
    with torch.no_grad():
        model.unembed.W_U[:, 5] *= 50
    lens = lens_on(model)
    early = lens.top_tokens(1).ids[0]
    real = early >= 0
    assert ((early == 5) & real).any()
    assert float(lens.rank(3).values[0].nan_to_num().max()) > 0
    assert "Nothing is renormalised" in (readout.__doc__ or "")


@pytest.mark.full
def test_memory_does_not_grow_with_layers_times_positions_times_vocabulary():
    import resource

    config = zoo.gpt2_config(20000, n_layer=8)
    model = zoo.bridge(zoo.hugging_face(config, torch.float32))
    run = rp.capture(model, torch.arange(1024).reshape(16, 64) % 20000, max_bytes=2**26)
    lens = rp.logit_lens(run)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lens.measure("kl", "entropy", top=10)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    everything = 9 * 1024 * 20000 * 4
    assert grown < everything / 4
