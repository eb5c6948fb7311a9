"""Identities that hold for every prompt, batch, target and lens, on models drawn at random.

Each test makes a few examples of its own; `HYPOTHESIS_PROFILE=fuzz` makes ten times as many.
"""

import dataclasses
import functools
import json
import math
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import zoo
import zoo_ablation
import zoo_lens
import zoo_paths
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from zoo_ablation import ANSWER, FOIL, TOYS

import resid_patching as rp
from resid_patching.errors import ResidPatchingWarning, TokenError
from resid_patching.lens import fit

_MORE = max(1, settings().max_examples // 100)


def examples(count):
    return settings(max_examples=count * _MORE, suppress_health_check=list(HealthCheck))


# The softmax of Hugging Face's rotary models is in float32, even in float64.
EXACT = {"plain": 1e-9, "replay": 2e-3}

ids = st.integers(0, zoo.D_VOCAB - 1)
ragged = st.lists(st.lists(ids, min_size=1, max_size=8), min_size=1, max_size=4)
toys = st.sampled_from(TOYS)
seeds = st.integers(0, 2**31)
sides = st.sampled_from(["left", "right"])
bounds = st.sampled_from([1, 50_000, 200_000, 2**30])
grains = st.sampled_from(zoo.GRAINS)


@st.composite
def equal_rows(draw, at_least=1, most=4):
    """Rows of one length, and as many others like them."""
    count, length = draw(st.integers(at_least, most)), draw(st.integers(2, 7))
    row = st.lists(ids, min_size=length, max_size=length)
    rows = st.lists(row, min_size=count, max_size=count)
    return draw(rows), draw(rows)


def targets_of(toy):
    return st.sampled_from(zoo_ablation.targets(toy))


def may_be_joint(targets):
    """Whether no target is a part of another one."""
    layers = {target for target in targets if target in ("attn.1", "mlp.1", "mlp.2")}
    inside = {"attn.1": ("1.", "attn.1."), "mlp.1": ("mlp.1.",), "mlp.2": ("mlp.2.",)}
    return not any(target.startswith(inside[layer]) for layer in layers for target in targets)


def close(left, right, tolerance):
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance, equal_nan=True)


def padded(rows, side, pad):
    width = max(map(len, rows))
    tokens, mask = torch.full((len(rows), width), pad), torch.zeros(len(rows), width)
    for number, row in enumerate(rows):
        real = slice(width - len(row), None) if side == "left" else slice(len(row))
        tokens[number, real] = torch.tensor(row)
        mask[number, real] = 1
    return tokens, mask


# Prompts


def everything(run, grain):
    """What every analysis says of each prompt, as [prompt, ...]."""
    readout = rp.logit_lens(run)
    report = rp.stream_report(run)
    metric = rp.logit_diff(ANSWER, FOIL)
    path = rp.Path(to=["1.1.q", "mlp.2.in"], using=rp.Zero(), mlps="recompute")
    found = {
        "logits": run.logits_at(-1)[:, 0],
        "attribution": rp.direct_logit_attribution(run, ANSWER, FOIL, by=grain).values[..., 0].T,
        "lens": readout.kl.sel(pos=-1).T,
        "rank": readout.rank(ANSWER).sel(pos=-1).T,
        "survival": report.survival,
        "share": report.values.transpose(0, 1),
        "ablation": rp.ablate(run, ["0.1", "mlp.1"], rp.Zero(), metric=metric).values.T,
        "direct": rp.ablate(run, "attn.1", rp.Zero(), metric=metric, positions=-1).direct.T,
        "path": rp.ablate(run, ["0.2", "embed"], path, metric=metric).values.T,
    }
    return {name: value.double() for name, value in found.items()}


@pytest.mark.full
@given(toys, ragged, sides, ids, bounds, grains)
@examples(12)
def test_any_batch_any_padding_and_any_chunks_give_the_numbers_of_single_prompts(
    toy, rows, side, pad, max_bytes, grain
):
    tokens, mask = padded(rows, side, pad)
    whole = everything(rp.capture(toy.model, tokens, mask=mask, max_bytes=max_bytes), grain)
    for number, row in enumerate(rows):
        alone = everything(rp.capture(toy.model, [row]), grain)
        for name, value in alone.items():
            if name == "rank" and toy.route == "replay":
                continue  # two logits may be closer than its rounding
            mine = whole[name][number]
            mine = mine[..., : value.shape[-1]] if name in ("survival", "share") else mine
            close(mine, value[0], EXACT[toy.route])


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
kinds = st.sampled_from(["byte_level", "byte_level_left", "metaspace"])


@given(st.sampled_from(zoo.BACKENDS), kinds, st.lists(texts, min_size=1, max_size=3))
@examples(30)
def test_any_unicode_is_the_prompt_of_its_ids(backend, kind, prompts):
    model = zoo.text_model(backend, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResidPatchingWarning)
        run = rp.capture(model, prompts)
        rows = [model.to_tokens(text)[0].tolist() for text in prompts]
        found = [
            row[:n] for row, n in zip(run.prompts.tokens.tolist(), run.prompts.lengths, strict=True)
        ]
        assert found == rows
        close(run.logits_at(-1), rp.capture(model, rows).logits_at(-1), 0)
        dla = rp.direct_logit_attribution(run, 7, 9, positions=None)
    assert [len(row) for row in run.prompts.token_texts] == list(run.prompts.lengths)
    again = rp.Attribution.from_json(dla.to_json())
    assert again.token_texts == run.prompts.token_texts == dla.token_texts
    assert len(dla.to_frame()) == len(dla.components) * sum(run.prompts.lengths)


@given(texts, st.characters(categories=["Cs"]), texts)
@examples(10)
def test_half_a_character_is_refused_by_name(before, half, after):
    model = zoo.text_model(zoo.BACKENDS[0])
    for ask in (
        lambda text: rp.capture(model, text),
        lambda text: rp.windows(model, text, length=4),
    ):
        with pytest.raises(ValueError, match="surrogate"):
            ask(before + half + after)
    with pytest.raises(TokenError, match="surrogate"):
        rp.direct_logit_attribution(rp.capture(model, "a"), before + half + after)


cells = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)


@given(st.lists(st.tuples(cells, cells, cells, cells), min_size=1, max_size=4), st.booleans())
@examples(30)
def test_pairs_are_read_as_they_were_written(rows, as_json):
    assume(all(any(not c.isspace() for c in "".join(row)) for row in rows))
    names = ("base", "source", "answer", "foil")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pairs.jsonl" if as_json else "pairs.tsv")
        if as_json:
            lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
        else:
            lines = ["\t".join(row) for row in [names, *rows]]
        path.write_bytes("\n".join(lines).encode())
        found = rp.read_pairs(path)
    assert list(zip(found.base, found.source, found.answers, found.foils, strict=True)) == rows


# Attribution


@given(toys, ragged, ids, ids, grains, st.booleans())
@examples(20)
def test_rows_sum_to_the_models_logit_difference_and_swap_sign_with_the_tokens(
    toy, rows, answer, foil, grain, last
):
    assume(answer != foil)
    run = rp.capture(toy.model, rows)
    positions = -1 if last else None
    dla = rp.direct_logit_attribution(run, answer, foil, by=grain, positions=positions)
    logits = run.logits_at(positions)
    expected = (logits[..., answer] - logits[..., foil]).to(dla.total)
    close(dla.total.nan_to_num(), expected.nan_to_num(), 1e-8)
    other = rp.direct_logit_attribution(run, foil, answer, by=grain, positions=positions)
    close(other.values, -dla.values, 1e-9)
    coarse = rp.direct_logit_attribution(run, answer, foil, positions=positions)
    close(coarse.total, dla.total, 1e-8)


# Ablation


@st.composite
def ablations(draw):
    """A toy, rows, as many others, and a few targets."""
    toy = draw(toys)
    targets = draw(st.lists(targets_of(toy), min_size=1, max_size=4, unique=True))
    return toy, *draw(equal_rows()), targets


def runs(toy, *sets):
    return [rp.capture(toy.model, rows) for rows in sets]


metrics = st.sampled_from(
    [rp.logit_diff(ANSWER, FOIL), rp.logit(7), rp.prob(7), rp.kl(), rp.loss()]
)


def zero_where_nothing_changed(toy, values):
    """Exactly 0 where we compute the pass ourselves; else two passes differ by their rounding."""
    if toy.route == "plain":
        assert not values.any()
    else:
        close(values, torch.zeros_like(values), EXACT["replay"])


@given(ablations(), metrics, st.booleans(), st.sampled_from([None, 0, -1]))
@examples(25)
def test_a_run_replaced_by_itself_does_not_change(ablation, metric, joint, positions):
    toy, rows, _, targets = ablation
    assume(not joint or may_be_joint(targets))
    run = rp.capture(toy.model, rows)
    how = rp.Resample(run, pairing="rowwise")
    found = rp.ablate(run, targets, how, metric=metric, joint=joint, positions=positions)
    zero_where_nothing_changed(toy, found.total)
    zero_where_nothing_changed(toy, found.direct)
    assert found.provenance.tokens == run.prompts.hash


@given(ablations(), metrics, st.booleans())
@examples(20)
def test_one_target_together_is_that_target_alone(ablation, metric, zero):
    toy, rows, others, targets = ablation
    run, source = runs(toy, rows, others)
    how = rp.Zero() if zero else rp.Resample(source, pairing="rowwise")
    alone = rp.ablate(run, targets, how, metric=metric)
    for number, target in enumerate(targets):
        joint = rp.ablate(run, [target], how, metric=metric, joint=True)
        close(joint.total[0], alone.total[number], EXACT[toy.route])
        close(joint.direct[0], alone.direct[number], EXACT[toy.route])


@given(ablations(), st.data())
@examples(20)
def test_what_is_changed_behind_the_scored_position_has_no_effect(ablation, data):
    toy, rows, others, targets = ablation
    run, source = runs(toy, rows, others)
    scored = data.draw(st.integers(0, run.prompts.lengths[0] - 2))
    changed = data.draw(st.integers(scored + 1, run.prompts.lengths[0] - 1))
    for metric in (rp.logit_diff(ANSWER, FOIL, position=scored), rp.kl(position=scored)):
        how = rp.Resample(source, pairing="rowwise")
        found = rp.ablate(run, targets, how, metric=metric, positions=changed)
        zero_where_nothing_changed(toy, found.total)
        zero_where_nothing_changed(toy, found.direct)


@given(ablations(), metrics, bounds, st.booleans())
@examples(15)
def test_routes_chunks_and_order_change_no_effect(ablation, metric, max_bytes, joint):
    toy, rows, others, targets = ablation
    assume(not joint or may_be_joint(targets))
    run, source = runs(toy, rows, others)
    how = rp.Resample(source, pairing="rowwise")
    expected = rp.ablate(run, targets, how, metric=metric, joint=joint, routes=("full",))
    small = dataclasses.replace(run, max_bytes=max_bytes, _kept={})
    found = rp.ablate(small, targets[::-1], how, metric=metric, joint=joint)
    order = slice(None) if joint else torch.arange(len(targets) - 1, -1, -1)
    tolerance = max(1e-8, EXACT[toy.route])
    close(found.total, expected.total[order], tolerance)
    close(found.direct, expected.direct[order], tolerance)


@given(ablations(), st.data(), st.sampled_from(zoo_paths.MODES), st.booleans())
@examples(20)
def test_paths_from_a_run_to_itself_and_from_later_positions_are_nothing(
    ablation, data, mlps, itself
):
    toy, rows, others, _ = ablation
    run, source = runs(toy, rows, others)
    receivers = zoo_paths.receivers(toy)
    sending = data.draw(
        st.lists(st.sampled_from(zoo_paths.senders(toy)), min_size=1, max_size=3, unique=True)
    )
    to = data.draw(st.lists(st.sampled_from(receivers), min_size=1, max_size=3, unique=True))
    scored = data.draw(st.integers(0, run.prompts.lengths[0] - 2))
    how = rp.Resample(run if itself else source, pairing="rowwise")
    found = rp.ablate(
        run,
        sending,
        rp.Path(to=rp.receivers(*to), using=how, mlps=mlps),
        metric=rp.logit_diff(ANSWER, FOIL, position=scored),
        positions=None if itself else scored + 1,
    )
    zero_where_nothing_changed(toy, found.total.nan_to_num())
    zero_where_nothing_changed(toy, found.direct.nan_to_num())


@given(ablations(), st.data(), st.sampled_from(zoo_paths.MODES))
@examples(15)
def test_receivers_side_by_side_and_senders_together_are_those_alone(ablation, data, mlps):
    toy, rows, others, _ = ablation
    run, source = runs(toy, rows, others)
    sender = data.draw(st.sampled_from(zoo_paths.senders(toy)))
    to = data.draw(
        st.lists(st.sampled_from(zoo_paths.receivers(toy)), min_size=1, max_size=3, unique=True)
    )
    metric = rp.logit_diff(ANSWER, FOIL)
    using = rp.Resample(source, pairing="rowwise")
    grid = rp.ablate(
        run, [sender], rp.Path(to=rp.receivers(*to), using=using, mlps=mlps), metric=metric
    )
    for number, receiver in enumerate(to):
        if grid.values[:, number].isnan().any():
            assert grid.values[:, number].isnan().all()
            continue
        path = rp.Path(to=receiver, using=using, mlps=mlps)
        alone = rp.ablate(run, [sender], path, metric=metric, joint=True)
        close(grid.values[:, number], alone.values, EXACT[toy.route])


# Lenses


@given(toys, ragged, ids, st.integers(1, 5))
@examples(20)
def test_what_a_lens_says_is_a_distribution_and_its_last_row_the_models(toy, rows, token, k):
    run = rp.capture(toy.model, rows)
    readout = rp.logit_lens(run)
    found = readout.measure("entropy", "kl", "prob", "rank", top=k, tokens=token)
    real = ~found["kl"].values.isnan()
    assert real.sum() == len(readout.rows) * sum(run.prompts.lengths)
    assert not found["kl"].values[-1][real[-1]].any()
    assert (found["kl"].values[real] >= 0).all()
    entropy = found["entropy"].values[real]
    assert (entropy >= 0).all() and (entropy <= math.log(zoo.D_VOCAB) + 1e-9).all()
    for number, label in enumerate(readout.labels):
        logits = readout.logits(layer=label, positions=None)
        probabilities = logits.softmax(-1)
        here = real[number]
        close(probabilities.sum(-1)[here], torch.ones_like(entropy[: here.sum()]), 1e-9)
        close(found["prob"].values[number][here], probabilities[..., token][here], 1e-9)
        above = (logits > logits[..., token, None]).sum(-1)
        assert torch.equal(found["rank"].values[number][here].long(), above[here])
        best = logits[here].topk(k, -1)
        close(found["top_tokens"].values[number][here], probabilities[here].topk(k, -1)[0], 1e-9)
        close(found["top_tokens"].logits[number][here], best.values, 1e-9)
    close(readout.logits(layer=readout.labels[-1]), run.logits_at(-1), 1e-12)


@given(toys, ragged, seeds)
@examples(15)
def test_a_tuned_lens_before_any_fit_is_the_logit_lens_and_distances_are_distances(toy, rows, seed):
    run = rp.capture(toy.model, rows)
    logit = rp.logit_lens(run)
    identity = rp.TunedLens.identity(toy.model)(run)
    names = ("entropy", "kl", "cross_entropy", "prob", "rank")
    left, right = logit.measure(*names), identity.measure(*names)
    for name in names:
        close(left[name].values, right[name].values, 0)
    tuned = zoo_lens.random_lens(toy.model, seed=seed)(run)
    js, tv = logit.js(tuned).values, logit.total_variation(tuned).values
    close(js, tuned.js(logit).values, 1e-12)
    assert (js.nan_to_num() >= 0).all() and (js.nan_to_num() <= math.log(2) + 1e-12).all()
    assert (tv.nan_to_num() >= 0).all() and (tv.nan_to_num() <= 1 + 1e-12).all()
    assert (tv.nan_to_num() ** 2 <= 2 * js.nan_to_num() + 1e-12).all()  # Pinsker, to each half
    assert (logit.js(identity).values.nan_to_num() < 1e-15).all()


# Files


def same_fields(left, right):
    """Whether two results agree in everything, to the last bit."""
    assert type(left) is type(right)
    for field in dataclasses.fields(left):
        one, other = getattr(left, field.name), getattr(right, field.name)
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert one == other, field.name
    return True


@pytest.mark.full
@given(toys, equal_rows(), grains, seeds)
@examples(12)
def test_every_result_comes_back_from_json_as_it_was(toy, both, grain, seed):
    run, source = runs(toy, *both)
    resample = rp.Resample(source, pairing="rowwise")
    metric = rp.logit_diff(ANSWER, FOIL)
    path = rp.Path(to=rp.receivers("1.1.q", "logits"), using=resample, mlps="freeze")
    readout = zoo_lens.random_lens(toy.model, seed=seed)(run)
    results = [
        rp.direct_logit_attribution(run, ANSWER, by=grain, positions=None),
        rp.direct_logit_attribution(run, ANSWER, FOIL, by=grain),
        rp.ablate(run, ["0.1", "mlp.0"], resample, metric=rp.loss()),
        rp.ablate(run, ["2.1", "embed"], path, metric=metric),
        rp.stream_report(run),
        readout.kl,
        readout.cross_entropy,
        readout.top_tokens(3),
        readout.marginal_bias(),
    ]
    if toy.route == "plain":
        results.append(rp.linearised_paths(run, ["0.1"], path, metric=metric))
    for result in results:
        text = result.to_json()
        assert same_fields(type(result).from_json(text), result)
        assert type(result).from_json(json.dumps(json.loads(text), indent=3)).to_json() == text
        assert len(result.to_frame()) > 0


sites = st.sampled_from(["resid_pre", "attn_out", "mlp_out"])
dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])


@given(sites, dtypes, seeds, st.floats(1e-30, 1e30), st.sampled_from(zoo.BACKENDS))
@examples(15)
def test_every_lens_comes_back_from_its_folder_as_it_was(site, dtype, seed, size, backend):
    model = zoo.build(backend, dtype=dtype)
    lens = zoo_lens.random_lens(model, site=site, seed=seed, size=size)
    lens.record = {"fit": {"seed": seed}, "validation": {"tuned": [size]}}
    formats = ["resid_patching"] + ["tuned-lens"] * (site == "resid_pre")
    for name in formats:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore", ResidPatchingWarning)
            lens.save(folder, format=name)
            found = rp.TunedLens.load(folder, model)
        assert torch.equal(found.weight, lens.weight) and torch.equal(found.bias, lens.bias)
        if name == "resid_patching":
            assert (found.site, found.record) == (site, lens.record)
            assert found.fingerprint == lens.fingerprint


@functools.cache
def unbroken(optimizer, seed, ridge):
    return fitted(optimizer, seed, ridge)


def fitted(optimizer, seed, ridge, folder=None):
    return rp.fit_tuned_lens(
        zoo.build(zoo.BACKENDS[0]),
        zoo_lens.random_windows(20),
        length=16,
        validation_tokens=32,
        steps=4,
        optimizer=optimizer,
        seed=seed,
        ridge=ridge,
        look_every=2,
        folder=folder,
        save_every=1,
        progress=False,
    )


OPTIMIZERS = ["adam", "sgd"] + ["muon"] * hasattr(torch.optim, "Muon")


@given(st.sampled_from(OPTIMIZERS), st.integers(0, 3), st.booleans(), st.integers(0, 3))
@examples(3)
def test_a_fit_that_was_stopped_anywhere_ends_as_an_unbroken_one(optimizer, seed, ridge, stop):
    take_step = fit.take_step

    def interrupt(*args):
        if args[2] == stop:
            raise KeyboardInterrupt
        return take_step(*args)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "take_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fitted(optimizer, seed, ridge, folder)
        patch.undo()
        found = fitted(optimizer, seed, ridge, folder)
    expected = unbroken(optimizer, seed, ridge)
    assert torch.equal(found.weight, expected.weight) and torch.equal(found.bias, expected.bias)
    assert found.record == expected.record
