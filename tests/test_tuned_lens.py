"""The tuned lens: begins as the logit lens, knows its model, moves between bases exactly."""

import copy

import pytest
import torch
import zoo
import zoo_lens
from reference import lens as reference

import resid_patching as rp
from resid_patching.errors import (
    AddressError,
    LensBasisError,
    LensMismatchError,
    UnsupportedModelError,
)
from resid_patching.lens.fingerprint import fingerprint, sha256
from resid_patching.lens.tuned import require_lens_site
from resid_patching.models.view import note_revision

backends = pytest.mark.parametrize("backend", zoo.BACKENDS)
cells = pytest.mark.parametrize("cell", zoo.MATRIX, ids=str)
SITES = ("resid_pre", "resid_mid", "attn_out", "mlp_out")


def assert_close(left, right, tolerance=1e-10):
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance, equal_nan=True)


# The start


DTYPES = [(cell, torch.float64) for cell in zoo.MATRIX]
DTYPES += [
    (cell, dtype)
    for cell in zoo.MATRIX
    for dtype in (torch.float32, torch.bfloat16)
    if not cell.grouped and not cell.tied
]


@pytest.mark.parametrize(("cell", "dtype"), DTYPES, ids=str)
@backends
def test_the_start_is_the_logit_lens_bit_for_bit(backend, cell, dtype):
    model = zoo.build(backend, cell, dtype)
    run = rp.capture(model, zoo.RAGGED)
    lens, tuned = rp.logit_lens(run), rp.TunedLens.identity(model)(run)
    assert tuned.labels == lens.labels
    for label in lens.labels:
        left = lens.logits(layer=label, positions=None)
        right = tuned.logits(layer=label, positions=None)
        assert torch.equal(left.nan_to_num(), right.nan_to_num())
    assert torch.equal(lens.kl.values.nan_to_num(), tuned.kl.values.nan_to_num())


@pytest.mark.parametrize("site", SITES)
@backends
def test_the_start_on_every_site_reads_that_site(backend, site):
    model = zoo.build(backend)
    run = rp.capture(model, zoo.RAGGED)
    tuned = rp.TunedLens.identity(model, site=site)(run)
    assert len(tuned.labels) == 4 and tuned.labels[-1] == "resid_post.2"
    for label in tuned.labels[:-1]:
        state = run.fetch(rp.parse(label))
        expected = run.view.readout(state).detach()
        found = tuned.logits(layer=label, positions=None)
        real = run.prompts.mask
        assert_close(found[real], expected[real])
    if site == "resid_mid":
        lens = rp.logit_lens(run, mid=True)
        for label in tuned.labels:
            left, right = (r.logits(layer=label, positions=None) for r in (lens, tuned))
            assert torch.equal(left.nan_to_num(), right.nan_to_num())


def test_an_unfit_start_shows_a_planted_error():
    """The twin: the smallest bias is seen."""
    model = zoo.build(zoo.BACKENDS[0])
    run = rp.capture(model, zoo.RAGGED)
    tuned = rp.TunedLens.identity(model)
    with torch.no_grad():
        tuned.bias[1, 0] = 1e-6
    left = rp.logit_lens(run).logits(layer="resid_post.0")
    assert not torch.equal(tuned(run).logits(layer="resid_post.0"), left)


@backends
def test_sites_that_a_model_has_not_are_refused(backend):
    with pytest.raises(UnsupportedModelError, match="no resid_mid"):
        rp.TunedLens.identity(zoo.build(backend, zoo.Cell(parallel=True)), site="resid_mid")
    with pytest.raises(ValueError, match="site is one of resid_pre, resid_mid"):
        require_lens_site(rp.ModelView(zoo.build(backend)), "middle")


# The lens itself


@cells
@backends
def test_a_lens_is_the_slow_reference(backend, cell):
    model = zoo.build(backend, cell)
    tuned = zoo_lens.random_lens(model)
    readout = tuned(rp.capture(model, zoo.RAGGED))
    weights = zoo.plain_weights(model)
    for row, tokens in enumerate(zoo.RAGGED):
        cache = zoo.plain_cache(model, tokens)
        for layer in range(3):
            states = cache[f"blocks.{layer}.hook_resid_pre"][0]
            weight, bias = tuned.weight[layer].detach(), tuned.bias[layer].detach()
            moved = [reference.translate(x, weight, bias) for x in states]
            expected = [reference.logits(x, weights, cell.norm, zoo.EPS) for x in moved]
            found = readout.logits(layer=f"resid_pre.{layer}", positions=None)
            assert_close(found[row, : len(tokens)], torch.stack(expected))
        own = readout.logits(layer="resid_post.2", positions=None)[row, : len(tokens)]
        assert_close(own, zoo.plain_logits(model, tokens))


@backends
def test_it_is_differentiable_and_the_model_gets_no_gradient(backend):
    model = zoo.fresh(backend)
    model.zero_grad(set_to_none=True)
    tuned = zoo_lens.random_lens(model)
    weights = zoo.plain_weights(model)
    tokens = zoo.RAGGED[0]
    states = zoo.plain_cache(model, tokens)["blocks.1.hook_resid_pre"][0].clone().requires_grad_()
    final = zoo.plain_logits(model, tokens)
    log_q = tuned.logits(model, states, "resid_pre.1").log_softmax(-1)
    log_p = final.log_softmax(-1)
    (log_p.exp() * (log_p - log_q)).sum(-1).mean().backward()
    found = [tuned.weight.grad[1], tuned.bias.grad[1], states.grad]
    assert (tuned.weight.grad[[0, 2]] == 0).all()

    weight = tuned.weight[1].detach().clone().requires_grad_()
    bias = tuned.bias[1].detach().clone().requires_grad_()
    x = states.detach().clone().requires_grad_()
    reference.mean_kl(x, final, weight, bias, weights, "LN", zoo.EPS).backward()
    for left, right in zip(found, (weight.grad, bias.grad, x.grad), strict=True):
        assert_close(left, right)
    assert all(p.grad is None for p in model.parameters())


def test_states_go_by_label():
    tuned = rp.TunedLens.identity(zoo.build(zoo.BACKENDS[0]))
    assert [tuned.layer(label) for label in tuned.labels] == [0, 1, 2]
    assert tuned.layer("embed") == 0 and tuned.layer("resid_pre.1") == 1
    assert tuned.layer("resid_post.1") == 2 and tuned.layer("resid_post.2") is None
    assert tuned.layer("blocks.2.hook_resid_pre") == 2
    for wrong in ("resid_mid.0", "attn.1", "resid_post.3"):
        with pytest.raises(AddressError, match="no translator for"):
            tuned.layer(wrong)


def test_L07_there_is_no_translator_for_the_last_state():
    model = zoo.build(zoo.BACKENDS[0])
    tuned = zoo_lens.random_lens(model)
    assert len(tuned.weight) == len(tuned.labels) == model.cfg.n_layers
    states = torch.randn(2, zoo.D_MODEL, dtype=torch.float64)
    assert torch.equal(tuned.translate(states, "resid_post.2"), states)


def test_it_fits_the_lens_slot_of_transformer_lens():
    tools = pytest.importorskip("transformer_lens.tools.analysis.logit_lens")
    model = zoo.named("gpt2")
    tuned = zoo_lens.random_lens(model)
    tokens = torch.tensor([zoo.RAGGED[0]])
    found = tools.logit_lens(model, tokens, positions=None, lens=tuned.as_lens(model))
    readout = tuned(rp.capture(model, tokens))
    assert found.labels == ["0_pre", "1_pre", "2_pre", "final_post"]
    for number, label in enumerate(readout.labels):
        expected = readout.logits(layer=label, positions=None)
        assert_close(found.values[number], expected, 1e-5)
    some = tools.logit_lens(model, tokens, positions=None, lens=tuned.as_lens(model), layers=[2])
    assert_close(some.values[0], found.values[2])


@backends
def test_the_lens_slot_goes_by_label(backend):
    model = zoo.build(backend)
    states = torch.randn(2, zoo.D_MODEL, dtype=torch.float64)
    tuned = zoo_lens.random_lens(model)
    plain, with_mid = tuned.as_lens(model), tuned.as_lens(model, incl_mid=True)
    assert torch.equal(plain(states, 1), tuned.translate(states, "resid_pre.1"))
    assert torch.equal(with_mid(states, 2), plain(states, 1))
    assert torch.equal(plain(states, 3), states) and torch.equal(with_mid(states, 6), states)
    with pytest.raises(AddressError, match="no translator for 'resid_mid.0'"):
        with_mid(states, 1)
    of_mid = zoo_lens.random_lens(model, site="resid_mid").as_lens(model, incl_mid=True)
    assert of_mid(states, 3).shape == states.shape


def test_layer_transfer_is_every_translator_at_every_layer():
    model = zoo.build(zoo.BACKENDS[0])
    tuned = zoo_lens.random_lens(model)
    run = rp.capture(model, zoo.RAGGED)
    found = tuned.transfer(run)
    assert [axis.name for axis in found.axes] == ["translator", "layer"]
    own = tuned(run).kl.values[:-1].flatten(1).nanmean(1)
    assert_close(found.values.diagonal(), own)
    swapped = copy.deepcopy(tuned)
    with torch.no_grad():
        swapped.weight.copy_(tuned.weight[[1, 1, 1]])
        swapped.bias.copy_(tuned.bias[[1, 1, 1]])
    assert_close(found.values[1], swapped(run).kl.values[:-1].flatten(1).nanmean(1))
    last = tuned.transfer(run, positions=-1)
    assert_close(last.values.diagonal(), tuned(run).kl.sel(pos=-1)[:-1].mean(1))
    assert "mean over 16 tokens" in found.provenance.plan


# Which model


def other_models(backend):
    """Models that differ from the toy in one thing, and what an error says of it."""
    base = zoo.build(backend)
    edited = {}
    for what in ("W_U", "b_U", "gain", "bias"):
        model = zoo.fresh(backend)
        final = model.ln_final
        gain = getattr(final, "w", None) if hasattr(final, "w") else final.weight
        shift = getattr(final, "b", None) if hasattr(final, "b") else final.bias
        target = {"W_U": model.unembed.W_U, "b_U": getattr(model.unembed, "b_U", None)}
        tensor = {**target, "gain": gain, "bias": shift}[what]
        if tensor is None or not isinstance(tensor, torch.nn.Parameter) and what == "b_U":
            continue
        with torch.no_grad():
            if what == "W_U":
                tensor[:, zoo.D_VOCAB // 2] += 1e-6  # one interior row of the head
            else:
                tensor[3] += 1e-6
        name = {"gain": "final_norm", "bias": "final_norm"}.get(what, what)
        edited[what] = (model, rf"whose {name} is sha256 \w+, but the {name} of .* is sha256 \w+")
    named = copy.copy(base)
    named.cfg = copy.copy(base.cfg)
    named.cfg.model_name = "impostor"
    edited["name"] = (named, f"of the model '{rp.ModelView(base).name}', but this is 'impostor'")
    return edited


@backends
def test_other_weights_or_names_are_refused_with_both_sides_named(backend):
    model = zoo.build(backend)
    tuned = rp.TunedLens.identity(model)
    others = other_models(backend)
    assert {"W_U", "gain", "bias", "name"} <= set(others)
    for what, (other, message) in others.items():
        run = rp.capture(other, zoo.RAGGED)
        with pytest.raises(LensMismatchError, match=message):
            tuned(run)
        with pytest.raises(LensMismatchError):
            tuned.logits(other, torch.zeros(1, zoo.D_MODEL, dtype=torch.float64), "embed")
        with pytest.raises(LensMismatchError):
            tuned.as_lens(other)
        assert what


def test_another_width_or_depth_is_refused_with_both_sides_named():
    model = zoo.named("gpt2")
    tuned = rp.TunedLens.identity(model)
    wide = zoo.bridge(zoo.hugging_face(zoo.gpt2_config(n_embd=64)))
    with pytest.raises(LensMismatchError, match="width d_model 32, but .* has 64"):
        tuned(rp.capture(wide, [1, 2]))
    deep = zoo.bridge(zoo.hugging_face(zoo.gpt2_config(n_layer=4)))
    with pytest.raises(LensMismatchError, match="number of layers 3, but .* has 4"):
        tuned(rp.capture(deep, [1, 2]))


@backends
def test_another_revision_is_refused_with_both_sides_named(backend):
    model = zoo.fresh(backend)
    note_revision(model, "abc123")
    tuned = rp.TunedLens.identity(model)
    tuned(rp.capture(model, [1, 2]))
    other = zoo.fresh(backend)
    rp.TunedLens.identity(other)(rp.capture(other, [1, 2]))
    assert fingerprint(rp.ModelView(other)).revision is None
    tuned(rp.capture(other, [1, 2]))  # unknown on one side, and the weights are the same
    note_revision(other, "def456")
    other.eval()
    with torch.no_grad():
        other.unembed.W_U.mul_(1)  # what is remembered of a model is found anew
    with pytest.raises(LensMismatchError, match="revision abc123 of .* revision def456"):
        tuned(rp.capture(other, [1, 2]))


@backends
def test_T09_a_raw_lens_on_centred_weights_is_refused_with_both_sides_named(backend):
    raw, folded = (zoo.build(backend, zoo.Cell(folded=f)) for f in (False, True))
    assert fingerprint(rp.ModelView(folded)).basis == "centred"
    tuned = zoo_lens.random_lens(raw)
    with pytest.raises(LensBasisError, match="of raw weights .* are centred"):
        tuned(rp.capture(folded, zoo.RAGGED))
    back = zoo_lens.random_lens(folded)
    with pytest.raises(LensBasisError, match="of centred weights .* are raw"):
        back(rp.capture(raw, zoo.RAGGED))


def test_T06_the_hashes_are_of_the_numbers_alone():
    backend = zoo.BACKENDS[0]
    left, right = (fingerprint(rp.ModelView(zoo.fresh(backend))) for _ in range(2))
    assert left == right
    known = torch.arange(12.0).reshape(3, 4)
    written_down = "d53aaec83f069fdb518f70927e27b49f"
    assert sha256(known)[:32] == written_down
    assert sha256(known) == sha256(known.T.contiguous().T) == sha256(known.to(torch.bfloat16))
    assert sha256(known) != sha256(known.reshape(4, 3))


# Bases


def test_a_centred_lens_is_exact_on_raw_weights():
    raw, centred = zoo_lens.twins("centre writes")
    tuned = zoo_lens.random_lens(centred, size=2.0)
    assert tuned.fingerprint.basis == "centred"
    moved = tuned.rebase(raw)
    assert moved.fingerprint == fingerprint(rp.ModelView(raw))
    left = tuned(rp.capture(centred, zoo.RAGGED))
    right = moved(rp.capture(raw, zoo.RAGGED))
    assert_close(left.kl.values, right.kl.values)
    assert float(left.js(right).values.nan_to_num().max()) < 1e-10

    naive = rp.TunedLens.identity(raw)
    with torch.no_grad():
        naive.weight.copy_(tuned.weight)
        naive.bias.copy_(tuned.bias)
    wrong = naive(rp.capture(raw, zoo.RAGGED))
    assert float((wrong.kl.values - left.kl.values).abs().nan_to_num().max()) > 0.1


def test_a_raw_lens_on_centred_weights_converts_only_where_it_is_blind_to_the_mean():
    raw, centred = zoo_lens.twins("centre writes")
    tuned = zoo_lens.random_lens(raw, size=2.0)
    with pytest.raises(LensBasisError, match=r"reads the mean of the stream .*\|P A 1\|"):
        tuned.rebase(centred)
    naive = rp.TunedLens.identity(centred)
    with torch.no_grad():
        naive.weight.copy_(tuned.weight)
        naive.bias.copy_(tuned.bias)
    left, right = (t(rp.capture(m, zoo.RAGGED)) for t, m in ((tuned, raw), (naive, centred)))
    assert float((left.kl.values - right.kl.values).abs().nan_to_num().max()) > 0.1

    with torch.no_grad():  # A 1 = 3 * 1, which P takes away
        tuned.weight.sub_(tuned.weight.mean(-1, keepdim=True)).add_(3 / zoo.D_MODEL)
    left = tuned(rp.capture(raw, zoo.RAGGED))
    right = tuned.rebase(centred)(rp.capture(centred, zoo.RAGGED))
    assert_close(left.kl.values, right.kl.values)


@pytest.mark.parametrize("how", ["fold", "centre unembed", "fold and centre unembed"])
def test_folding_the_norm_and_centring_the_unembedding_leave_a_raw_lens_as_it_is(how):
    raw, other = zoo_lens.twins(how)
    tuned = zoo_lens.random_lens(raw)
    with pytest.raises(LensMismatchError, match="tuned.rebase"):
        tuned(rp.capture(other, zoo.RAGGED))
    moved = tuned.rebase(other)
    assert torch.equal(moved.weight, tuned.weight) and torch.equal(moved.bias, tuned.bias)
    left, right = (t(rp.capture(m, zoo.RAGGED)) for t, m in ((tuned, raw), (moved, other)))
    assert_close(left.kl.values, right.kl.values)


@backends
def test_transformer_lenss_own_processing_is_another_basis(backend):
    raw, folded = (zoo.build(backend, zoo.Cell(folded=f)) for f in (False, True))
    tuned = zoo_lens.random_lens(folded)
    left = tuned(rp.capture(folded, zoo.RAGGED))
    right = tuned.rebase(raw)(rp.capture(raw, zoo.RAGGED))
    assert_close(left.kl.values, right.kl.values, 1e-5)  # it goes through float32


def test_a_folded_rms_model_keeps_a_raw_lens():
    for backend in zoo.BACKENDS:
        raw, folded = (zoo.build(backend, zoo.Cell(norm="RMS", folded=f)) for f in (False, True))
        tuned = zoo_lens.random_lens(raw)
        if fingerprint(rp.ModelView(folded)).basis == "centred":
            with pytest.raises(LensBasisError, match="final norm here is RMS"):
                tuned.rebase(folded)
            continue
        left, right = tuned(rp.capture(raw, [1, 2, 3])), tuned.rebase(folded)
        assert_close(left.kl.values, right(rp.capture(folded, [1, 2, 3])).kl.values, 1e-6)


@backends
def test_another_model_is_no_other_basis(backend):
    tuned = zoo_lens.random_lens(zoo.build(backend))
    for what, (other, _) in other_models(backend).items():
        if what == "name":
            with pytest.raises(LensMismatchError, match="renamed=True"):
                tuned.rebase(other)
            assert tuned.rebase(other, renamed=True).fingerprint.model == "impostor"
    other = zoo.fresh(backend)
    with torch.no_grad():
        other.unembed.W_U[:, 20] *= 1.1
    with pytest.raises(LensMismatchError, match="read states differently"):
        tuned.rebase(other)


def test_a_conversion_to_the_basis_that_it_has_is_refused():
    raw = rp.TunedLens.identity(zoo.build(zoo.BACKENDS[0]))
    with pytest.raises(LensBasisError, match="raw already"):
        raw.to_raw()
    rms = rp.TunedLens.identity(zoo.build(zoo.BACKENDS[0], zoo.Cell(norm="RMS")))
    with pytest.raises(LensBasisError, match="final norm here is RMS"):
        rms.to_centred()


@pytest.mark.parametrize("name", ["qwen3", "llama_grouped", "gemma", "neox_parallel"])
def test_T03_lenses_need_no_list_of_model_types(name):
    model = zoo.named(name)
    run = rp.capture(model, zoo.RAGGED)
    assert rp.logit_lens(run).kl.values[:-1].isfinite().any()
    assert zoo_lens.random_lens(model)(run).kl.values[:-1].isfinite().any()


def test_a_softcapped_model_has_a_lens():
    for backend in zoo.BACKENDS:
        model = zoo.softcapped(backend)
        run = rp.capture(model, zoo.RAGGED)
        logits = zoo_lens.random_lens(model)(run).logits(layer="embed", positions=None)
        assert float(logits.nan_to_num().abs().max()) <= zoo.SOFTCAP


@backends
def test_the_model_is_left_as_it_was(backend):
    model = zoo.fresh(backend)
    zoo.plain_logits(model, zoo.RAGGED[0])
    before = zoo.snapshot(model)
    tuned = zoo_lens.random_lens(model)
    run = rp.capture(model, zoo.RAGGED)
    tuned(run).measure("kl", top=2)
    tuned.transfer(run)
    tuned.as_lens(model)
    tuned.rebase(model)
    assert list(zoo.differences(before, zoo.snapshot(model))) == []
