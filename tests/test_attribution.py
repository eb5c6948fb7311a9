"""Direct logit attribution: the rows are the model's logit difference, and each row is right."""

import dataclasses
import json
import re

import pytest
import torch
import zoo
from reference.attribution import attribute as reference

import resid_patching as rp
from resid_patching.errors import (
    AnswerWarning,
    GapError,
    HookNotFiredError,
    ModelChangedError,
    PositionError,
    ResultFormatError,
    StreamMismatchError,
    TokenError,
)
from resid_patching.models.view import ModelView, Norm

ANSWERS, FOILS = [3, 4, 5], [6, 7, 9]

backends = pytest.mark.parametrize("backend", zoo.BACKENDS)
cells = pytest.mark.parametrize("cell", zoo.MATRIX, ids=str)
grains = pytest.mark.parametrize("by", zoo.GRAINS)
raw = zoo.Cell()


def assert_close(left, right, tolerance):
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance, equal_nan=True)


def largest(tensor):
    return float(tensor.abs().nan_to_num().max())


def attribute(model, prompts=zoo.RAGGED, answer=ANSWERS, foil=FOILS, **options):
    return rp.direct_logit_attribution(rp.capture(model, prompts), answer, foil, **options)


def own_differences(model, answers=ANSWERS, foils=FOILS):
    """The model's logit differences [batch, pos], each prompt run alone and by nothing of ours."""
    width = max(map(len, zoo.RAGGED))
    found = torch.full((len(zoo.RAGGED), width), torch.nan, dtype=torch.float64)
    for row, tokens in enumerate(zoo.RAGGED):
        logits = zoo.plain_logits(model, tokens)
        other = logits.mean(-1) if foils is None else logits[:, foils[row]]
        found[row, : len(tokens)] = logits[:, answers[row]] - other
    return found


# The rows sum to the logit difference


@grains
@cells
@backends
def test_rows_sum_to_the_models_logit_difference_at_every_position(backend, cell, by):
    model = zoo.build(backend, cell)
    dla = attribute(model, by=by, positions=None)
    expected = own_differences(model)
    assert_close(dla.total, expected, 1e-10)
    assert_close(dla.model_value, expected, 1e-10)
    assert largest(dla.gap) < 1e-10
    assert largest(dla.values) > 0.1


@pytest.mark.parametrize("folded", [False, True], ids=["raw", "folded"])
@pytest.mark.parametrize("name", zoo.EXACT)
def test_rows_sum_to_the_logit_difference_on_many_architectures(name, folded):
    model = zoo.named(name, folded=folded)
    expected = own_differences(model)
    # GPT-Neo and MPT mix values with float32 patterns, which differ with the width of a batch.
    same_run = 1e-6 if name in ("neo", "mpt") else 1e-10
    for by in zoo.GRAINS:
        dla = attribute(model, by=by, positions=None)
        assert largest(dla.gap) < 1e-10
        assert_close(dla.total, expected, same_run)


@pytest.mark.skipif(not zoo.HAS_HOOKED, reason="HookedTransformer left in TransformerLens 4")
@pytest.mark.parametrize(
    "changes",
    [
        {"attn_only": True},
        {"normalization_type": None},
        {"positional_embedding_type": "rotary", "rotary_dim": 8},
        {"positional_embedding_type": "shortformer"},
        {"positional_embedding_type": "alibi"},
        {"gated_mlp": True},
        {"use_attn_result": True, "use_split_qkv_input": True, "use_hook_mlp_in": True},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_rows_sum_to_the_logit_difference_on_variants_of_hooked_transformer(changes):
    model = zoo.hooked_variant(**changes)
    expected = own_differences(model)
    for by in zoo.GRAINS:
        dla = attribute(model, by=by, positions=None)
        assert_close(dla.total, expected, 1e-10)
        assert ("pos_embed" in dla.components) == ("positional_embedding_type" not in changes)


@backends
def test_without_its_constants_a_sum_misses_the_logit_difference_by_exactly_them(backend):
    dla = attribute(zoo.build(backend, zoo.Cell(folded=True)), positions=None)
    parts = torch.stack([dla.sel(component=c) for c in dla.components if c not in dla.constants])
    missing = dla.model_value - parts.sum(0)
    assert_close(missing, dla.sel(component="unembed.bias"), 1e-10)
    assert largest(missing) > 0.1
    assert largest(dla.sel(component="ln_final.bias")) == 0


@pytest.mark.parametrize("plant", ["no centring", "other scale", "no gain", "no b_U"])
@backends
def test_a_planted_error_is_refused_and_not_returned(backend, plant, monkeypatch):
    model = zoo.build(backend)
    run = rp.capture(model, zoo.RAGGED)
    if plant == "no centring":
        monkeypatch.setattr(Norm, "fold", lambda self, direction: direction * self.gain)
    elif plant == "other scale":
        scale = Norm.scale
        monkeypatch.setattr(Norm, "scale", lambda self, x: scale(self, x) * 1.01)
    elif plant == "no gain":
        monkeypatch.setattr(
            Norm, "fold", lambda self, direction: direction - direction.mean(-1, keepdim=True)
        )
    else:
        model = zoo.build(backend, zoo.Cell(folded=True))
        run = rp.capture(model, zoo.RAGGED)
        monkeypatch.setattr(
            ModelView, "unembed_bias", lambda self, ids: torch.zeros(len(ids), dtype=torch.float64)
        )
    with pytest.raises(GapError, match="nothing is returned"):
        rp.direct_logit_attribution(run, ANSWERS, FOILS)


# Each row is what the slow reference says


def compare_with_reference(model, cell, by, positions, weights=None, **changes):
    """The largest difference to the reference over all prompts and the given positions."""
    dla = attribute(model, by=by, positions=None)
    weights = weights or zoo.plain_weights(model)
    worst = 0.0
    for row, tokens in enumerate(zoo.RAGGED):
        cache = zoo.plain_cache(model, tokens)
        for position in positions or range(len(tokens)):
            place = position % len(tokens)
            settings = {"by": by, "norm": cell.norm, "eps": zoo.EPS, **changes}
            expected = reference(cache, weights, place, ANSWERS[row], FOILS[row], **settings)
            assert tuple(expected) == dla.components
            rows = torch.tensor(list(expected.values()), dtype=torch.float64)
            worst = max(worst, largest(dla.values[:, row, place] - rows))
    return worst


@grains
@cells
@backends
def test_every_row_agrees_with_the_reference(backend, cell, by):
    model = zoo.build(backend, cell)
    assert compare_with_reference(model, cell, by, positions=[-1, 1]) < 1e-10


@grains
@backends
def test_every_row_agrees_with_the_reference_at_every_position(backend, by):
    model = zoo.build(backend) if backend == "hooked" else zoo.named("gpt2_untied")
    assert compare_with_reference(model, raw, by, positions=None) < 1e-10


@pytest.mark.parametrize(
    ("what", "by"),
    [
        ("b_U", "component"),
        ("shift", "component"),
        ("gain", "component"),
        ("b_O", "head"),
        ("b_out", "neuron"),
        ("W_O", "head"),
        ("W_out", "neuron"),
    ],
)
@backends
def test_the_reference_notices_a_missing_weight(backend, what, by):
    model = zoo.named("phi") if backend == "bridge" else zoo.build(backend)
    weights = zoo.plain_weights(model)
    assert compare_with_reference(model, raw, by, [-1], weights) < 1e-10
    weights[what] = torch.zeros_like(weights[what])
    assert compare_with_reference(model, raw, by, [-1], weights) > 1e-2


@pytest.mark.parametrize("change", [{"norm": "RMS"}, {"eps": 1e-5}], ids=["no centring", "eps"])
@backends
def test_the_reference_notices_another_norm(backend, change):
    assert compare_with_reference(zoo.build(backend), raw, "head", [-1], **change) > 1e-5


@backends
def test_the_norms_scale_is_that_of_the_whole_stream_and_one_for_all_parts(backend):
    """Norming each part afresh, as a logit lens does, gives other rows."""
    model = zoo.build(backend)
    dla = attribute(model, by="head")
    vectors = rp.decompose(rp.capture(model, zoo.RAGGED), by="head").vectors(-1)
    norm = ModelView(model).final_norm
    W_U = ModelView(model).W_U.detach()
    directions = (W_U[:, ANSWERS] - W_U[:, FOILS]).T
    afresh = torch.einsum("cbnm,bm->cbn", norm(vectors) - norm.bias, directions)
    assert largest(afresh - dla.values[:-2]) > 0.1


# Answers, foils, softcap


@grains
@backends
def test_without_a_foil_the_vocabulary_mean_is_scored_against_and_named(backend, by):
    model = zoo.build(backend)
    dla = attribute(model, foil=None, by=by, positions=None)
    assert_close(dla.total, own_differences(model, foils=None), 1e-10)
    assert dla.foils is None and dla.foil_texts is None
    assert "vocabulary mean" in repr(dla)
    assert "vocabulary mean" not in repr(attribute(model))


@backends
def test_scores_against_the_mean_are_the_same_for_a_centred_unembedding(backend):
    """Folding a bridge starts from the same weights, so only the representation differs."""
    raw_model = zoo.named("gpt2_untied")
    folded = zoo.named("gpt2_untied", folded=True)
    mean = [attribute(m, foil=None, positions=None).total for m in (raw_model, folded)]
    assert_close(*mean, 1e-6)
    logits = [zoo.plain_logits(m, zoo.RAGGED[0])[:, 3] for m in (raw_model, folded)]
    assert largest(logits[0] - logits[1]) > 0.01


@pytest.mark.parametrize("by", ["component", "head"])
@backends
def test_under_a_softcap_the_rows_sum_to_the_logit_before_it(backend, by):
    model = zoo.softcapped(backend)
    if backend == "bridge" and by == "head":
        by = "component"  # Gemma-2 norms what its heads write
    before = []
    handle = model.unembed.register_forward_hook(lambda m, i, o: before.append(o.detach()))
    final = zoo.plain_logits(model, zoo.RAGGED[0])
    handle.remove()
    uncapped = before[0][0]
    assert_close(zoo.SOFTCAP * torch.tanh(uncapped / zoo.SOFTCAP), final, 1e-6)

    dla = attribute(model, zoo.RAGGED[0], 3, 6, by=by, positions=None)
    assert_close(dla.total[0], uncapped[:, 3] - uncapped[:, 6], 1e-10)
    assert_close(dla.capped_value[0], final[:, 3] - final[:, 6], 1e-10)
    assert largest(dla.total - dla.capped_value) > 0.01
    assert "before the output softcap of 2" in repr(dla)


@backends
def test_without_a_softcap_there_is_no_capped_value(backend):
    assert attribute(zoo.build(backend)).capped_value is None


@pytest.mark.parametrize("form", ["list", "tuple", "tensor", "one id", "zero-dimensional tensor"])
@backends
def test_answers_may_be_one_or_one_for_each_prompt(backend, form):
    forms = {
        "list": (ANSWERS, FOILS),
        "tuple": (tuple(ANSWERS), tuple(FOILS)),
        "tensor": (torch.tensor(ANSWERS), torch.tensor(FOILS)),
        "one id": (3, 6),
        "zero-dimensional tensor": (torch.tensor(3), torch.tensor(6)),
    }
    answer, foil = forms[form]
    dla = attribute(zoo.build(backend), answer=answer, foil=foil)
    same = "one id" in form or "zero" in form
    assert dla.answers == ((3, 3, 3) if same else tuple(ANSWERS))
    for row, tokens in enumerate(zoo.RAGGED):
        alone = attribute(zoo.build(backend), tokens, dla.answers[row], dla.foils[row])
        assert_close(dla.values[:, row], alone.values[:, 0], 1e-12)


@pytest.mark.parametrize(
    ("answer", "foil", "message"),
    [
        ([3, 4], FOILS, "2 answers were given for 3 prompts"),
        (ANSWERS, [6, 7, 9, 1], "4 foils were given for 3 prompts"),
        (ANSWERS, [6, 4, 9], "prompt 1: answer and foil are the same token 4"),
        (zoo.D_VOCAB, 6, "answer id 50 is outside the vocabulary of 50"),
        (3, -1, "foil id -1 is outside"),
        (True, 6, "the answer is a text"),
        (torch.tensor([[1, 2, 3]]), 6, "1 answers were given"),
    ],
)
@backends
def test_a_wrong_answer_or_foil_is_named(backend, answer, foil, message):
    with pytest.raises(TokenError, match=re.escape(message)):
        attribute(zoo.build(backend), answer=answer, foil=foil)


@backends
def test_texts_as_answers_are_the_same_as_their_ids(backend):
    model = zoo.text_model(backend)
    mary, john = (model.to_single_token(text) for text in (" Mary", " John"))
    texts = attribute(model, ["When Mary", "When John and Mary"], " Mary", [" John", john])
    ids = attribute(model, ["When Mary", "When John and Mary"], mary, john)
    assert torch.equal(texts.values, ids.values)
    assert texts.answer_texts == (" Mary", " Mary") and texts.foil_texts == (" John", " John")


@backends
def test_an_answer_without_its_space_warns_only_where_it_is_another_token(backend):
    model = zoo.text_model(backend)
    with pytest.warns(AnswerWarning) as caught:
        attribute(model, "3 + 5 =", "8", " Mary")
    ids = [model.tokenizer(t, add_special_tokens=False)["input_ids"] for t in ("8", " 8")]
    assert all(str(token) in str(caught[0].message) for (token,) in ids)


@pytest.mark.filterwarnings("error")
@backends
def test_an_answer_with_its_space_or_after_a_space_does_not_warn(backend):
    model = zoo.text_model(backend)
    attribute(model, "3 + 5 =", " 8", " Mary")
    with pytest.warns(AnswerWarning, match="end in a space"):
        attribute(model, "3 + 5 = ", "8", " Mary")
    attribute(model, model.to_tokens("3 + 5 ="), "8", " Mary")
    attribute(model, "When Mary gave a", ".", " Mary")


# Positions


@pytest.mark.parametrize("position", [0, 2, -1, -3])
@backends
def test_a_position_is_that_of_every_row_counted_in_real_tokens(backend, position):
    model = zoo.build(backend)
    everywhere = attribute(model, positions=None)
    dla = attribute(model, positions=position)
    for row, tokens in enumerate(zoo.RAGGED):
        place = position % len(tokens)
        assert_close(dla.values[:, row, 0], everywhere.values[:, row, place], 1e-12)
        assert dla.position_index[row].tolist() == [place]
    assert_close(dla.sel(pos=position), dla.values[..., 0], 0)


@pytest.mark.parametrize("make", [list, tuple, torch.tensor], ids=["list", "tuple", "tensor"])
@backends
def test_positions_may_be_one_for_each_row(backend, make):
    model = zoo.build(backend)
    everywhere = attribute(model, positions=None)
    dla = attribute(model, positions=make([7, 0, -2]))
    for row, place in enumerate([7, 0, 3]):
        assert_close(dla.values[:, row, 0], everywhere.values[:, row, place], 1e-12)


@backends
def test_a_row_without_a_position_has_nan_there_and_no_cell_in_the_frame(backend):
    dla = attribute(zoo.build(backend), positions=None)
    lengths = [len(tokens) for tokens in zoo.RAGGED]
    for row, length in enumerate(lengths):
        assert not dla.values[:, row, :length].isnan().any()
        assert dla.values[:, row, length:].isnan().all()
        assert dla.total[row, length:].isnan().all() and dla.gap[row, length:].isnan().all()
    frame = dla.to_frame()
    assert len(frame) == len(dla.components) * sum(lengths)
    assert not frame["value"].isna().any()
    places = zip(frame["prompt"], frame["position"], strict=True)
    assert frame["token"].tolist() == [dla.token_texts[row][pos] for row, pos in places]


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (3, "position 3 was asked for, but prompt 1 has 3 tokens (0 to 2, or -3 to -1)"),
        (-4, "position -4 was asked for, but prompt 1 has 3 tokens"),
        ([0, 1], "2 positions were given for 3 prompts"),
        (torch.tensor([0.0, 1.5, 1.0]), "positions are whole numbers; got [0.0, 1.5, 1.0]"),
        (True, "positions are one whole number"),
    ],
)
@backends
def test_a_wrong_position_is_named(backend, positions, message):
    with pytest.raises(PositionError, match=re.escape(message)):
        attribute(zoo.build(backend), positions=positions)


# Along a direction


def direction_of(model, seed=0, n=None):
    generator = torch.Generator().manual_seed(seed)
    shape = (zoo.D_MODEL,) if n is None else (n, zoo.D_MODEL)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def along(model, direction, **options):
    return rp.direct_logit_attribution(
        rp.capture(model, zoo.RAGGED), direction=direction, **options
    )


def normed_states(model, tokens):
    """What the model's own unembedding is given [pos, d_model]."""
    seen = []
    handle = model.unembed.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    try:
        zoo.plain_logits(model, tokens)
    finally:
        handle.remove()
    return seen[-1][0].detach()


@grains
@cells
@backends
def test_rows_along_a_direction_sum_to_that_of_the_models_normed_state(backend, cell, by):
    model = zoo.build(backend, cell)
    direction = direction_of(model, n=len(zoo.RAGGED))
    dla = along(model, direction, by=by, positions=None)
    assert dla.unit == "dot product" and dla.constants == ("ln_final.bias",)
    assert dla.components[-1] == "ln_final.bias" and "unembed.bias" not in dla.components
    for row, tokens in enumerate(zoo.RAGGED):
        expected = normed_states(model, tokens) @ direction[row]
        assert_close(dla.total[row, : len(tokens)], expected, 1e-10)
        assert_close(dla.model_value[row, : len(tokens)], expected, 1e-10)
        assert dla.total[row, len(tokens) :].isnan().all()
    assert largest(dla.gap) < 1e-10 and largest(dla.values) > 0.1


@pytest.mark.parametrize("name", zoo.EXACT)
def test_rows_along_a_direction_sum_on_many_architectures(name):
    model = zoo.named(name)
    direction = direction_of(model)
    for by in zoo.GRAINS:
        dla = along(model, direction, by=by)
        assert largest(dla.gap) < 1e-10
        own = normed_states(model, zoo.RAGGED[0])[-1] @ direction
        assert_close(dla.total[0, 0], own, 1e-6 if name in ("neo", "mpt") else 1e-10)


@grains
@backends
def test_along_an_answer_less_its_foil_a_row_is_that_of_these_tokens(backend, by):
    for cell in (zoo.Cell(), zoo.Cell("RMS", folded=True)):
        model = zoo.build(backend, cell)
        W_U = zoo.plain_weights(model)["W_U"]
        tokens = attribute(model, by=by)
        found = along(model, (W_U[:, ANSWERS] - W_U[:, FOILS]).T, by=by)
        assert_close(found.values, tokens.values[:-1], 1e-10)
        missing = tokens.sel(component="unembed.bias")
        assert_close(found.model_value, tokens.model_value - missing, 1e-10)


@backends
def test_rows_are_linear_in_the_direction(backend):
    model = zoo.build(backend)
    one, two = direction_of(model, 1), direction_of(model, 2)
    rows = [along(model, direction).values for direction in (one, two, 3 * one - two)]
    assert_close(rows[2], 3 * rows[0] - rows[1], 1e-10)
    tiled = along(model, one.expand(len(zoo.RAGGED), -1))
    assert_close(tiled.values, rows[0], 1e-12)


@pytest.mark.parametrize("size", [1.0, 1e-6])
@pytest.mark.parametrize("plant", ["no centring", "other scale", "no beta"])
@backends
def test_a_planted_error_along_a_direction_is_refused(backend, plant, size, monkeypatch):
    model = zoo.build(backend)
    run = rp.capture(model, zoo.RAGGED)
    if plant == "no centring":
        monkeypatch.setattr(Norm, "fold", lambda self, direction: direction * self.gain)
    elif plant == "other scale":
        scale = Norm.scale
        monkeypatch.setattr(Norm, "scale", lambda self, x: scale(self, x) * 1.01)
    else:
        norm = ModelView.final_norm.fget
        monkeypatch.setattr(
            ModelView,
            "final_norm",
            property(lambda view: dataclasses.replace(norm(view), bias=0 * norm(view).bias)),
        )
    with pytest.raises(GapError, match="nothing is returned"):
        rp.direct_logit_attribution(run, direction=size * direction_of(model))


@backends
def test_a_hook_behind_the_final_norm_is_noticed_along_a_direction(backend):
    model = zoo.fresh(backend)
    handle = model.unembed.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.1,))
    try:
        with pytest.raises((GapError, rp.errors.ReadoutMismatchError)):
            along(model, direction_of(model))
    finally:
        handle.remove()


@backends
def test_along_a_direction_a_cache_gives_what_the_model_gives(backend):
    model = zoo.build(backend)
    tokens = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
    _, cache = model.run_with_cache(tokens)
    direction = direction_of(model)
    found = [
        rp.direct_logit_attribution(rp.capture(model, tokens, **options), direction=direction)
        for options in ({}, {"cache": cache})
    ]
    assert_close(found[0].values, found[1].values, 1e-12)
    assert_close(found[0].model_value, found[1].model_value, 1e-12)


def test_a_softcap_changes_nothing_along_a_direction():
    dla = along(zoo.softcapped(zoo.BACKENDS[0]), direction_of(None))
    assert dla.capped_value is None and largest(dla.gap) < 1e-10


@pytest.mark.parametrize("backend", zoo.BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_direction_of_another_dtype_is_read_in_ours(backend, dtype):
    model = zoo.build(backend, dtype=dtype)
    dla = along(model, direction_of(model))
    assert dla.values.dtype == torch.float32 and largest(dla.values) > 0.1


def test_a_result_along_a_direction_says_so_and_survives_json():
    model = zoo.build(zoo.BACKENDS[0])
    direction = direction_of(model)
    dla = along(model, direction, by="head")
    words = f"a direction of length {float(direction.norm()):.4g} (sha256 "
    assert dla.direction.startswith(words) and words in dla.provenance.plan
    facts = dict(dla.facts())
    assert facts["score"].startswith(f"the normed last state along {words}")
    assert "the model's own dot product" in facts and "unembed" not in facts["constants"]
    assert dla.headings()["value"] == "dot product" and "se" in dla.table()
    assert words in str(dla.summary())
    again = rp.Attribution.from_json(dla.to_json())
    assert again.direction == dla.direction and torch.equal(again.values, dla.values)
    assert again.answers == () and again.foils is None
    assert not rp.compare(dla, again).values.any()
    with pytest.raises(ValueError, match="direction"):
        rp.compare(dla, along(model, 2 * direction, by="head"))
    each = along(model, direction_of(model, n=3))
    assert each.direction.startswith("one direction a prompt (sha256 ")


def test_pictures_of_a_direction_name_it_and_its_unit():
    pytest.importorskip("plotly")
    from resid_patching import plots

    dla = along(zoo.build(zoo.BACKENDS[0]), direction_of(None), by="head")
    for draw in (plots.heatmap, plots.attribution_bars, plots.accumulated):
        text = draw(dla).to_json()
        assert "a direction of length" in text and "in dot product" in text
    assert "it ends at the model's own dot product" in plots.accumulated(dla).to_json()


@pytest.mark.parametrize(
    ("direction", "message"),
    [
        (torch.ones(3), "a direction is a tensor [d_model], here [32]"),
        (torch.ones(2, 32), "or one for each prompt, [3, 32]; got [2, 32]"),
        (torch.full((32,), torch.nan), "the direction holds NaN or infinite numbers"),
    ],
)
def test_a_direction_that_is_none_is_refused(direction, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        along(zoo.build(zoo.BACKENDS[0]), direction)


def test_exactly_one_of_answer_and_direction_is_scored():
    run = rp.capture(zoo.build(zoo.BACKENDS[0]), zoo.RAGGED)
    direction = direction_of(None)
    with pytest.raises(TokenError, match="exactly one of answer and direction=; got both"):
        rp.direct_logit_attribution(run, 3, direction=direction)
    with pytest.raises(TokenError, match="exactly one of answer and direction=; got both"):
        rp.direct_logit_attribution(run, foil=3, direction=direction)
    with pytest.raises(TokenError, match="exactly one of answer and direction=; got neither"):
        rp.direct_logit_attribution(run)


# Batches


@cells
@backends
def test_a_ragged_batch_equals_its_single_runs(backend, cell):
    model = zoo.build(backend, cell)
    by = "neuron" if cell.tied else "head"
    batch = attribute(model, by=by, positions=None)
    for row, tokens in enumerate(zoo.RAGGED):
        alone = attribute(model, tokens, ANSWERS[row], FOILS[row], by=by, positions=None)
        assert_close(batch.values[:, row, : len(tokens)], alone.values[:, 0], 1e-12)
        assert_close(batch.model_value[row, : len(tokens)], alone.model_value[0], 1e-12)


TEXTS = [
    "When Mary and John went to the store, John gave a drink to",
    "The dog saw the cat",
    "After Tom and Anna sat in the park, Anna handed a book to",
    "Mary",
    "3 + 5 =",
    "the cat saw the dog; the dog saw the cat and the cat saw the",
    "John gave a drink to",
    "When Anna and the dog went to the park, the dog gave a book to Anna. After",
]


@pytest.mark.parametrize("form", ["texts", "right-padded", "left-padded"])
@pytest.mark.parametrize("kind", ["byte_level", "byte_level_left", "metaspace"])
@backends
def test_a_mixed_batch_of_eight_equals_its_single_runs(backend, kind, form):
    model = zoo.text_model(backend, kind)
    rows = [model.to_tokens(text)[0].tolist() for text in TEXTS]
    width = max(map(len, rows))
    assert len({len(row) for row in rows}) > 4
    if form == "texts":
        run = rp.capture(model, TEXTS)
    else:
        pads = [[model.tokenizer.pad_token_id] * (width - len(row)) for row in rows]
        left = form == "left-padded"
        padded = [p + row if left else row + p for p, row in zip(pads, rows, strict=True)]
        real = [[0] * len(p) + [1] * len(row) for p, row in zip(pads, rows, strict=True)]
        real = real if left else [line[::-1] for line in real]
        run = rp.capture(model, torch.tensor(padded), mask=torch.tensor(real))

    batch = rp.direct_logit_attribution(run, " Mary", " John", by="head", positions=None)
    for row, tokens in enumerate(rows):
        expected = zoo.plain_logits(model, tokens)
        mary, john = batch.answers[0], batch.foils[0]
        difference = expected[:, mary] - expected[:, john]
        assert_close(batch.model_value[row, : len(tokens)], difference, 1e-4)
        alone = attribute(model, tokens, mary, john, by="head", positions=None)
        assert_close(batch.values[:, row, : len(tokens)], alone.values[:, 0], 1e-4)


@grains
@backends
def test_chunks_of_any_size_give_the_same_numbers(backend, by):
    model = zoo.build(backend)
    prompts = zoo.RAGGED * 3
    whole = rp.direct_logit_attribution(rp.capture(model, prompts), 3, 6, by=by, positions=None)
    passes = []
    model.hook_dict["hook_embed"].add_hook(lambda tensor, hook: passes.append(len(tensor)))
    try:
        run = rp.capture(model, prompts, max_bytes=1)
        passes.clear()
        one_by_one = rp.direct_logit_attribution(run, 3, 6, by=by, positions=None)
        assert passes == [1] * 9
    finally:
        model.reset_hooks()
    assert_close(one_by_one.values, whole.values, 1e-12)
    assert_close(one_by_one.model_value, whole.model_value, 1e-12)


# TransformerLens's own attribution as a second oracle


SECOND_ORACLE = [(b, name) for b in zoo.BACKENDS for name in ("LN", "RMS")]
SECOND_ORACLE += [("bridge", "gpt2"), ("bridge", "llama_grouped")]


@pytest.mark.parametrize("unit", ["component", "head"])
@pytest.mark.parametrize(("backend", "name"), SECOND_ORACLE)
def test_agrees_with_transformer_lens_once_its_missing_constants_are_added(backend, name, unit):
    from transformer_lens.tools.analysis import direct_logit_attribution

    if name in ("LN", "RMS"):
        model = zoo.build(backend, zoo.Cell(norm=name, folded=True))
    else:
        model = zoo.named(name, folded=True)
    tokens = torch.tensor([zoo.RAGGED[0], zoo.RAGGED[0][::-1]])
    with torch.no_grad():
        theirs = direct_logit_attribution(
            model, tokens, torch.tensor([3, 4]), torch.tensor([6, 7]), unit=unit
        )
    ours = attribute(model, tokens, [3, 4], [6, 7], by=unit)
    pairs = zip(theirs.labels, theirs.attribution, strict=True)
    table = {_our_name(label): row for label, row in pairs}
    shared = [part for part in ours.components if part in table]
    assert len(shared) == (zoo.N_LAYERS * (2 if unit == "component" else zoo.N_HEADS)) + (
        unit == "component"
    ) * (1 + ("pos_embed" in ours.components))
    for part in shared:
        assert_close(ours.sel(component=part)[:, 0], table[part], 1e-5)
    constants = sum(ours.sel(component=part)[:, 0] for part in ours.constants)
    assert_close(theirs.attribution.sum(0) + constants, ours.model_value[:, 0], 1e-5)
    if name in ("LN", "gpt2"):  # RMSNorm has no bias to fold into an unembedding bias
        assert largest(constants) > 1e-2


def _our_name(label):
    if found := re.fullmatch(r"(\d+)_(attn|mlp)_out", label):
        return f"{found[2]}.{found[1]}"
    return str(rp.parse(label)) if label != "remainder" else label


# What a run leaves behind, and hooks of the caller


@pytest.mark.parametrize("grad", [True, False], ids=["gradients on", "gradients off"])
@backends
def test_the_model_is_left_as_it_was(backend, grad):
    model = zoo.fresh(backend)
    model.blocks[1].requires_grad_(False)
    seen = []
    model.add_hook(hook_at("attn_out", 1), lambda tensor, hook: seen.append(1))
    model.hook_dict[hook_at("mlp_out", 1)].add_hook(lambda tensor, hook: None, is_permanent=True)
    zoo.plain_logits(model, zoo.RAGGED[0])  # a bridge sets itself up on its first forward pass
    with torch.set_grad_enabled(grad):
        before = zoo.snapshot(model)
        for by in zoo.GRAINS:
            dla = attribute(model, by=by, positions=None)
            assert not dla.values.requires_grad and not dla.model_value.requires_grad
        assert list(zoo.differences(before, zoo.snapshot(model))) == []
    assert seen


def hook_at(part, layer):
    return f"blocks.{layer}.hook_{part}"


@backends
def test_results_hold_no_graph_of_weights_that_require_gradients(backend):
    model = zoo.build(backend) if backend == "hooked" else zoo.named("gptj")
    assert ModelView(model).W_O(0).requires_grad
    run = rp.capture(model, zoo.RAGGED)
    for by in zoo.GRAINS:
        dla = rp.direct_logit_attribution(run, ANSWERS, FOILS, by=by)
        assert not dla.values.requires_grad and not dla.model_value.requires_grad
        assert not rp.decompose(run, by=by).vectors().requires_grad
    assert not run.fetch(rp.parse("resid_post.1")).requires_grad
    assert not run.logits_at(-1).requires_grad


@pytest.mark.parametrize("failure", ["answer", "position", "hook", "receiver", "user hook"])
@backends
def test_the_model_is_left_as_it_was_when_something_raises(backend, failure):
    model = zoo.fresh(backend)
    model.add_hook(hook_at("attn_out", 1), lambda tensor, hook: None)
    run = rp.capture(model, zoo.RAGGED)
    broken = []

    def break_down(tensor, hook=None):
        if broken:
            raise RuntimeError("broken on purpose")

    model.add_hook(hook_at("mlp_out", 1), break_down)
    rp.capture(model, zoo.RAGGED)
    before = zoo.snapshot(model)
    if failure in ("receiver", "user hook"):
        broken.append(failure)
    with pytest.raises((TokenError, PositionError, HookNotFiredError, RuntimeError)):
        match failure:
            case "answer":
                rp.direct_logit_attribution(run, 500, 6)
            case "position":
                rp.direct_logit_attribution(run, 3, 6, positions=99)
            case "hook":
                run.sweep({"blocks.0.attn.hook_result": lambda tensor, rows: None})
            case "receiver":
                run.sweep({hook_at("resid_post", 0): lambda tensor, rows: break_down(tensor)})
            case "user hook":
                rp.direct_logit_attribution(run, 3, 6)
    assert list(zoo.differences(before, zoo.snapshot(model))) == []


@backends
def test_the_snapshot_notices_what_it_must(backend):
    """The twin of the tests above: each change that a careless call could leave is seen."""
    model = zoo.fresh(backend)
    before = zoo.snapshot(model)

    def noticed():
        return list(zoo.differences(before, zoo.snapshot(model)))

    assert noticed() == []
    model.add_hook(hook_at("attn_out", 1), lambda tensor, hook: None)
    assert noticed()
    model.reset_hooks()
    assert noticed() == []
    handle = model.unembed.register_forward_hook(lambda m, i, o: None)
    assert noticed()
    handle.remove()
    model.cfg.use_attn_result = not model.cfg.use_attn_result
    assert noticed()
    model.cfg.use_attn_result = not model.cfg.use_attn_result
    model.train()
    assert noticed()
    model.eval()
    with torch.no_grad():
        assert noticed()
        next(iter(model.parameters())).mul_(1.5)
    assert noticed()


@backends
def test_hooks_of_the_caller_stay_on_and_act(backend):
    model = zoo.fresh(backend)
    plain = attribute(model, by="head")
    model.add_hook(hook_at("attn_out", 1), lambda tensor, hook: tensor * 0)
    dla = attribute(model, by="component")
    assert_close(dla.total[:, 0], _last(own_differences(model)), 1e-10)
    assert largest(dla.sel(component="attn.1")) == 0
    assert largest(dla.total - plain.total) > 0.01
    assert any("hook_attn_out" in name for name in dla.provenance.user_hooks)
    assert plain.provenance.user_hooks == ()
    model.reset_hooks()
    assert_close(attribute(model, by="head").values, plain.values, 0)


def _last(differences):
    return torch.stack([row[len(t) - 1] for row, t in zip(differences, zoo.RAGGED, strict=True)])


@pytest.mark.parametrize("layer", [0, zoo.N_LAYERS - 1])
@backends
def test_a_hook_that_writes_to_the_stream_is_refused_and_named(backend, layer):
    model = zoo.fresh(backend)
    run = rp.capture(model, zoo.RAGGED)
    model.add_hook(hook_at("resid_post", layer), lambda tensor, hook: tensor + 1.5 * tensor[:1])
    with pytest.raises(ModelChangedError, match="hook_resid_post"):
        rp.direct_logit_attribution(run, ANSWERS, FOILS)
    with pytest.raises(StreamMismatchError, match="functions of yours are on .*hook_resid_post"):
        rp.capture(model, zoo.RAGGED)


@grains
@backends
def test_a_hook_that_breaks_the_sum_where_no_check_looked_raises_a_gap_error(backend, by):
    model = zoo.fresh(backend)

    def late(tensor, hook):
        out = tensor.clone()
        out[:, 7:] += torch.arange(zoo.D_MODEL, dtype=tensor.dtype)
        return out

    model.add_hook(hook_at("resid_post", 1), late)
    run = rp.capture(model, zoo.RAGGED)
    with pytest.raises(GapError, match="prompt 0: the rows sum to .* Hooks of yours are on"):
        rp.direct_logit_attribution(run, ANSWERS, FOILS, by=by)
    with pytest.raises(GapError, match="something else writes to the stream"):
        rp.decompose(run, by=by).vectors(-1)
    early = rp.direct_logit_attribution(run, ANSWERS, FOILS, by=by, positions=1)
    assert largest(early.gap) < 1e-10


# The result


@pytest.fixture(scope="module")
def result():
    return attribute(zoo.build(zoo.BACKENDS[0]), by="head", positions=None)


def test_a_result_survives_json(result):
    again = rp.Attribution.from_json(result.to_json())
    for name in ("values", "model_value", "position_index"):
        assert_close(getattr(again, name), getattr(result, name), 0)
        assert getattr(again, name).dtype == getattr(result, name).dtype
    for name in ("axes", "unit", "provenance", "by", "answers", "foils", "token_texts"):
        assert getattr(again, name) == getattr(result, name)
    assert again.capped_value is None
    assert repr(again) == repr(result)
    assert again.to_frame().equals(result.to_frame())
    assert json.loads(result.to_json())["kind"] == "attribution"


@backends
def test_a_capped_result_in_float32_survives_json(backend):
    model = zoo.softcapped(backend)
    dla = attribute(model, foil=None, positions=None)
    again = rp.Attribution.from_json(dla.to_json())
    assert_close(again.capped_value, dla.capped_value, 0)
    assert again.foils is None and again.foil_texts is None


@pytest.mark.parametrize("key", ["values", "axes", "provenance", "position_index"])
def test_json_without_a_part_is_refused(result, key):
    body = json.loads(result.to_json())
    del body[key]
    with pytest.raises(ResultFormatError, match="incomplete or damaged"):
        rp.Attribution.from_json(json.dumps(body))


def test_the_repr_is_one_line_that_says_what_was_computed(result):
    text = repr(result)
    assert "\n" not in text
    assert "direct logit attribution by head, answer against foil" in text
    assert f"{len(result.components)} component × 3 batch × 8 pos; logits" in text


def test_the_top_is_by_size_or_signed_and_shows_where(result):
    """Means over prompts; positions that not every prompt has are left out."""
    by_size, signed = result.top(5), result.top(5, by="signed")
    assert list(by_size.columns) == ["component", "layer", "head", "position", "se", "value"]
    means = result.values.double().mean(1)
    cells = means[~means.isnan()]
    assert len(cells) == len(result.components) * min(map(len, result.token_texts))
    assert by_size["value"].abs().tolist() == sorted(cells.abs().tolist(), reverse=True)[:5]
    assert signed["value"].tolist() == sorted(cells.tolist(), reverse=True)[:5]
    assert (by_size["value"] < 0).any() and (signed["value"] > 0).all()
    for _, line in by_size.iterrows():
        cell = means[result.components.index(line["component"]), line["position"]]
        assert float(cell) == line["value"]


def test_cells_are_selected_by_address_row_and_position(result):
    head = result.sel(component="1.2")
    assert torch.equal(head[0], result.values[result.components.index("1.2"), 0])
    assert torch.equal(
        result.sel(component=rp.parse("1.2"), batch=1)[:3],
        result.values[result.components.index("1.2"), 1, :3],
    )
    last = result.sel(component="1.2", pos=-1)
    for row, tokens in enumerate(zoo.RAGGED):
        assert float(last[row]) == float(head[row, len(tokens) - 1])
    assert float(result.sel(component="1.2", batch=2, pos=-2)) == float(head[2, 3])
    for wrong in ({"component": "1.9"}, {"batch": 3}, {"pos": 5}, {"pos": -4}, {"layer": 1}):
        with pytest.raises(KeyError):
            result.sel(**wrong)


@backends
def test_the_provenance_names_model_state_and_tokens(backend):
    for folded in (False, True):
        found = attribute(zoo.build(backend, zoo.Cell(folded=folded))).provenance
        expected = {"hooked": "HookedTransformer", "bridge": "TransformerBridge"}[backend]
        assert found.backend == expected
        assert (found.processing == "raw") != folded
        assert found.dtype == "float64" and found.n_prompts == 3 and len(found.tokens) == 64
    other = attribute(zoo.build(backend), zoo.RAGGED[::-1], 3, 6).provenance
    assert other.tokens != found.tokens
