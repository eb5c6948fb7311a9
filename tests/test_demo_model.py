"""The shipped model: what its card says, and the circuit that its answers rest on."""

import importlib.util
import re
from pathlib import Path

import pytest

import resid_patching as rp

REPOSITORY = Path(__file__).resolve().parent.parent


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
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


@pytest.mark.parametrize("seed", [0, 1])
def test_knocking_out_the_heads_found_destroys_accuracy_and_others_do_not(seed):
    found = script("knock_out").knock_out(n_prompts=64, n_heads=2, seed=seed)
    assert found["clean"][0] >= 0.95
    assert found["found"][1] < 0.5 + 0.1
    assert all(accuracy >= 0.8 for _, accuracy, _ in found["controls"])
