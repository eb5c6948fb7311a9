"""Fitting: the closed form, the fused gradient, the data, the fit that is killed and goes on."""

import math
import os
import random
import signal
import subprocess
import sys
import time
import types

import accelerator
import pytest
import torch
import zoo
import zoo_lens
from reference import lens as reference
from torch.utils._pytree import tree_map

import resid_patching as rp
from resid_patching.errors import (
    DivergedError,
    LensFormatError,
    LensMismatchError,
    OutOfDataError,
    PromptError,
)
from resid_patching.lens import data, fit, loop, resume, steps
from resid_patching.lens.harvest import Held, harvest
from resid_patching.lens.loop import Plan, windows_of
from resid_patching.lens.ridge import Solver, Statistics
from resid_patching.lens.tuned import site_rows
from resid_patching.lens.unembed import LowUnembedding, Unembedding
from resid_patching.models import Norm

backends = pytest.mark.parametrize("backend", zoo.BACKENDS)
TEXT = zoo.CORPUS * 4


def assert_close(left, right, tolerance=1e-10):
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance, check_dtype=False)


def quick(model, texts=None, **options):
    """A fit of seconds."""
    texts = zoo_lens.random_windows(60) if texts is None else texts
    settings = {
        "length": 16,
        "validation_tokens": 160,
        "steps": 6,
        "step_tokens": 20,
        "step_windows": 3,
        "look_every": 2,
        "progress": False,
    }
    return rp.fit_tuned_lens(model, texts, **{**settings, **options})


def same(left, right):
    return torch.equal(left.weight, right.weight) and torch.equal(left.bias, right.bias)


# The fused gradient


def models():
    for backend in zoo.BACKENDS:
        for cell in (zoo.Cell(), zoo.Cell(norm="RMS"), zoo.Cell(folded=True)):
            yield f"{backend}-{cell}", lambda b=backend, c=cell: zoo.build(b, c)
        yield f"{backend}-softcap", lambda b=backend: zoo.softcapped(b)


@pytest.mark.parametrize("rows", [1, 3, 7, 100])
@pytest.mark.parametrize("make", [m for _, m in models()], ids=[n for n, _ in models()])
def test_the_fused_gradient_is_autograds_whatever_the_chunk(make, rows):
    view = rp.ModelView(make())
    unembedding = Unembedding.of(view)
    generator = torch.Generator().manual_seed(3)
    states, last = 3 * torch.randn(2, 10, view.d_model, generator=generator, dtype=torch.float64)
    final = unembedding.logits(last)
    teacher = steps.Teacher.of(unembedding, final)
    kl, gradient = steps.kl_and_gradient(unembedding, states, teacher, unembedding.buffer(rows))

    x = states.clone().requires_grad_()
    log_q = unembedding.logits(x).log_softmax(-1)
    log_p = final.log_softmax(-1)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    expected.sum().backward()
    assert_close(kl, expected.detach())
    assert_close(gradient, x.grad)
    assert float(gradient.abs().max()) > 1e-3
    assert_close(steps.kl_only(unembedding, states, teacher, unembedding.buffer(rows)), kl)


def test_the_gradient_of_a_translator_is_the_slow_references():
    model = zoo.build(zoo.BACKENDS[0])
    view = rp.ModelView(model)
    unembedding = Unembedding.of(view)
    tokens = zoo_lens.random_windows(1, 9)
    found = harvest(view, tokens, [rp.parse("resid_pre.1")], logits=True)
    tuned = zoo_lens.random_lens(model)
    weight, bias = (t[1].detach().clone().requires_grad_() for t in (tuned.weight, tuned.bias))
    states = found.states[0]
    moved = tuned.translate(states, "resid_pre.1").detach()
    kl, gradient = steps.kl_and_gradient(
        unembedding, moved, steps.Teacher.of(unembedding, found.logits)
    )
    weights = zoo.plain_weights(model)
    expected = reference.mean_kl(states, found.logits, weight, bias, weights, "LN", zoo.EPS)
    expected.backward()
    assert_close(kl.mean(), expected.detach())
    assert_close(gradient.T @ states / len(states), weight.grad)
    assert_close(gradient.mean(0), bias.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_are_multiplied_in_float32(dtype):
    view = rp.ModelView(zoo.build(zoo.BACKENDS[0], dtype=dtype))
    exact = rp.ModelView(zoo.fresh(zoo.BACKENDS[0], dtype=dtype).double())
    unembedding, other = Unembedding.of(view), Unembedding.of(exact)
    states, last = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(0))
    teachers = [steps.Teacher.of(u, u.logits(last)) for u in (unembedding, other)]
    found = steps.kl_and_gradient(unembedding, states, teachers[0])
    expected = steps.kl_and_gradient(other, states, teachers[1])
    assert found[0].dtype == torch.float32
    for left, right in zip(found, expected, strict=True):
        assert_close(left.double(), right.double(), 1e-4)


@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_products_in_bfloat16_are_near_whatever_shift_all_logits_share(shift):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 3000, generator=generator) / 4
    norm = Norm("LN", torch.ones(64), torch.full((64,), 0.3), 1e-5)
    weight += shift / 64  # with the norm's bias, a shift of all logits
    exact = Unembedding(norm, weight, torch.zeros(3000), None)
    centre = weight.mean(1)
    low = LowUnembedding(
        norm, weight, torch.zeros(3000), None, (weight - centre[:, None]).bfloat16(), centre
    )
    states, last = torch.randn(2, 256, 64, generator=generator)
    final = exact.logits(last)
    left, right = (
        steps.kl_and_gradient(u, states, steps.Teacher.of(u, final)) for u in (exact, low)
    )
    assert abs(float(left[0].mean() - right[0].mean())) < 2e-3
    assert float((left[1] - right[1]).norm() / left[1].norm()) < 1e-2
    assert float(left[0].mean()) > 1


def test_a_fit_with_products_in_bfloat16_goes_down_too():
    model = zoo.build(zoo.BACKENDS[0], dtype=torch.float32)
    tuned = quick(model, steps=30, step_tokens=60, look_every=5, products="bfloat16")
    table = tuned.record["validation"]
    assert tuned.weight.dtype == torch.float32
    assert sum(k < r for k, r in zip(table["tuned"], table["ridge"], strict=True)) >= 2


@pytest.mark.parametrize("far", [0.0, 1500.0])
def test_the_gradient_holds_where_logits_of_two_tokens_lie_far_apart(far):
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(8, 30, generator=generator, dtype=torch.float64)
    weight[0] = 0
    weight[0] += far  # whatever a state's first entry, a shift of all its logits
    norm = Norm("RMS", torch.ones(8).double(), torch.zeros(8).double(), 1e-5)
    unembedding = Unembedding(norm, weight, torch.zeros(30).double(), None)
    states, last = torch.randn(2, 6, 8, generator=generator, dtype=torch.float64)
    states[:3, 0], states[3:, 0] = 2, -2
    teacher = steps.Teacher.of(unembedding, unembedding.logits(last))
    kl, gradient = steps.kl_and_gradient(unembedding, states, teacher)
    log_q = unembedding.logits(states).log_softmax(-1)
    log_p = unembedding.logits(last).log_softmax(-1)
    assert_close(kl, (log_p.exp() * (log_p - log_q)).sum(-1), 1e-9)
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("ridge", [True, False])
def test_steps_are_measured_in_how_much_longer_the_last_state_is(ridge, monkeypatch):
    """Root mean squares, of all training windows for a regression and of two without one."""
    found = {}
    measure = fit._Fit._statistics

    def noted(self):
        moments = measure(self)
        windows = self.windows.training if ridge else self.windows.training[:2]
        found["expected"] = harvest(self.view, windows, self.rows, logits=False)
        found["moments"] = moments
        return moments

    monkeypatch.setattr(fit._Fit, "_statistics", noted)
    quick(zoo.build(zoo.BACKENDS[0]), steps=0, ridge=ridge)
    expected, moments = found["expected"], found["moments"]
    assert moments.statistics.tokens == len(expected.last)
    last = expected.last.pow(2).mean().sqrt()
    assert moments.last_spread == pytest.approx(float(last))
    weights = 1 / expected.last.pow(2).sum(-1)  # as in the regression
    for states, scale in zip(expected.states, moments.scales, strict=True):
        spread = (weights @ states.pow(2).mean(-1) / weights.sum()).sqrt()
        assert scale == pytest.approx(float(last / spread))


# Ridge


def random_tokens(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64) + 3
    mixing = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return x, x @ mixing + 2 + noise / 3


def test_each_layer_has_the_penalty_with_the_least_validation_kl(monkeypatch):
    """On a KL with one minimum a layer, uphill and downhill of the layer before's."""
    least = (-5, -2, -9)

    def solve(self, penalty):
        return torch.zeros(32, 32), torch.full((32,), float(math.log10(penalty)))

    def kl(self, number, weight, bias, every=1):
        return abs(float(bias[0]) - least[number])

    monkeypatch.setattr(Solver, "solve", solve)
    monkeypatch.setattr(Held, "kl", kl)
    tuned = quick(zoo.build(zoo.BACKENDS[0]), steps=0)
    assert tuned.record["fit"]["penalty"] == [10.0**place for place in least]


@pytest.mark.parametrize("penalty", [1e-6, 1e-2, 1.0, 100.0])
def test_ridge_is_the_slow_reference(penalty):
    x, y = random_tokens(40)
    statistics = Statistics.empty(1, 6)
    statistics.add([x], y)
    weight, bias = Solver(statistics, 0).solve(penalty)
    expected = reference.ridge(x, y, penalty)
    assert_close(weight, expected[0], 1e-8)
    assert_close(bias, expected[1], 1e-8)


def test_statistics_add_up_over_batches_and_machines():
    x, y = random_tokens(60)
    whole = Statistics.empty(1, 6)
    whole.add([x], y)
    machines = []
    for part in (slice(0, 7), slice(7, 50), slice(50, 60)):
        machine = Statistics.empty(1, 6)
        for row in range(part.start, part.stop):
            machine.add([x[row : row + 1]], y[row : row + 1])
        machines.append(machine)
    first, *others = machines
    for other in others:
        first.merge(other)
    for name in ("total", "mean_x", "mean_y", "xx", "xy"):
        assert_close(getattr(first, name), getattr(whole, name), 1e-10)
    assert first.tokens == whole.tokens == 60


def test_statistics_in_float32_survive_a_coordinate_far_from_zero():
    x, y = random_tokens(500)
    x[:, 0] += 3000
    left, right = Statistics.empty(1, 6), Statistics.empty(1, 6)
    left.add([x], y)
    right.add([x.float()], y.float())
    a, b = (Solver(s, 0).solve(1e-4)[0] for s in (left, right))
    assert_close(a, b, 1e-2)


def test_a_large_penalty_is_the_logit_lens_but_for_a_bias():
    x, y = random_tokens(40)
    statistics = Statistics.empty(1, 6)
    statistics.add([x], y)
    assert float(Solver(statistics, 0).solve(1e9)[0].abs().max()) < 1e-6


@backends
def test_ridge_is_kept_only_where_it_beats_the_identity(backend, monkeypatch):
    model = zoo.build(backend)
    tuned = quick(model, steps=0)
    table = tuned.record["validation"]
    assert table["layers"] == ["resid_pre.0", "resid_post.0", "resid_post.1"]
    for number, (logit, ridge, kept) in enumerate(
        zip(table["logit_lens"], table["ridge"], table["tuned"], strict=True)
    ):
        assert kept == min(logit, ridge)
        is_identity = not tuned.weight[number].any() and not tuned.bias[number].any()
        assert is_identity == (ridge >= logit)
    assert min(r / z for r, z in zip(table["ridge"], table["logit_lens"], strict=True)) < 0.9

    def far(self, penalty):
        noise = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
        return 50 * noise.double(), torch.full((32,), 300.0, dtype=torch.float64)

    monkeypatch.setattr(Solver, "solve", far)
    tuned = quick(model, steps=0)
    assert not tuned.weight.any() and tuned.record["fit"]["penalty"] == [None] * 3
    assert tuned.record["validation"]["tuned"] == tuned.record["validation"]["logit_lens"]


def test_position_0_is_left_out():
    view = rp.ModelView(zoo.build(zoo.BACKENDS[0]))
    tokens = zoo_lens.random_windows(2, 5)
    rows = site_rows("resid_pre", 3)[:-1]
    found = harvest(view, tokens, rows, logits=True)
    run = rp.capture(view, tokens)
    for state, row in zip(found.states, rows, strict=True):
        assert torch.equal(state, run.fetch(row)[:, 1:].flatten(0, 1))
    assert torch.equal(found.logits, run.logits_at(None)[:, 1:].flatten(0, 1))


@backends
def test_states_without_logits_are_the_same_and_the_model_is_left_as_it_was(backend):
    model = zoo.fresh(backend)
    zoo.plain_logits(model, [1, 2])
    before = zoo.snapshot(model)
    view = rp.ModelView(model)
    tokens = zoo_lens.random_windows(2, 5)
    rows = site_rows("resid_pre", 3)[:-1]
    left, right = (harvest(view, tokens, rows, logits=which) for which in (True, False))
    assert right.logits is None and torch.equal(left.last, right.last)
    assert all(map(torch.equal, left.states, right.states))
    assert list(zoo.differences(before, zoo.snapshot(model))) == []


# The fit


def small_layer(scale=3.0):
    zeros = [torch.zeros(shape, requires_grad=True) for shape in ((4, 4), (4,))]
    best = [part.detach().clone() for part in zeros]
    return loop.Layer("resid_pre.1", *zeros, scale, 2.0, *best)


def test_a_layer_waits_for_so_many_looks_without_progress_and_keeps_its_best():
    layer = small_layer()
    for kl, waited, stopped in [
        (2.0, 1, False),  # no better is no progress
        (1.5, 0, False),
        (1.6, 1, False),
        (1.5, 2, True),
    ]:
        with torch.no_grad():
            layer.weight += 1
        layer.look(kl, 2)
        assert (layer.waited, layer.stopped) == (waited, stopped)
    assert layer.kl == 1.5 and layer.best_weight.eq(2).all()


@pytest.mark.parametrize("optimizer", ["muon", "adam", "sgd"])
def test_a_first_step_is_of_the_rate_in_the_layers_own_units(optimizer):
    def moved(rate, scale=3.0):
        layer = small_layer(scale)
        loop.equip(layer, Plan(10, 5, 3, optimizer, rate, 1.0, 1, 1, seed=4), last_spread=5.0)
        layer.weight.grad, layer.bias.grad = torch.eye(4), torch.ones(4)
        for one in layer.optimizers:
            one.step()
        return layer.weight.detach(), layer.bias.detach()

    weight, bias = moved(0.01)
    sizes = {  # SGD: Nesterov's first step; Adam: one rate; both scaled where they should be
        "sgd": (-0.01 * 1.9, -0.01 * 1.9),
        "adam": (-0.01 * 3.0 / 2, -0.01 * 5.0),
        "muon": (None, -0.01 * 5.0),
    }[optimizer]
    if sizes[0] is not None:
        torch.testing.assert_close(weight, sizes[0] * torch.eye(4), rtol=1e-4, atol=0)
    torch.testing.assert_close(bias, torch.full((4,), sizes[1]), rtol=1e-4, atol=0)
    for one, twice in zip((weight, bias), moved(0.02), strict=True):
        torch.testing.assert_close(2 * one, twice, rtol=1e-3, atol=0)
    assert weight.trace() < -0.01
    in_units = 1 if optimizer == "sgd" else 2
    torch.testing.assert_close(moved(0.01, 6.0)[0], in_units * weight, rtol=1e-3, atol=0)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["muon", "adam", "sgd"])
@backends
def test_every_translator_beats_the_logit_lens_on_text_it_never_saw(backend, optimizer):
    model = zoo.build(backend)
    tuned = quick(model, steps=30, step_tokens=60, look_every=5, optimizer=optimizer)
    run = rp.capture(model, zoo_lens.random_windows(20, seed=9))
    found, plain = (
        lens.kl.values[:-1, :, 1:].flatten(1).mean(1) for lens in (tuned(run), rp.logit_lens(run))
    )
    assert (found < plain).all()
    table = tuned.record["validation"]
    for ridge, kept in zip(table["ridge"], table["tuned"], strict=True):
        assert kept <= ridge
    assert sum(k < r for k, r in zip(table["tuned"], table["ridge"], strict=True)) >= 2


@pytest.mark.parametrize("optimizer", ["muon", "adam", "sgd"])
def test_steps_alone_go_down_from_the_logit_lens(optimizer):
    model = zoo.build(zoo.BACKENDS[0])
    tuned = quick(model, steps=30, ridge=False, step_tokens=60, look_every=5, optimizer=optimizer)
    table = tuned.record["validation"]
    assert table["ridge"] == []
    for logit, kept in zip(table["logit_lens"], table["tuned"], strict=True):
        assert kept < logit


def test_validation_figures_are_those_of_the_lens():
    model = zoo.build(zoo.BACKENDS[0])
    windows = zoo_lens.random_windows(60)
    tuned = quick(model, windows)
    held = data.read_windows(
        rp.ModelView(model), windows, length=16, tokens=None, validation_tokens=160
    ).validation
    run = rp.capture(model, held)
    for name, lens in (("tuned", tuned(run)), ("logit_lens", rp.logit_lens(run))):
        expected = lens.kl.values[:-1, :, 1:].flatten(1).mean(1)
        assert_close(torch.tensor(tuned.record["validation"][name]), expected, 1e-6)
    assert tuned.record["validation"]["tokens"] == held[:, 1:].numel()


@pytest.mark.parametrize("site", ["resid_mid", "attn_out", "mlp_out"])
def test_other_sites_are_fitted(site):
    model = zoo.build(zoo.BACKENDS[0])
    tuned = quick(model, site=site)
    table = tuned.record["validation"]
    assert all(k < z for k, z in zip(table["tuned"], table["logit_lens"], strict=True))


def test_a_seed_decides_everything_and_nothing_is_seeded_globally():
    model = zoo.build(zoo.BACKENDS[0])
    state = torch.random.get_rng_state()
    first, again, other = quick(model, seed=0), quick(model, seed=0), quick(model, seed=1)
    assert same(first, again) and not same(first, other)
    assert torch.equal(state, torch.random.get_rng_state())


def test_layers_draw_positions_of_their_own(monkeypatch):
    model = zoo.build(zoo.BACKENDS[0])
    drawn = []
    take = steps.Teacher.take

    def noted(self, where):
        if isinstance(where, torch.Tensor):
            drawn.append(tuple(where.tolist()))
        return take(self, where)

    monkeypatch.setattr(steps.Teacher, "take", noted)
    quick(model, steps=2, step_windows=1, step_tokens=10)
    assert len(drawn) == 6 and len(set(drawn)) == 6
    assert all(len(set(where)) == 10 for where in drawn)


def test_a_layers_gradient_is_clipped_alone(monkeypatch):
    model = zoo.build(zoo.BACKENDS[0])
    free = quick(model, steps=1, look_every=1, optimizer="sgd", clip=1e9, rate=0.1)
    clipped = quick(model, steps=1, look_every=1, optimizer="sgd", clip=1e-9, rate=0.1)
    ridge = quick(model, steps=0)
    assert float((clipped.weight - ridge.weight).abs().max()) < 1e-8
    assert float((free.weight - ridge.weight).abs().max()) > 1e-6
    short = quick(model, steps=1, look_every=1, optimizer="sgd", clip=1e-3, rate=1e-3)
    moved = (short.weight - ridge.weight).pow(2).sum((1, 2)) + (short.bias - ridge.bias).pow(2).sum(
        1
    )
    made = moved > 0  # a step that made the KL worse is not kept
    assert made.any()
    assert_close(moved[made].sqrt(), torch.full_like(moved[made], 1.9e-6), 1e-12)  # Nesterov's 1.9


def test_a_layer_that_no_longer_falls_stops_and_keeps_its_best():
    model = zoo.build(zoo.BACKENDS[0])
    tuned = quick(model, steps=40, look_every=1, patience=2, rate=20.0, clip=1e9)
    ridge = quick(model, steps=0)
    assert tuned.record["fit"]["steps_made"] < 40
    assert same(tuned, ridge)


def test_windows_are_gone_through_once_before_any_comes_again():
    plan = Plan(10, 5, 3, "adam", 0.1, 1.0, 1, 1, seed=4)
    order = torch.cat([windows_of(9, plan, step) for step in range(6)])
    for epoch in order.split(9):
        assert sorted(epoch.tolist()) == list(range(9))
    assert order[:9].tolist() != order[9:].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@backends
def test_T01_ten_steps_in_half_precision_are_finite(backend, dtype):
    model = zoo.build(backend, dtype=dtype)
    tuned = quick(model, steps=10)
    assert tuned.weight.dtype == torch.float32  # the master weights
    assert tuned.weight.isfinite().all() and tuned.bias.isfinite().all()
    table = tuned.record["validation"]
    assert all(k < z for k, z in zip(table["tuned"], table["logit_lens"], strict=True))


def test_T01_the_first_nan_stops_with_layer_and_step_named(monkeypatch):
    model = zoo.build(zoo.BACKENDS[0])
    fused, calls = loop.kl_and_gradient, []

    def broken_at_the_eighth(*args):
        kl, gradient = fused(*args)
        calls.append(1)
        return kl, gradient * (torch.nan if len(calls) == 8 else 1)

    monkeypatch.setattr(loop, "kl_and_gradient", broken_at_the_eighth)
    with pytest.raises(DivergedError, match="layer resid_post.0, step 2: KL .* gradient nan"):
        quick(model, steps=60, step_windows=1)
    assert len(calls) == 8
    monkeypatch.setattr(loop, "kl_and_gradient", fused)
    broken = zoo.fresh(zoo.BACKENDS[0])
    fine = harvest

    def with_nan(view, tokens, addresses, *, logits):
        found = fine(view, tokens, addresses, logits=logits)
        if not logits:
            found.states[1][0, 0] = torch.nan
        return found

    monkeypatch.setattr(fit, "harvest", with_nan)
    with pytest.raises(DivergedError, match="layer resid_post.0, ridge"):
        quick(broken)


@backends
def test_T14_the_base_model_gets_no_gradients_and_stays_as_it_was(backend):
    model = zoo.fresh(backend)
    zoo.plain_logits(model, [1, 2])
    before = zoo.snapshot(model)
    quick(model)
    assert list(zoo.differences(before, zoo.snapshot(model))) == []
    assert all(p.grad is None for p in model.parameters())


def test_T14_an_error_in_a_step_is_not_swallowed(monkeypatch):
    def fail(*args):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(fit, "take_step", fail)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        quick(zoo.build(zoo.BACKENDS[0]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0.0}, "rate and clip are above 0"),
        ({"steps": -1}, "steps is a whole number from 0"),
        ({"step_tokens": 0}, "step_tokens is a whole number from 1"),
        ({"save_every": 0}, "save_every is a whole number from 1"),
        ({"length": 1}, "windows are of 2 to 64 tokens"),
        ({"length": 65}, "windows are of 2 to 64 tokens"),
    ],
)
def test_settings_that_cannot_be_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        quick(zoo.build(zoo.BACKENDS[0]), **options)


# Data


def text_windows(texts, **options):
    view = rp.ModelView(zoo.text_model(zoo.BACKENDS[0]))
    settings = {"length": 16, "tokens": 160, "validation_tokens": 32}
    return data.read_windows(view, texts, **{**settings, **options})


def rows_of(found):
    return found.training.tolist(), found.validation.tolist()


def test_texts_come_from_many_sources(tmp_path):
    path = tmp_path / "prose.txt"
    path.write_text(TEXT, encoding="utf-8")
    expected = rows_of(text_windows(TEXT))
    assert rows_of(text_windows(path)) == expected
    assert rows_of(text_windows([TEXT])) == expected
    assert rows_of(text_windows([path])) == expected
    assert rows_of(text_windows({"text": t} for t in [TEXT])) == expected
    assert rows_of(text_windows([{"body": TEXT}], text_key="body")) == expected
    ids = torch.tensor(expected[0] + expected[1])
    again = text_windows(ids)
    assert len(again.training) == 10 and len(again.validation) == 2


def test_a_streaming_dataset_is_read_no_further_than_needed():
    datasets = pytest.importorskip("datasets")
    read = []

    def rows():
        for number in range(10_000):
            read.append(number)
            yield {"text": f"The dog saw the cat {number} times. "}

    stream = datasets.IterableDataset.from_generator(rows)
    found = text_windows(stream)
    assert len(found.training) == 10 and max(read) < 500
    table = datasets.Dataset.from_list([{"text": TEXT}])
    assert rows_of(text_windows(table)) == rows_of(text_windows(TEXT))
    with pytest.raises(PromptError, match="choose one split"):
        text_windows(datasets.DatasetDict({"train": table}))


def test_windows_begin_with_bos_and_documents_are_set_apart():
    view = rp.ModelView(zoo.text_model(zoo.BACKENDS[0]))
    texts = ["Ida sat. " * 10, "Tom sat. " * 10, "Anna sat. " * 40]
    found = text_windows(texts, tokens=96, validation_tokens=16)
    bos = view.tokenizer.bos_token_id
    everything = torch.cat([found.training, found.validation])
    assert (everything[:, 0] == bos).all()
    assert int((everything[:, 1:] == view.tokenizer.eos_token_id).sum()) == 1
    bare = text_windows(TEXT, prepend_bos=False)
    assert not (bare.training[:, 0] == bos).any()


def test_validation_is_never_trained_on():
    found = text_windows(zoo_lens.random_windows(60, 16, 300), tokens=None)
    training, held = ({tuple(row) for row in part} for part in rows_of(found))
    assert len(held) == 2 and not training & held
    own = text_windows(TEXT, validation="Anna handed a book to Tom. " * 20)
    assert (
        rows_of(own)[0]
        == text_windows(TEXT, tokens=192, validation_tokens=16, validation=TEXT).training.tolist()[
            :10
        ]
    )


def test_running_out_of_data_is_an_error():
    with pytest.raises(
        OutOfDataError, match=r"192000 tokens|1920\d+ tokens .* were asked for, but"
    ):
        text_windows(TEXT, tokens=192_000)
    with pytest.raises(OutOfDataError, match="were asked for, but"):
        text_windows(TEXT, tokens=10**30)
    with pytest.raises(OutOfDataError, match="hold 0 windows"):
        text_windows(iter([{"text": "Tom"}]))
    with pytest.raises(OutOfDataError, match="would be for validation"):
        text_windows("The dog saw the cat. " * 8, tokens=None)
    with pytest.raises(PromptError, match="how much of a stream"):
        text_windows(iter([TEXT]), tokens=None)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (3.5, "got float"),
        (b"bytes", "got bytes"),
        ([3.5], "got float among them"),
        ([{"body": "x"}], "the rows have body, but no 'text'"),
        (torch.zeros(4, 16), "whole numbers"),
        (torch.zeros(4, 8, dtype=torch.long), "rows of 8"),
        (torch.full((20, 16), 10**6), "ids are from 0"),
    ],
)
def test_what_is_no_text_is_named(texts, message):
    with pytest.raises(PromptError, match=message):
        text_windows(texts)


def test_a_fit_on_text_runs(tmp_path):
    model = zoo.text_model(zoo.BACKENDS[0])
    path = tmp_path / "prose.txt"
    path.write_text(TEXT, encoding="utf-8")
    tuned = quick(model, path, tokens=960)
    assert tuned.record["fit"]["training_tokens"] == 960
    assert len(tuned.record["data_sha256"]) == 64


# Interrupted


def test_T15_five_steps_and_five_more_are_ten(tmp_path, monkeypatch):
    model = zoo.build(zoo.BACKENDS[0])
    for optimizer in ("muon", "adam", "sgd"):
        options = {"steps": 10, "optimizer": optimizer, "look_every": 3}
        whole = quick(model, **options)
        folder = tmp_path / optimizer
        taken = []
        step = fit.take_step

        def five_and_no_more(*args, step=step, taken=taken):
            if len(taken) == 5:
                raise KeyboardInterrupt
            taken.append(1)
            return step(*args)

        monkeypatch.setattr(fit, "take_step", five_and_no_more)
        with pytest.raises(KeyboardInterrupt):
            quick(model, folder=folder, save_every=1, **options)
        monkeypatch.setattr(fit, "take_step", step)
        counted = []
        monkeypatch.setattr(fit, "take_step", lambda *a, s=step, c=counted: c.append(1) or s(*a))
        resumed = quick(model, folder=folder, save_every=1, **options)
        monkeypatch.setattr(fit, "take_step", step)
        assert len(counted) == 5
        assert same(resumed, whole)
        assert resumed.record == whole.record
        # The state stays until the lens is written there, and then goes.
        again = quick(model, folder=folder, save_every=1, **options)
        assert same(again, whole)
        quick(model, steps=2).save(folder)
        assert (folder / resume.STATE).exists()
        resumed.save(folder)
        assert not (folder / resume.STATE).exists()


def test_control_c_keeps_the_step_that_is_running_and_a_second_one_does_not_wait(
    tmp_path, monkeypatch
):
    model = zoo.build(zoo.BACKENDS[0])
    whole = quick(model, steps=6)
    step, times = fit.take_step, 1

    def pressed(*args):
        for _ in range(times if args[2] == 3 else 0):
            signal.raise_signal(signal.SIGINT)
        return step(*args)

    monkeypatch.setattr(fit, "take_step", pressed)
    with pytest.raises(KeyboardInterrupt, match="as of step 4 of 6; the same call continues"):
        quick(model, steps=6, folder=tmp_path / "once")
    assert resume.read(tmp_path / "once")[0]["step"] == 4
    for folder, times in ((tmp_path / "twice", 2), (None, 1)):  # noqa: B007
        with pytest.raises(KeyboardInterrupt) as stop:
            quick(model, steps=6, folder=folder)
        assert not stop.value.args
    assert resume.read(tmp_path / "twice")[0]["step"] == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    times = 0
    assert same(quick(model, steps=6, folder=tmp_path / "once"), whole)


def test_a_file_that_is_not_utf8_is_named_and_a_byte_order_mark_is_no_token(tmp_path):
    model = zoo.text_model(zoo.BACKENDS[0])
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 " * 300)
    with pytest.raises(PromptError, match="latin.txt is not UTF-8 text"):
        rp.fit_tuned_lens(model, path, steps=0, length=16, progress=False)
    view = rp.ModelView(model)
    read = []
    for name, start in (("plain.txt", b""), ("marked.txt", b"\xef\xbb\xbf")):
        (tmp_path / name).write_bytes(start + b"the cat sat on the mat. " * 60)
        read.append(
            data.read_windows(view, tmp_path / name, length=16, tokens=64, validation_tokens=16)
        )
    assert torch.equal(read[0].training, read[1].training)


CHILD = """
import sys
sys.path.insert(0, {tests!r})
import zoo, zoo_lens, resid_patching as rp
model = zoo.build(zoo.BACKENDS[0])
tuned = rp.fit_tuned_lens(
    model, zoo_lens.random_windows(60), length=16, validation_tokens=160, steps=150,
    step_tokens=20, step_windows=3, look_every=7, patience=100, progress=False,
    folder={state!r}, save_every=1)
tuned.save({out!r})
"""


def start(state, out):
    code = CHILD.format(tests=os.path.dirname(__file__), state=str(state), out=str(out))
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)


@pytest.mark.once
@pytest.mark.full
def test_a_fit_killed_three_times_at_random_steps_is_the_unbroken_one(tmp_path):
    unbroken = start(tmp_path / "a", tmp_path / "lens_a")
    assert unbroken.wait() == 0, unbroken.stderr.read()
    reached = []
    for attempt in range(3):
        wanted = (reached[-1] if reached else 0) + random.Random(attempt).randint(5, 35)
        child = start(tmp_path / "b", tmp_path / "lens_b")
        while child.poll() is None:
            try:
                about, _ = resume.read(tmp_path / "b")
            except LensFormatError:  # pragma: no cover - a file that is not whole
                child.kill()
                raise
            if about is not None and about["step"] >= wanted:
                child.send_signal(signal.SIGKILL)
                break
            time.sleep(0.02)
        assert child.wait() == -signal.SIGKILL, child.stderr.read()
        reached.append(resume.read(tmp_path / "b")[0]["step"])
    assert reached == sorted(set(reached)) and 0 < reached[0] and reached[-1] < 150
    last = start(tmp_path / "b", tmp_path / "lens_b")
    assert last.wait() == 0, last.stderr.read()
    model = zoo.build(zoo.BACKENDS[0])
    left, right = (rp.TunedLens.load(tmp_path / f"lens_{n}", model) for n in "ab")
    assert same(left, right) and left.record == right.record


def test_the_state_of_another_fit_is_refused(tmp_path, monkeypatch):
    model = zoo.build(zoo.BACKENDS[0])
    step = fit.take_step

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(fit, "take_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quick(model, folder=tmp_path)
    monkeypatch.setattr(fit, "take_step", step)
    with pytest.raises(LensMismatchError, match="with seed = 0, but this one has 1"):
        quick(model, folder=tmp_path, seed=1)
    with pytest.raises(LensMismatchError, match="with data = "):
        quick(model, zoo_lens.random_windows(60, seed=5), folder=tmp_path)
    with pytest.raises(LensMismatchError, match="with optimizer = 'muon'"):
        quick(model, folder=tmp_path, optimizer="adam")
    (tmp_path / resume.STATE).write_text("nothing")
    with pytest.raises(LensFormatError, match="cannot be read as the state"):
        quick(model, folder=tmp_path)


def test_held_tokens_give_the_mean_kl_of_a_lens():
    model = zoo.build(zoo.BACKENDS[0])
    view = rp.ModelView(model)
    tokens = zoo_lens.random_windows(4, 8)
    tuned = zoo_lens.random_lens(model)
    held = Held.of(view, tokens, site_rows("resid_pre", 3)[:-1])
    expected = tuned(rp.capture(model, tokens)).kl.values[:-1, :, 1:].flatten(1).mean(1)
    for layer in range(3):
        found = held.kl(layer, tuned.weight[layer].detach(), tuned.bias[layer].detach())
        assert found == pytest.approx(float(expected[layer]), abs=1e-10)


# A model over several devices


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_fit_of_a_model_split_over_devices_is_that_of_the_whole_model(name):
    whole = quick(zoo.fresh_named(name, dtype=torch.float32))
    with accelerator.present():
        model = zoo.fresh_named(name, dtype=torch.float32)
        upper = torch.nn.ModuleList([*model.blocks[1:], model.ln_final, model.unembed])
        upper.cfg = types.SimpleNamespace()
        accelerator.move(upper)
        for block in model.blocks[1:]:  # as accelerate's hooks do
            block.register_forward_pre_hook(
                lambda _, *given: tree_map(
                    lambda x: x.to(accelerator.DEVICE) if isinstance(x, torch.Tensor) else x, given
                ),
                with_kwargs=True,
            )
        split = quick(model)
        assert split.weight.device == accelerator.DEVICE
        assert_close(split.weight.cpu(), whole.weight, 0)
        assert_close(split.bias.cpu(), whole.bias, 0)
