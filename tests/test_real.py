"""A real language model: SmolLM2-135M solves an indirect-object prompt, and the rows say how."""

import functools

import pytest
import torch
import zoo

import resid_patching as rp
from resid_patching.models import ModelView

pytestmark = pytest.mark.real
backends = pytest.mark.parametrize("backend", zoo.BACKENDS)

PROMPT = "When Mary and John went to the store, John gave a drink to"


@functools.cache
def load(folder, backend):
    return rp.load(folder, backend=backend)


@pytest.fixture
def run(smollm2_dir, backend):
    return rp.capture(load(smollm2_dir, backend), PROMPT)


@backends
def test_the_top_prediction_is_mary(run):
    best = run.logits_at(-1)[0, 0].argmax()
    assert run.view.tokenizer.decode([int(best)]) == " Mary"


@pytest.mark.parametrize("by", zoo.GRAINS)
@backends
def test_the_rows_sum_to_the_logit_difference(run, by):
    dla = rp.direct_logit_attribution(run, " Mary", " John", by=by)
    logits = run.logits_at(-1)[0, 0]
    difference = float(logits[dla.answers[0]] - logits[dla.foils[0]])
    assert float(dla.gap) < 1e-3
    assert float(dla.total) == pytest.approx(difference, abs=1e-3)
    assert difference > 1
    assert dla.foil_texts == (" John",)


@backends
def test_every_position_is_attributed(run):
    dla = rp.direct_logit_attribution(run, " Mary", " John", by="head", positions=None)
    assert float(dla.gap.max()) < 1e-3


@backends
def test_a_mixed_batch_of_eight_equals_its_single_runs(smollm2_dir, backend):
    model = load(smollm2_dir, backend)
    texts = [PROMPT, "The dog", "3 + 5 =", "After the rain", "A", "Tom and Anna sat in the park"]
    texts += ["Once upon a time there was a", "When John and Mary went to the store, Mary gave"]
    run = rp.capture(model, texts)
    assert len(set(run.prompts.lengths)) > 4
    batch = rp.direct_logit_attribution(run, " Mary", " John", by="head")
    for row, text in enumerate(texts):
        alone = rp.direct_logit_attribution(rp.capture(model, text), " Mary", " John", by="head")
        torch.testing.assert_close(batch.values[:, row], alone.values[:, 0], rtol=0, atol=1e-4)


@backends
def test_the_text_begins_with_one_bos_and_the_answer_is_one_token(run):
    assert run.prompts.bos_id == run.view.tokenizer.bos_token_id
    assert run.prompts.token_texts[0][1:4] == ("When", " Mary", " and")
    assert run.prompts.tokens[0].tolist().count(run.prompts.bos_id) == 1


@backends
def test_the_view_reads_the_model_as_it_is(run):
    view: ModelView = run.view
    assert (view.n_layers, view.n_heads, view.n_kv_heads, view.d_model) == (30, 9, 3, 576)
    assert view.final_norm.kind == "RMS" and not view.parallel and not view.has_pos_embed
    assert torch.equal(view.W_U, view.model.W_E.T)
