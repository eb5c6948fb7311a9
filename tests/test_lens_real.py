"""Lenses on a real language model: SmolLM2-135M, fitted on Python's manual pages.

At most 16,384 training tokens; the figures are held-out KL(final || lens), in nats.
"""

import functools
import os
import pydoc_data.topics
import random

import pytest
import torch
import zoo

import resid_patching as rp
from resid_patching.lens.data import read_windows
from resid_patching.lens.harvest import Held, harvest
from resid_patching.lens.loop import Layer, Plan, equip, take_step, windows_of
from resid_patching.lens.tuned import site_rows
from resid_patching.lens.unembed import Unembedding

pytestmark = pytest.mark.real

TOKENS, HELD_OUT, LENGTH = 16_384, 1_024, 128
STEPS = {"steps": 24, "step_tokens": 256, "step_windows": 4}
HALF = 15


@pytest.fixture(autouse=True)
def every_core():
    """The other tests' models are tiny and take one thread; this one is not."""
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(before)


@functools.cache
def load(folder):
    return rp.load(folder, backend=zoo.BACKENDS[0])


def pages(seed):
    """All manual pages, in an order of the seed's."""
    texts = list(pydoc_data.topics.topics.values())
    random.Random(seed).shuffle(texts)
    return texts


@functools.cache
def fitted(folder, seed, steps):
    return rp.fit_tuned_lens(
        load(folder),
        pages(seed),
        tokens=TOKENS,
        validation_tokens=HELD_OUT,
        length=LENGTH,
        seed=seed,
        progress=False,
        look_every=12,
        **{**STEPS, "steps": steps},
    )


@functools.cache
def never_seen(folder, seed):
    """Windows behind everything that the fit of this seed read."""
    view = rp.ModelView(load(folder))
    read = TOKENS + HELD_OUT + LENGTH * 8
    everything = read_windows(
        view, pages(seed), length=LENGTH, tokens=read + 4 * LENGTH, validation_tokens=LENGTH
    )
    return everything.training[-4:]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ridge_alone_is_at_most_three_tenths_of_the_logit_lens_at_every_translator(
    smollm2_dir, seed
):
    table = fitted(smollm2_dir, seed, STEPS["steps"] if seed == 0 else 0).record["validation"]
    assert len(table["ridge"]) == 30
    ratios = [r / z for r, z in zip(table["ridge"], table["logit_lens"], strict=True)]
    assert max(ratios) <= 0.3, ratios


def test_the_tuned_lens_beats_the_logit_lens_at_every_translator(smollm2_dir):
    tuned = fitted(smollm2_dir, 0, STEPS["steps"])
    run = rp.capture(load(smollm2_dir), never_seen(smollm2_dir, 0))
    found, plain = (
        lens.kl.values[:-1, :, 1:].flatten(1).mean(1) for lens in (tuned(run), rp.logit_lens(run))
    )
    assert (found < plain).all()
    assert float((found / plain).max()) < 0.5


def test_kl_steps_improve_on_ridge_wherever_they_are_kept(smollm2_dir):
    table = fitted(smollm2_dir, 0, STEPS["steps"]).record["validation"]
    better = [k < r for k, r in zip(table["tuned"], table["ridge"], strict=True)]
    assert all(k <= r for k, r in zip(table["tuned"], table["ridge"], strict=True))
    assert sum(better) >= 25, better


def test_on_equal_tokens_it_is_far_below_the_packages_recipe(smollm2_dir):
    """The tuned-lens package's own: SGD, rate 0.1, Nesterov 0.9, from zero, rate falling to 0."""
    tuned = fitted(smollm2_dir, 0, STEPS["steps"])
    view = rp.ModelView(load(smollm2_dir))
    windows = read_windows(view, pages(0), length=LENGTH, tokens=TOKENS, validation_tokens=HELD_OUT)
    plan = Plan(24, 256, 4, "sgd", 0.1, 1.0, 12, 3, seed=0)
    row = site_rows("resid_pre", 30)[HALF]
    zero = torch.zeros(576, 576), torch.zeros(576)
    layer = Layer(str(row), *(t.clone() for t in zero), 1.0, 0.0, *(t.clone() for t in zero))
    equip(layer, plan, 1.0)
    unembedding = Unembedding.of(view)
    for step in range(plan.steps):
        picked = windows.training[windows_of(len(windows.training), plan, step)]
        take_step([layer], plan, step, [harvest(view, picked, [row], logits=True)], unembedding)
    held = Held.of(view, windows.validation, [row])
    theirs = held.kl(0, layer.weight, layer.bias)
    assert tuned.record["validation"]["tuned"][HALF] <= 0.6 * theirs


def test_a_lens_of_a_real_model_comes_back_from_its_files(smollm2_dir, tmp_path):
    tuned = fitted(smollm2_dir, 0, STEPS["steps"])
    tuned.save(tmp_path)
    found = rp.TunedLens.load(tmp_path, load(smollm2_dir))
    assert torch.equal(found.weight, tuned.weight) and found.record == tuned.record
    parameters = 30 * (576**2 + 576) * 4
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) < parameters + 200_000
