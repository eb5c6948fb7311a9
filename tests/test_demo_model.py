"""The shipped model: what its card says, and the circuit that its answers rest on."""

import importlib.util
import random
import re
import sys
from pathlib import Path

import pytest

import resid_patching as rp
from resid_patching.errors import LensMismatchError
from resid_patching.models import DEMO_FOLDER

REPOSITORY = Path(__file__).resolve().parent.parent


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its dataclasses look for themselves
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model():
    return rp.load("demo")


@pytest.mark.parametrize("prepend_bos", [True, False])
@pytest.mark.parametrize(("giver", "answer"), [("John", " Mary"), ("Mary", " John")])
def test_the_recipient_is_the_top_prediction(model, giver, answer, prepend_bos):
    prompt = f"When Mary and John went to the store, {giver} gave a drink to"
    run = rp.capture(model, prompt, prepend_bos=prepend_bos)
    top = int(run.logits_at(-1)[0, 0].argmax())
    assert model.tokenizer.decode([top]) == answer


def test_the_card_promises_what_is_asked_of_it():
    card = (REPOSITORY / "resid_patching" / "demo" / "README.md").read_text(encoding="utf-8")

    def figure(name: str) -> float:
        return float(re.search(rf"\| {re.escape(name)} \| ([\d.]+)", card)[1])

    assert figure("indirect object, with BOS: recipient's logit above giver's") >= 95
    assert figure("indirect object, with BOS: mean logit difference") >= 2


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1])
def test_knocking_out_the_heads_found_destroys_accuracy_and_others_do_not(seed):
    found = script("knock_out").knock_out(n_prompts=64, n_heads=2, seed=seed)
    assert found["clean"][0] >= 0.95
    assert found["found"][1] < 0.5 + 0.1
    assert all(accuracy >= 0.8 for _, accuracy, _ in found["controls"])


def test_the_shipped_lens_is_of_this_model_and_nearer_to_its_output_than_the_logit_lens(model):
    tuned = rp.TunedLens.load("demo", model)
    rng = random.Random(99)
    train = script("train_demo")
    texts = [train.write_document(rng, held_out=True) for _ in range(40)]
    run = rp.capture(model, texts)
    ours, plain = tuned(run).kl.values, rp.logit_lens(run).kl.values
    for row in range(4):
        assert ours[row].nanmean() < 0.6 * plain[row].nanmean()
    table = tuned.record["validation"]
    for kind in ("ridge", "tuned"):
        assert all(t < z for t, z in zip(table[kind], table["logit_lens"], strict=True))
    files = list((DEMO_FOLDER / "lens").iterdir())
    assert sum(file.stat().st_size for file in files) < 1.5e6


def test_the_shipped_lens_is_refused_on_folded_weights():
    with pytest.raises(LensMismatchError, match="centred"):
        rp.TunedLens.load("demo", rp.load("demo", processing="folded"))


def test_the_card_of_the_shipped_lens_shows_its_validation(model):
    table = rp.TunedLens.load("demo", model).record["validation"]
    card = (DEMO_FOLDER / "lens" / "README.md").read_text(encoding="utf-8")
    columns = (table["layers"], table["logit_lens"], table["ridge"], table["tuned"])
    for label, *values in zip(*columns, strict=True):
        assert f"| `{label}` | " + " | ".join(f"{value:.3f}" for value in values) + " |" in card
