"""Metrics of sets of tokens."""

import pytest
import torch
import zoo

import resid_patching as rp
from resid_patching.errors import SweepMismatchError, TokenError

TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 8, 9, 7, 9]])
SETS = [rp.any_of(3, 6, logits="mean"), 7, rp.any_of(1, 2, 8, logits="logsumexp")]
backends = pytest.mark.parametrize("backend", zoo.BACKENDS)


@pytest.fixture
def run(backend):
    model = zoo.fresh("hooked") if backend == "hooked" else zoo.named("gpt2_untied")
    return rp.capture(model, TOKENS)


def last_logits(run):
    return run.logits_at(-1)[:, 0]


@backends
def test_probabilities_of_a_set_add_up(run):
    p = last_logits(run).softmax(-1)
    found = rp.measure(run, rp.prob(rp.any_of(3, 6, 11)))
    assert torch.allclose(found, p[:, [3, 6, 11]].sum(-1), rtol=0, atol=1e-12)
    sets = [rp.any_of(3, 6), 7, rp.any_of(1, 2, 8)]
    expected = torch.stack([p[0, [3, 6]].sum(), p[1, 7], p[2, [1, 2, 8]].sum()])
    assert torch.allclose(rp.measure(run, rp.prob(sets)), expected, rtol=0, atol=1e-12)


@backends
@pytest.mark.parametrize("how", ["mean", "logsumexp"])
def test_logits_of_a_set_are_put_together_as_the_caller_says(run, how):
    each = last_logits(run)[:, [3, 6, 11]]
    expected = each.mean(-1) if how == "mean" else each.logsumexp(-1)
    found = rp.measure(run, rp.logit(rp.any_of(3, 6, 11, logits=how)))
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


@backends
def test_a_difference_of_sets_of_several_sizes(run):
    logits = last_logits(run)
    answer = torch.stack(
        [logits[0, [3, 6]].mean(), logits[1, 7], logits[2, [1, 2, 8]].logsumexp(0)]
    )
    foil = logits[:, [4, 5]].mean(-1)
    metric = rp.logit_diff(SETS, rp.any_of(4, 5, logits="mean"))
    assert torch.allclose(rp.measure(run, metric), answer - foil, rtol=0, atol=1e-12)


@backends
def test_an_effect_on_a_set_is_that_of_a_function_of_logits(run):
    def ours(logits, prompts):
        p = logits[:, -1].softmax(-1)
        wanted = {0: [3, 6], 1: [7], 2: [1, 2, 8]}
        return torch.stack([p[n, wanted[int(i)]].sum() for n, i in enumerate(prompts)])

    targets = rp.heads(run.view)
    metric = rp.prob([rp.any_of(3, 6), 7, rp.any_of(1, 2, 8)])
    found = rp.ablate(run, targets, rp.Zero(), metric=metric)
    expected = rp.ablate(run, targets, rp.Zero(), metric=ours)
    assert torch.allclose(found.total, expected.total, rtol=0, atol=1e-12)
    assert torch.allclose(found.direct, expected.direct, rtol=0, atol=1e-12)


def test_one_token_is_the_set_of_it():
    run = rp.capture(zoo.named("gpt2_untied"), TOKENS)
    for metric in (rp.logit, rp.prob):
        alone = rp.measure(run, metric(3))
        assert rp.measure(run, metric(rp.any_of(3, logits="logsumexp"))).allclose(alone)


def test_which_number_of_several_logits_is_asked_for():
    for metric in (rp.logit, lambda answer: rp.logit_diff(3, answer)):
        with pytest.raises(ValueError, match=r"logits='mean'.* or .*logits='logsumexp'"):
            metric(rp.any_of(1, 2))


def test_a_set_that_cannot_be_scored_is_refused():
    run = rp.capture(zoo.named("gpt2_untied"), TOKENS)
    with pytest.raises(TokenError, match="3 and 3 of a set are the same token"):
        rp.measure(run, rp.prob(rp.any_of(3, 1, 3)))
    with pytest.raises(TokenError, match="2 tokens were given for 3 prompts"):
        rp.measure(run, rp.prob([rp.any_of(3, 1), 4]))
    with pytest.raises(TypeError, match="texts or ids"):
        rp.any_of()


def test_a_metric_says_what_it_scores():
    metric = rp.logit_diff(rp.any_of(" Mary", " Marie", logits="mean"), " John")
    assert str(metric) == "logit difference any of ' Mary', ' Marie' (mean) - ' John'"
    assert str(rp.prob(rp.any_of(1, 2, 3, 4))) == "probability of any of 1, 2, 3 and 1 more"
    assert repr(rp.loss()) == "Metric(loss per token, in nats)"


def test_rows_of_a_sweep_on_other_tokens_are_refused(tmp_path):
    """Also where the metric's name shows none of them."""
    run = rp.capture(zoo.named("gpt2_untied"), TOKENS)

    def sweep(answers):
        file = tmp_path / "rows.jsonl"
        return rp.ablate(run, ["1.1"], rp.Zero(), metric=rp.prob(answers), rows=file)

    sweep([3, 4, 5])
    with pytest.raises(SweepMismatchError, match="tokens scored"):
        sweep([3, 4, 6])
