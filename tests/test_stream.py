"""The running total: norms, shares, cosines, survival, exactness, and changed writes."""

import math

import pytest
import torch
import zoo

import resid_patching as rp
from resid_patching.errors import AblationError, PositionError, StreamMismatchError

CELLS = [zoo.Cell(norm, parallel) for norm in ("LN", "RMS") for parallel in (False, True)]
cells = pytest.mark.parametrize("cell", CELLS, ids=str)
backends = pytest.mark.parametrize("backend", zoo.BACKENDS)
CHANGES = [None, rp.WriteScale(0.3), rp.WriteScale(-2.0), rp.Overwrite()]


def report(model, how=None, **options):
    return rp.stream_report(rp.capture(model, zoo.RAGGED), how, **options)


def assert_close(left, right, tolerance=1e-10):
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


def cosine(left, right):
    return torch.nn.functional.cosine_similarity(left, right, dim=-1)


# The slow reference: one sublayer at a time, each on the state it is given


def sublayers_on(model, cell, layer, state, tokens):
    """What attention and MLP of a layer write when the layer begins at a state [pos, d_model]."""
    seen = {}

    def start(tensor, hook):
        return state[None].clone()

    def keep(name):
        def hook(tensor, hook):
            seen[name] = tensor[0].detach().clone()

        return hook

    block = f"blocks.{layer}.hook_"
    hooks = [(f"{block}resid_pre", start)]
    hooks += [(f"{block}{name}", keep(name)) for name in ("attn_out", "mlp_out")]
    with torch.no_grad():
        model.run_with_hooks(torch.tensor([tokens]), fwd_hooks=hooks)
    return seen["attn_out"], seen["mlp_out"]


def mlp_on(model, layer, state):
    block = model.blocks[layer]
    with torch.no_grad():
        return block.mlp(block.ln2(state[None]))[0]


def slow_totals(model, cell, how, tokens):
    """The start, then (write, state after it) for every write, by a plain loop."""
    start = zoo.plain_cache(model, tokens)["blocks.0.hook_resid_pre"][0]
    state, found = start, []
    for layer in range(zoo.N_LAYERS):
        attention, mlp = sublayers_on(model, cell, layer, state, tokens)
        if cell.parallel:
            attention, state, mlp = combined(how, state, attention, mlp)
            found += [(attention, state), (mlp, state)]
            continue
        attention, state = added(how, state, attention)
        found.append((attention, state))
        mlp, state = added(how, state, mlp_on(model, layer, state))
        found.append((mlp, state))
    return start, found


def added(how, state, write):
    if isinstance(how, rp.Overwrite):
        return write, write
    write = write * (1 if how is None else how.factor)
    return write, state + write


def combined(how, state, attention, mlp):
    if isinstance(how, rp.Overwrite):
        return attention, attention + mlp, mlp
    factor = 1 if how is None else how.factor
    return attention * factor, state + (attention + mlp) * factor, mlp * factor


@pytest.mark.parametrize("how", CHANGES, ids=str)
@cells
@backends
def test_every_number_is_the_slow_references(backend, cell, how):
    model = zoo.build(backend, cell)
    found = report(model, how)
    for row, tokens in enumerate(zoo.RAGGED):
        n = len(tokens)
        start, totals = slow_totals(model, cell, how, tokens)
        assert_close(found.start_norm[row, :n], start.norm(dim=-1))
        for number, (write, state) in enumerate(totals):
            assert_close(found.write_norm[number, row, :n], write.norm(dim=-1), 1e-9)
            assert_close(found.stream_norm[number, row, :n], state.norm(dim=-1), 1e-9)
            assert_close(found.cosine[number, row, :n], cosine(state, start))
            share = write.norm(dim=-1) / state.norm(dim=-1)
            assert_close(found.share[number, row, :n], share, 1e-9)
        assert_close(found.survival[row, :n], cosine(totals[-1][1], start))


def test_the_reference_tells_overwriting_from_adding():
    model = zoo.build(zoo.BACKENDS[0])
    start, totals = slow_totals(model, zoo.Cell(), None, zoo.RAGGED[0])
    changed = report(model, rp.Overwrite())
    assert (changed.survival[0] - cosine(totals[-1][1], start)).abs().max() > 0.1


# Identities


@cells
@backends
def test_start_and_writes_sum_to_the_last_state(backend, cell):
    for how in CHANGES:
        found = report(zoo.build(backend, cell), how)
        assert found.exactness < 1e-11
        assert found.relative_exactness < 1e-12


@cells
@backends
def test_scaling_by_one_is_the_clean_run_exactly(backend, cell):
    model = zoo.build(backend, cell)
    clean, scaled = report(model), report(model, rp.WriteScale(1))
    for name in ("values", "write_norm", "stream_norm", "cosine", "survival", "gap", "scale"):
        left, right = getattr(clean, name), getattr(scaled, name)
        assert torch.equal(left.nan_to_num(), right.nan_to_num()), name


@cells
@backends
def test_scaling_by_zero_leaves_the_start(backend, cell):
    found = report(zoo.build(backend, cell), rp.WriteScale(0))
    real = ~found.start_norm.isnan()
    assert_close(found.survival[real], torch.ones_like(found.survival[real]))
    assert not found.write_norm[:, real].any()
    assert torch.equal(found.stream_norm[-1][real], found.start_norm[real])


@cells
@backends
def test_after_overwriting_the_last_state_is_the_last_write(backend, cell):
    found = report(zoo.build(backend, cell), rp.Overwrite())
    if not cell.parallel:
        assert_close(found.stream_norm.nan_to_num(), found.write_norm.nan_to_num())
        assert_close(found.share.nan_to_num(1), torch.ones_like(found.share))


@cells
@backends
def test_cosines_and_shares_stay_in_their_range(backend, cell):
    for how in CHANGES:
        found = report(zoo.build(backend, cell), how)
        real = found.cosine[~found.cosine.isnan()]
        assert bool((real.abs() <= 1).all())
        assert bool((found.share.nan_to_num() >= 0).all())


@pytest.mark.parametrize("how", CHANGES, ids=str)
@backends
def test_pads_are_nan_and_real_positions_are_not(backend, how):
    found = report(zoo.build(backend), how)
    for tensor in (found.values, found.write_norm, found.stream_norm, found.cosine):
        for row, tokens in enumerate(zoo.RAGGED):
            assert not tensor[:, row, : len(tokens)].isnan().any()
            assert tensor[:, row, len(tokens) :].isnan().all()
    assert found.survival.isnan().sum() == sum(8 - len(tokens) for tokens in zoo.RAGGED)


@pytest.mark.parametrize("how", CHANGES, ids=str)
@backends
def test_chunks_of_prompts_change_nothing(backend, how):
    model = zoo.build(backend)
    whole = rp.stream_report(rp.capture(model, zoo.RAGGED), how)
    pieces = rp.stream_report(rp.capture(model, zoo.RAGGED, max_bytes=1), how)
    assert_close(whole.values.nan_to_num(), pieces.values.nan_to_num(), 1e-12)
    assert_close(whole.survival.nan_to_num(), pieces.survival.nan_to_num(), 1e-12)


@pytest.mark.parametrize("positions", [-1, 2, [0, 1, 4]], ids=["last", "one", "per row"])
@pytest.mark.parametrize("how", CHANGES, ids=str)
def test_positions_are_those_of_the_whole_report(how, positions):
    model = zoo.build(zoo.BACKENDS[0])
    whole, some = report(model, how), report(model, how, positions=positions)
    index = rp.capture(model, zoo.RAGGED).locate(positions).index[:, 0]
    assert torch.equal(some.cosine[:, :, 0], whole.cosine[:, torch.arange(3), index])
    texts = report(model, how).token_texts
    assert some.token_texts == tuple((texts[row][i],) for row, i in enumerate(index.tolist()))


@backends
def test_one_layer_after_another_is_labelled_by_address(backend):
    found = report(zoo.build(backend))
    assert found.writes == ("attn.0", "mlp.0", "attn.1", "mlp.1", "attn.2", "mlp.2")
    assert torch.equal(
        found.sel(write=rp.parse("mlp.2"), batch=0), found.values[-1, 0]
    ) and found.writes[-1] == str(rp.parse("mlp.2"))


@pytest.mark.skipif(not zoo.HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
@pytest.mark.parametrize("how", CHANGES, ids=str)
def test_a_model_of_attention_alone_has_attention_writes_alone(how):
    found = report(zoo.hooked_variant(attn_only=True), how)
    assert found.writes == ("attn.0", "attn.1", "attn.2")
    assert found.exactness < 1e-11


@pytest.mark.parametrize("name", zoo.EXACT)
def test_every_exact_architecture_is_exact_here(name):
    for how in CHANGES:
        found = report(zoo.named(name), how)
        assert found.relative_exactness < 1e-12
        assert not found.survival[0].isnan().any()


def test_a_cache_of_the_caller_is_read_for_the_clean_report():
    model = zoo.build(zoo.BACKENDS[0])
    tokens = torch.tensor([zoo.RAGGED[0]])
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
    cached = rp.capture(model, tokens, cache=cache)
    for how in CHANGES:
        plain = rp.stream_report(rp.capture(model, tokens), how)
        assert_close(rp.stream_report(cached, how).values, plain.values, 1e-12)


# What is left on the model, and what is refused


@pytest.mark.parametrize("how", CHANGES, ids=str)
@backends
def test_the_model_is_left_as_it_was(backend, how):
    model = zoo.build(backend)
    before = zoo.snapshot(model)
    report(model, how)
    assert list(zoo.differences(before, zoo.snapshot(model))) == []


@backends
def test_hooks_of_the_caller_act_in_the_clean_and_the_changed_run(backend):
    model = zoo.fresh(backend)
    plain = report(model, rp.Overwrite())
    model.add_hook("blocks.0.hook_attn_out", lambda tensor, hook: tensor * 3)
    hooked = report(model, rp.Overwrite())
    assert_close(hooked.write_norm[0].nan_to_num(), 3 * plain.write_norm[0].nan_to_num())
    assert hooked.provenance.user_hooks


@pytest.mark.parametrize("factor", [math.nan, math.inf, True, "2", None])
def test_a_factor_that_is_no_finite_number_is_refused(factor):
    with pytest.raises((AblationError, TypeError), match="factor"):
        rp.WriteScale(factor)


def test_what_is_no_intervention_is_refused():
    with pytest.raises((AblationError, TypeError), match="how"):
        report(zoo.build(zoo.BACKENDS[0]), "overwrite")


def test_a_position_that_is_not_there_is_refused():
    with pytest.raises(PositionError, match="prompt 1 has 3 tokens"):
        report(zoo.build(zoo.BACKENDS[0]), positions=5)


def test_a_model_whose_writes_are_not_what_is_added_is_refused():
    with pytest.raises(StreamMismatchError):
        report(zoo.named("bert"))


# The result


@pytest.mark.parametrize("how", CHANGES, ids=str)
def test_json_and_back_is_the_same_report(how):
    found = report(zoo.build(zoo.BACKENDS[0]), how)
    back = rp.StreamReport.from_json(found.to_json())
    assert torch.equal(back.cosine.nan_to_num(), found.cosine.nan_to_num())
    assert back.how == found.how and back.token_texts == found.token_texts
    assert repr(back) == repr(found)


def test_the_text_of_a_report_names_the_intervention():
    model = zoo.build(zoo.BACKENDS[0])
    assert "write scale 0.3" in repr(report(model, rp.WriteScale(0.3)))
    assert "overwrite" in repr(report(model, rp.Overwrite()))
    assert "scale" not in repr(report(model)) and "overwrite" not in repr(report(model))


def test_the_table_says_what_it_averages():
    found = report(zoo.build(zoo.BACKENDS[0]))
    frame = found.table()
    assert frame["n"].tolist() == [16] * 6
    assert frame["mean_cosine"].iloc[-1] == pytest.approx(float(found.survival.nanmean()))
    assert frame["mean_share"].tolist() == pytest.approx(found.share.flatten(1).nanmean(1).tolist())


def test_the_frame_has_a_row_for_every_cell():
    found = report(zoo.build(zoo.BACKENDS[0]))
    frame = found.to_frame()
    assert list(frame.columns) == [
        *("write", "layer", "prompt", "position", "token"),
        *("write_norm", "stream_norm", "cosine", "value"),
    ]
    assert len(frame) == found.values.numel()
    cell = frame[(frame.write == "mlp.1") & (frame.prompt == 2) & (frame.position == 4)].iloc[0]
    assert cell.cosine == float(found.cosine[3, 2, 4])
