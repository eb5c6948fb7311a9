"""Trained models of other authors: their published activations, and any prompt attributed.

gpt_nano_sort (bbycroft/llm-viz, MIT) sorts six digits and comes with activations that its authors
recorded. slm4096 (kunalkohli/SLM_4096, MIT) is a GPT-2 with a tied head, babyllama_tok105
(EN10/BabyLlama, MIT) a Llama with grouped queries, both over characters.
"""

import functools

import numpy
import pytest
import torch
import zoo

import resid_patching as rp
from resid_patching.address import Head, HeadInput, Neuron, PosEmbed, Stream
from resid_patching.models import ModelView, report

pytestmark = pytest.mark.shared
backends = pytest.mark.parametrize("backend", zoo.BACKENDS)


@functools.cache
def load(folder, backend, processing="raw"):
    return rp.load(folder, backend=backend, processing=processing)


@pytest.fixture
def models(shared_dir):
    return shared_dir / "data" / "models"


@pytest.fixture
def golden(models):
    with numpy.load(models / "gpt_nano_sort" / "golden_activations.npz") as file:
        return {name: torch.from_numpy(file[name].astype(numpy.float32)) for name in file.files}


def assert_close(left, right, tolerance=1e-5):
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


@backends
def test_golden_stream_states_and_logits_come_out_of_a_capture(models, golden, backend):
    model = load(models / "gpt_nano_sort", backend)
    run = rp.capture(model, golden["idx"].long())
    for address, name in (
        (Stream(0, "pre"), "x"),
        (Stream(0, "mid"), "attnResid"),
        (Stream(0, "post"), "block0"),
        (Stream(1, "pre"), "block0"),
        (Stream(1, "post"), "block1"),
        (Stream(2, "post"), "block2"),
        (rp.parse("embed"), "tok_emb"),
        (rp.parse("attn.0"), "yProj"),
        (rp.parse("mlp.0"), "mlp"),
        (Neuron(0, 0), "gelu"),
    ):
        assert_close(run.fetch(address), golden[name])
    assert_close(run.fetch(PosEmbed())[:1], golden["pos_emb"])
    for which in "qkv":
        assert_close(run.fetch(HeadInput(0, 0, which)), golden[which].movedim(1, 2))
    assert_close(run.fetch(Head(0, 0)).flatten(2), golden["y"])
    assert_close(run.fetch(rp.parse("0.0.pattern")), golden["attSm"])
    assert_close(run.logits_at(None), golden["lm_head"])
    assert_close(ModelView(model).readout(golden["block2"]).detach(), golden["lm_head"])


@backends
def test_golden_logit_differences_are_attributed(models, golden, backend):
    for processing in ("raw", "folded"):
        model = load(models / "gpt_nano_sort", backend, processing)
        run = rp.capture(model, golden["idx"].long())
        for by in zoo.GRAINS:
            dla = rp.direct_logit_attribution(run, 0, 2, by=by, positions=None)
            expected = golden["lm_head"][..., 0] - golden["lm_head"][..., 2]
            assert_close(dla.total, expected, 1e-4)
            assert float(dla.gap.max()) < 1e-4


PROMPTS = {
    "gpt_nano_sort": [[0, 0, 2, 1, 0, 1], [2, 1, 0], [1], [2, 2, 1, 1, 0, 0, 0, 0, 1, 1, 2]],
    "slm4096": ["To be, or not to be", "A", "The old man said: go home.", "the"],
    "babyllama_tok105": ["Once upon a time", "A", "The dog and the cat were friends.", "the"],
}


@pytest.mark.parametrize("name", PROMPTS)
@backends
def test_any_prompt_is_attributed(models, backend, name):
    for processing in ("raw", "folded"):
        model = load(models / name, backend, processing)
        assert (str(report(ModelView(model)).processing) == "raw") == (processing == "raw")
        run = rp.capture(model, PROMPTS[name])
        for by in zoo.GRAINS:
            for foil in (2, None):
                dla = rp.direct_logit_attribution(run, 1, foil, by=by, positions=None)
                assert float(dla.gap.nan_to_num().max()) < 1e-4
                for row, tokens in enumerate(run.prompts.token_texts):
                    ids = run.prompts.tokens[row, : len(tokens)].tolist()
                    logits = zoo.plain_logits(model, ids)
                    other = logits.mean(-1) if foil is None else logits[:, foil]
                    assert_close(dla.total[row, : len(tokens)], logits[:, 1] - other, 1e-4)


@pytest.mark.parametrize("name", ["slm4096", "babyllama_tok105"])
@backends
def test_text_goes_in_and_characters_come_out(models, backend, name):
    run = rp.capture(load(models / name, backend), "the cat")
    characters = "".join(run.prompts.token_texts[0])
    assert characters.removeprefix("<s>").lstrip() == "the cat"
    dla = rp.direct_logit_attribution(run, "s", "t")
    assert dla.answer_texts == ("s",) and dla.foil_texts == ("t",)
