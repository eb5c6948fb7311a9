"""Every analysis keeps to the model's device and dtype, whatever the caller's settings are.

There is no accelerator on most machines that run this, so one is simulated (`accelerator`), which
refuses what a real one refuses. Where there is one, tests marked `gpu` run the identities of
`scripts/check_device.py` on it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerator
import pytest
import torch
import zoo
from torch import Tensor

import resid_patching as rp

pytestmark = pytest.mark.full
BASE = [[1, 2, 3, 4, 5], [7, 8, 9, 1, 2]]
SOURCE = [[2, 2, 5, 4, 5], [7, 3, 9, 4, 2]]
ANSWER, FOIL = 3, 4
METRIC = rp.logit_diff(ANSWER, FOIL)
TARGETS = ("attn.1", "mlp.0", "resid_post.1", "1.1.q", "1.0.k", "mlp.1.3", "attn.1.bias", "embed")

Found = dict[str, tuple[Tensor, str]]
"""The values of each analysis, and in words how they were computed."""


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    if name == "hooked":
        return zoo.fresh("hooked", dtype=dtype)
    return zoo.fresh_named(name, dtype=dtype)


def results(model: Any, folder: Path) -> Found:
    """Every analysis of a model."""
    run, source = rp.capture(model, BASE), rp.capture(model, SOURCE)
    return {
        name: given if isinstance(given, tuple) else _read(given)
        for part in (_of_one_run(run), _of_changed_runs(run, source), _of_lenses(run, folder))
        for name, given in part
    }


def _read(result: Any) -> tuple[Tensor, str]:
    result.to_frame()
    return result.values, f"{result.provenance.plan} {getattr(result, 'routes', '')}"


def _of_one_run(run: rp.Run) -> Iterator[tuple[str, Any]]:
    last = rp.writers(run.view.model)[-1]
    run.fetch_all(rp.writers(run.view.model))
    yield "capture", (run.fetch(last), "")
    yield "logits", (run.logits_at(None), "")
    for by in zoo.GRAINS:
        yield f"attribution by {by}", rp.direct_logit_attribution(run, ANSWER, FOIL, by=by)
    yield "attribution against the mean", rp.direct_logit_attribution(run, ANSWER)
    yield "parts", (rp.decompose(run, by="component").vectors(), "")
    yield "stream", rp.stream_report(run)
    yield "scaled stream", rp.stream_report(run, rp.WriteScale(0.5))


def _of_changed_runs(run: rp.Run, source: rp.Run) -> Iterator[tuple[str, Any]]:
    heads = rp.heads(run.view.model)
    kinds = {
        "zero": (rp.Zero(), METRIC),
        "mean": (rp.Mean(source, over=("batch",)), rp.loss()),
        "resample": (rp.Resample(source), rp.kl()),
        "shuffle": (rp.Resample(source, pairing="shuffle", seed=0), rp.prob(ANSWER)),
    }
    for name, (kind, metric) in kinds.items():
        effect = rp.ablate(run, [*heads, *TARGETS], kind, metric=metric)
        yield name, effect
        yield f"{name}, direct", (effect.direct, "")
    for route in ("full", "replay"):
        yield route, rp.ablate(run, list(TARGETS), rp.Zero(), metric=METRIC, routes=[route])
    yield (
        "each position",
        rp.ablate(run, "resid_pre.1", rp.Resample(source), metric=METRIC, positions="each"),
    )
    for mlps in ("freeze", "recompute"):
        for to in ("logits", ["2.0.q", "2.1.v"]):
            how = rp.Path(to=to, using=rp.Resample(source), mlps=mlps)
            yield f"path to {to}, {mlps}", rp.ablate(run, heads, how, metric=METRIC, positions=-1)


def _of_lenses(run: rp.Run, folder: Path) -> Iterator[tuple[str, Any]]:
    lens = rp.logit_lens(run)
    scalars = ("entropy", "kl", "cross_entropy", "prob", "rank")
    yield from lens.measure(*scalars, top=3, tokens=ANSWER).items()
    yield "lens logits", (lens.logits(layer="resid_post.1"), "")
    yield "marginal bias", lens.marginal_bias()
    model, states = run.view.model, run.fetch(rp.parse("resid_post.1"))
    tuned = _fitted(model, folder)
    yield "tuned lens", tuned(run).kl
    yield "tuned lens beside the logit lens", tuned(run).js(lens)
    yield "tuned logits", (tuned.logits(model, states, "resid_post.1").detach(), "")


def _fitted(model: Any, folder: Path) -> rp.TunedLens:
    """A lens after regression and steps, written and read back."""
    generator = torch.Generator("cpu").manual_seed(0)
    ids = torch.randint(zoo.D_VOCAB, (12, 16), generator=generator, device="cpu")
    settings: dict[str, Any] = {"steps": 4, "step_tokens": 16, "length": 16, "progress": False}
    lens = rp.fit_tuned_lens(model, ids, validation_tokens=32, folder=folder, **settings)
    lens.save(folder)
    return rp.TunedLens.load(folder, model)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Found]:
    """What the analyses give on the CPU with torch as it comes."""

    @functools.cache
    def of(name: str, dtype: torch.dtype) -> Found:
        return results(model_of(name, dtype), tmp_path_factory.mktemp("lens"))

    return of


def assert_same(found: Found, expected: Found, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, (values, how) in expected.items():
        ours, words = found[name]
        assert words == how, name
        assert ours.dtype == values.dtype, name
        scale = float(values.nan_to_num().abs().max())
        torch.testing.assert_close(
            ours.to("cpu"),
            values,
            rtol=0,
            atol=tolerance * scale,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


# On a device


MODELS = [*zoo.BACKENDS[:-1], "gpt2", "llama_grouped"]


def assert_on_the_device(found: Found) -> None:
    away = [n for n, (values, _) in found.items() if not isinstance(values, accelerator.There)]
    assert away == ["marginal bias"] * ("marginal bias" in away)  # a sum in float64


@pytest.mark.parametrize("name", MODELS[:-1])
def test_analyses_stay_on_the_models_device(
    name: str, expected: Callable[..., Found], tmp_path: Path
) -> None:
    model = model_of(name)
    with accelerator.present():
        found = results(accelerator.move(model), tmp_path)
    assert_on_the_device(found)
    assert_same(found, expected(name, torch.float32), 1e-5)


def test_a_device_without_float64_that_is_the_callers_default(
    expected: Callable[..., Found], tmp_path: Path
) -> None:
    model = model_of("llama_grouped", torch.bfloat16)
    with accelerator.present(float64=False), accelerator.DEVICE:
        found = results(accelerator.move(model), tmp_path)
    assert_on_the_device(found)
    assert_same(found, expected("llama_grouped", torch.bfloat16), 2e-2)


def test_the_simulated_device_refuses_what_a_real_one_does() -> None:
    with accelerator.present(float64=False):
        there = torch.arange(3.0, device=accelerator.DEVICE)
        assert torch.equal(
            (there + torch.tensor(1.0))[torch.tensor([2])].cpu(), torch.tensor([3.0])
        )
        with pytest.raises(RuntimeError, match="on the CPU"):
            there + torch.ones(3)
        with pytest.raises(RuntimeError, match="indexed from"):
            torch.ones(3)[there.long()]
        with pytest.raises(RuntimeError, match="generator"):
            torch.rand(2, generator=torch.Generator(), device=accelerator.DEVICE)
        with pytest.raises(TypeError, match="float64"):
            there.double()
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()


# Settings of the caller


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SETTINGS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "inference mode": torch.inference_mode,
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_the_caller_change_no_number(
    setting: str, expected: Callable[..., Found], tmp_path: Path
) -> None:
    model = model_of("gpt2")
    with SETTINGS[setting]():
        found = results(model, tmp_path)
    assert_same(found, expected("gpt2", torch.float32), 0.0)


def test_a_run_begun_in_inference_mode_goes_on_outside(tmp_path: Path) -> None:
    model = model_of("gpt2")
    with torch.inference_mode():
        run = rp.capture(model, BASE)
        first = rp.ablate(run, "1.1", rp.Resample(rp.capture(model, SOURCE)), metric=METRIC)
        tuned = _fitted(model, tmp_path)
        assert bool(tuned(run).kl.values.isfinite().all())
    again = rp.ablate(run, "1.1", rp.Resample(rp.capture(model, SOURCE)), metric=METRIC)
    assert torch.equal(again.values, first.values)
    assert_same({"kl": _read(tuned(run).kl)}, {"kl": _read(tuned(rp.capture(model, BASE)).kl)}, 0.0)


# Sums in float32


@pytest.mark.parametrize("name", MODELS)
def test_direct_effects_of_a_bfloat16_model_are_of_float32_sums(name: str) -> None:
    model = model_of(name, torch.bfloat16)
    run = rp.capture(model, BASE)
    heads = rp.heads(model)
    found = rp.ablate(run, heads, rp.Zero(), metric=METRIC, positions=-1).direct
    view = run.view
    last = run.fetch(rp.parse(f"resid_post.{view.n_layers - 1}"))[:, -1].double()
    norm, answer = view.final_norm, view.W_U[:, ANSWER].double() - view.W_U[:, FOIL].double()

    def score(states: Tensor) -> Tensor:
        centred = states - states.mean(-1, keepdim=True) if norm.kind == "LN" else states
        sigma = (centred.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
        return (centred / sigma * norm.gain.double() + norm.bias.double()) @ answer

    with torch.no_grad():
        for number, head in enumerate(heads):
            z = run.fetch(head)[:, -1, head.head].double()
            write = z @ view.W_O(head.layer)[head.head].double()
            exact = score(last - write) - score(last)
            torch.testing.assert_close(found[number].double(), exact, rtol=0, atol=1e-5)


# The check of a device


@pytest.fixture(scope="module")
def check_device() -> Any:
    """The script, as a module."""
    folder = str(Path(__file__).resolve().parent.parent / "scripts")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("check_device")
    finally:
        sys.path.remove(folder)


def test_the_check_of_a_device_passes_on_the_cpu(
    check_device: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    arguments = ["--device", "cpu", "--dtype", "bfloat16", "--quick", "--json", str(report)]
    assert check_device.main(arguments) == 0
    found = json.loads(report.read_text(encoding="utf-8"))["identities"]
    assert len(found) == 2 * 32
    assert capsys.readouterr().out.splitlines()[-1] == "all 64 identities hold on cpu"
    # None may hold because nothing was compared.
    assert sum(one["error"] > 0 for one in found) > 40


def test_the_check_of_a_device_names_the_identity_that_fails(
    check_device: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from resid_patching.lens import ridge, steps

    through_norm, add = steps._through_norm, ridge.Statistics.add

    def a_little_off(*arguments: Any) -> Tensor:
        return through_norm(*arguments) * (1 + 1e-4)

    def forgetful(self: Any, states: Any, last: Tensor) -> None:
        add(self, [state[1:] for state in states], last[1:])

    identities = sys.modules["devices.identities"]
    checks = (identities.ridge_statistics, identities.kl_step, identities.resampling)
    monkeypatch.setattr(identities, "CHECKS", checks)
    monkeypatch.setattr(steps, "_through_norm", a_little_off)
    arguments = ["--device", "cpu", "--dtype", "float64", "--quick"]
    assert check_device.main(arguments) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("2 of 12 identities fail, first (GPT-2, float64): gradient of a KL step")
    monkeypatch.setattr(ridge.Statistics, "add", forgetful)
    assert check_device.main(arguments) == 1
    assert "ridge statistics = float64" in capsys.readouterr().out.splitlines()[-1]


def test_an_identity_that_cannot_be_computed_fails(check_device: Any) -> None:
    identities = sys.modules["devices.identities"]

    def ridge_statistics(subject: Any) -> Any:
        raise RuntimeError("tensors on two devices")

    checks, identities.CHECKS = identities.CHECKS, (ridge_statistics,)
    try:
        (verdict, _) = check_device.verdicts(torch.device("cpu"), [torch.float32], quick=True)
    finally:
        identities.CHECKS = checks
    assert not verdict.finding.holds
    assert verdict.finding.why == "RuntimeError: tensors on two devices"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_identities_hold_on_the_accelerator(check_device: Any, dtype: str) -> None:
    device = check_device.default_device()
    dtypes = check_device._dtypes(dtype, device)
    wrong = [v for v in check_device.verdicts(device, dtypes) if not v.finding.holds]
    assert wrong == []
